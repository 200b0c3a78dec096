# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Activation checkpointing and ``torch.compile`` for the repeated blocks of a model.

A block is a member of an ``nn.Sequential`` or ``nn.ModuleList`` that has children of its own, such
as the blocks of Mobile-Former, ResNet, timm's networks and our decoders; of nested ones the
outermost. The convolutional heads of dense detectors are blocks too.

Only calls in training mode change: evaluation, copies of the model, parameter names and
checkpoints are the same. Blocks are compiled one by one because equal blocks share what is
compiled, and because matching, masks and losses between them are better left uncompiled.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from qbheat_det.core.environment import keep_freed_memory
from qbheat_det.modeling.contracts import FixedSizeModel

logger = logging.getLogger(__name__)
_LISTS = (nn.Sequential, nn.ModuleList)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_GRAPHS_PER_BLOCK = 8  # with and without padding and gradients, for one image or several


def apply_step_keys(cfg: CfgNode, model: nn.Module) -> None:
    """Applies ``SOLVER.KEEP_MEMORY``, ``SOLVER.COMPILE`` and ``MODEL.ACTIVATION_CHECKPOINTING``.

    The model is on its device, and not yet wrapped for distributed training.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    if cfg.SOLVER.KEEP_MEMORY and on_cpu and keep_freed_memory():
        logger.info("Steps reuse freed memory (SOLVER.KEEP_MEMORY False returns it)")
    if cfg.MODEL.ACTIVATION_CHECKPOINTING:
        logger.info(f"Activation checkpointing of {checkpoint_blocks(model)} blocks")
    if cfg.SOLVER.COMPILE:
        compile_blocks(model)


def find_blocks(
    module: nn.Module, name: str = "", *, inside_list: bool = False
) -> dict[str, nn.Module]:
    """Returns the blocks of a module by their names in the model, in its order."""
    is_list = isinstance(module, _LISTS)
    has_children = next(module.children(), None) is not None
    if isinstance(module, RetinaNetHead) or (inside_list and has_children and not is_list):
        return {name: module}
    blocks = {}
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        blocks.update(find_blocks(child, path, inside_list=is_list))
    return blocks


def checkpoint_blocks(model: nn.Module) -> int:
    """Makes each block store only its inputs for the backward pass; returns their number.

    Gradients are equal to the bit, dropout included, if the block itself is deterministic.
    BatchNorm's statistics are updated once a step.
    """
    blocks = find_blocks(model)
    for block in blocks.values():
        call_of(block).checkpointed = True
    return len(blocks)


def compile_blocks(model: nn.Module) -> int:
    """Makes the blocks run compiled in training, and returns their number; 0 without a compiler.

    Models of images of one size are compiled for that size, others for all sizes.
    """
    from torch._dynamo import config as dynamo_config  # takes seconds to import

    error = find_compiler_error(next(model.parameters()).device)
    if error:
        logger.warning(f"SOLVER.COMPILE has no effect: {error}")
        return 0
    blocks = find_blocks(model)
    dynamo_config.suppress_errors = True
    # Compiled calls of all blocks share one code object, for which PyTorch keeps few graphs.
    for limit in ("cache_size_limit", "accumulated_cache_size_limit"):
        graphs = max(getattr(dynamo_config, limit), _GRAPHS_PER_BLOCK * len(blocks))
        setattr(dynamo_config, limit, graphs)
    dynamic = not isinstance(model, FixedSizeModel)
    for block in blocks.values():
        call_of(block).compiled = torch.compile(block._call_impl, dynamic=dynamic)
    logger.info(f"{len(blocks)} blocks are compiled at their first calls, which takes minutes")
    return len(blocks)


def find_compiler_error(device: torch.device) -> str:
    """Compiles a small function and returns the compiler's error; "" if there is none."""
    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(lambda x: (2 * x).relu())(x).sum().backward()
    except Exception as error:  # PyTorch, Triton and the C++ compiler each have their own
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


class BlockCall:
    """Replaces a block's call in training, in the attribute that ``nn.Module.compile`` uses.

    Copies of the module, such as a moving average, do not have that attribute.

    Attributes:
        compiled: called instead of the block itself, if not None.
        checkpointed: whether only the inputs are stored for the backward pass.
    """

    def __init__(self, block: nn.Module) -> None:
        self.compiled: Callable[..., Any] | None = None
        self.checkpointed = False
        self._block = block
        self._norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the block."""
        block = self._block
        if not block.training:
            return block._call_impl(*args, **kwargs)
        call = self.compiled or block._call_impl
        if not (self.checkpointed and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        return checkpoint(
            call,
            *args,
            use_reentrant=False,  # the contexts are of the forward pass and the recomputation
            context_fn=lambda: (contextlib.nullcontext(), _preserved_statistics(self._norms)),
            **kwargs,
        )


def call_of(block: nn.Module) -> BlockCall:
    """Returns the ``BlockCall`` of a block, which it gets if it has none."""
    found = block._compiled_call_impl
    if not isinstance(found, BlockCall):
        found = block._compiled_call_impl = BlockCall(block)
    return found


@contextlib.contextmanager
def _preserved_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Lets BatchNorms update copies of their statistics, which the forward pass has updated."""
    pairs = [(norm, name) for norm in norms for name in _STATISTICS if norm.training]
    kept = [(norm, name, norm._buffers[name]) for norm, name in pairs if name in norm._buffers]
    for norm, name, buffer in kept:  # not dropped: as many tensors as in the forward pass are saved
        norm._buffers[name] = buffer.clone() if buffer is not None else None
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            norm._buffers[name] = buffer
