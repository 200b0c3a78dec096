# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The repeated blocks of a model, and other ways to run them in training: compiled, checkpointed.

A block is a member of an ``nn.Sequential`` or ``nn.ModuleList`` that has parts of its own, such as
the blocks of Mobile-Former, ResNet and timm's networks, of MF-DETR's decoder and of that of
pre-training; of nested ones the outermost. So are the convolutional heads of dense detectors.

Only calls in training mode are changed: evaluation, copies of the model, the names of parameters
and what is saved are as without.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

_LISTS = (nn.Sequential, nn.ModuleList)
_Context = contextlib.AbstractContextManager[Any]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a model by their names in it, in its order."""
    return dict(_find(model, "", inside_list=False))


def checkpoint_blocks(model: nn.Module) -> int:
    """Makes each block keep only its inputs for the backward pass, and compute the rest again.

    Gradients are the same to the bit where the block itself repeats its bits, dropout included,
    and the statistics of BatchNorm move once a step.

    Returns:
        How many blocks there are.
    """
    blocks = find_blocks(model)
    for block in blocks.values():
        call_of(block).checkpointed = True
    return len(blocks)


class BlockCall:
    """Stands where ``nn.Module.compile`` puts what a module is called through.

    What stands there is left behind by copies of the module: a moving average computes plainly.

    Attributes:
        compiled: takes the place of the block's own call in training; None for that itself.
        checkpointed: whether training keeps the inputs alone.
    """

    def __init__(self, block: nn.Module) -> None:
        """
        Args:
            block: whose calls these are.
        """
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
            call, *args, use_reentrant=False, context_fn=self._recomputation, **kwargs
        )

    def _recomputation(self) -> tuple[_Context, _Context]:
        return contextlib.nullcontext(), _statistics_kept(self._norms)


def call_of(block: nn.Module) -> BlockCall:
    """Returns what a block is called through, put there where it is not yet."""
    found = block._compiled_call_impl
    if not isinstance(found, BlockCall):
        found = block._compiled_call_impl = BlockCall(block)
    return found


def _find(module: nn.Module, name: str, *, inside_list: bool) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, _LISTS)
    has_parts = next(module.children(), None) is not None
    if isinstance(module, RetinaNetHead) or (inside_list and has_parts and not is_list):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _find(child, f"{name}.{child_name}".lstrip("."), inside_list=is_list)


@contextlib.contextmanager
def _statistics_kept(norms: list[_BatchNorm]) -> Iterator[None]:
    """Inside, BatchNorms move statistics that are thrown away: the forward pass moved theirs."""
    kept = []
    for norm in norms:
        for name in _STATISTICS:
            buffer = norm._buffers.get(name)
            if norm.training and buffer is not None:
                kept.append((norm, name, buffer))
                # As many tensors are saved for the backward pass as before: none may be missing.
                norm._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            norm._buffers[name] = buffer
