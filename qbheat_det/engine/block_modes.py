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
from detectron2.modeling.meta_arch.retinanet import RetinaNet, RetinaNetHead
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from qbheat_det.core.environment import forget_kernels, keep_freed_memory
from qbheat_det.modeling.contracts import FixedSizeModel

from .hooks import KeptMemory

logger = logging.getLogger(__name__)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_GRAPHS_PER_BLOCK = 8  # with and without padding and gradients, for one image or several


def apply_step_keys(cfg: CfgNode, model: nn.Module) -> KeptMemory | None:
    """Applies ``SOLVER.KEEP_MEMORY``, ``SOLVER.COMPILE`` and ``MODEL.ACTIVATION_CHECKPOINTING``.

    The model is on its device, and not yet wrapped for distributed training.

    Returns:
        What looks after the freed memory, if this process keeps it from now on.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    keeps = cfg.SOLVER.KEEP_MEMORY and on_cpu and keep_freed_memory()
    if keeps:
        logger.info("Steps reuse freed memory (SOLVER.KEEP_MEMORY False returns it)")
        if isinstance(
            model, RetinaNet
        ):  # an MF-DETR's step of more kernels became 1.15 times as long
            forget_kernels()
    set_block_modes(model, checkpointed=cfg.MODEL.ACTIVATION_CHECKPOINTING,
                    compiled=cfg.SOLVER.COMPILE)  # fmt: skip
    return KeptMemory() if keeps else None


def find_blocks(
    module: nn.Module, name: str = "", *, inside_list: bool = False
) -> dict[str, nn.Module]:
    """Returns the blocks of a module by their names in the model, in its order.

    Args:
        module: a model, or a part of one.
        name: of the module in the model; empty for the model itself.
        inside_list: the module is an element of a ``Sequential`` or ``ModuleList``, and so a block
            unless it is another one or has no children.
    """
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)
    has_children = next(module.children(), None) is not None
    if isinstance(module, RetinaNetHead) or (inside_list and has_children and not is_list):
        return {name: module}
    blocks = {}
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        blocks.update(find_blocks(child, path, inside_list=is_list))
    return blocks


def set_block_modes(
    model: nn.Module, *, checkpointed: bool = False, compiled: bool = False
) -> None:
    """Changes how the blocks of a model run in training, from now on.

    Args:
        model: not wrapped.
        checkpointed: each block stores only its inputs for the backward pass. Gradients are equal
            to the bit, dropout included, if the block itself is deterministic. BatchNorm's
            statistics are updated once a step.
        compiled: models of images of one size are compiled for that size, others for all sizes.
            Without a compiler, blocks run as they are, and the log says so.
    """
    if compiled and (error := find_compiler_error(next(model.parameters()).device)):
        logger.warning(f"SOLVER.COMPILE has no effect: {error}")
        compiled = False
    if not (checkpointed or compiled):
        return
    blocks = find_blocks(model)
    if compiled:
        _allow_graphs(_GRAPHS_PER_BLOCK * len(blocks))
        logger.info(f"{len(blocks)} blocks are compiled at their first calls, taking minutes")
    dynamic = not isinstance(model, FixedSizeModel)
    for block in blocks.values():
        plain = block._call_impl
        call = torch.compile(plain, dynamic=dynamic) if compiled else plain
        # Where ``nn.Module.compile`` puts a compiled call. Copies of a module, such as a moving
        # average, are without it.
        block._compiled_call_impl = _call_in_training(block, call, checkpointed)
    if checkpointed:
        logger.info(f"Activation checkpointing of {len(blocks)} blocks")


def find_compiler_error(device: torch.device) -> str:
    """Compiles a small function and returns the compiler's error; "" if there is none."""
    try:
        x = torch.ones(64, device=device, requires_grad=True)
        torch.compile(lambda x: (2 * x).relu())(x).sum().backward()
    except Exception as error:  # PyTorch, Triton and the C++ compiler each have their own
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def _allow_graphs(count: int) -> None:
    """Has PyTorch keep that many graphs, and run as it is what it cannot compile."""
    from torch._dynamo import config  # takes seconds to import

    config.suppress_errors = True
    # Compiled calls of all blocks share one code object, for which PyTorch keeps few graphs.
    for limit in ("cache_size_limit", "accumulated_cache_size_limit"):
        setattr(config, limit, max(getattr(config, limit), count))


def _call_in_training(
    block: nn.Module, call: Callable[..., Any], checkpointed: bool
) -> Callable[..., Any]:
    """Returns what replaces the call of a block: ``call`` in training, else the block's own."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return block._call_impl(*args, **kwargs)
        if not (checkpointed and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        return checkpoint(
            call,
            *args,
            use_reentrant=False,  # the contexts are of the forward pass and the recomputation
            context_fn=lambda: (contextlib.nullcontext(), _preserved_statistics(norms)),
            **kwargs,
        )

    return run


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
