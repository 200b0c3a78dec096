# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Memory and speed of training steps: activation checkpointing, kept memory, AMP on CPUs.

Checkpointing applies to the repeated blocks of a model. A block is an element of an
``nn.Sequential`` or ``nn.ModuleList`` that has child modules, such as a block of Mobile-Former,
ResNet, a timm network or MF-DETR's decoder. Blocks inside a block do not count as blocks. The
convolutional heads of dense detectors are blocks too.

Only calls in training mode change. Evaluation, copies of the model, parameter names and checkpoints
stay the same.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from qbheat_det.core.environment import keep_freed_memory, return_freed_memory

from .hooks import TrainingRun

logger = logging.getLogger(__name__)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def apply_step_keys(cfg: CfgNode, model: nn.Module) -> "KeptMemory | None":
    """Applies ``SOLVER.KEEP_MEMORY``, ``MODEL.ACTIVATION_CHECKPOINTING``, and AMP on CPUs.

    The model must already be on its device, and not yet be wrapped for distributed training.

    Returns:
        The hook that limits kept memory; None if ``SOLVER.KEEP_MEMORY`` does not apply.
    """
    if cfg.MODEL.ACTIVATION_CHECKPOINTING:
        checkpoint_blocks(model)
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and cfg.SOLVER.AMP.ENABLED:
        run_depthwise_in_float32(model)
    if not (cfg.SOLVER.KEEP_MEMORY and on_cpu and keep_freed_memory()):
        return None
    logger.info("Steps reuse freed memory (SOLVER.KEEP_MEMORY False returns it)")
    return KeptMemory()


class KeptMemory(HookBase):
    """Returns freed memory to the system when the process has grown (CPU, Linux).

    ``SOLVER.KEEP_MEMORY`` keeps freed memory for the next step. With images of many sizes, the kept
    memory grows. Returning it takes about half the time of a step.
    """

    trainer: TrainingRun
    _PERIOD = 20  # steps between checks; the first check sets the limit

    def __init__(self) -> None:
        self._most = math.inf

    def after_step(self) -> None:
        if (self.trainer.iter + 1 - self.trainer.start_iter) % self._PERIOD:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if pages > self._most:
            return_freed_memory()
        self._most = min(self._most, 1.02 * pages)


def find_blocks(
    module: nn.Module, name: str = "", *, inside_list: bool = False
) -> dict[str, nn.Module]:
    """Returns a dict of the blocks of a module, by name in the model and in the model's order.

    Args:
        module: a model, or a part of one.
        name: the module's name in the model; empty for the model itself.
        inside_list: whether the module is an element of a ``Sequential`` or ``ModuleList``.
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


def checkpoint_blocks(model: nn.Module) -> None:
    """Lets blocks store only their inputs for the backward pass, and recompute the activations.

    Gradients are bitwise equal, dropout included, if the block is deterministic. ``model`` is
    changed in place, and must not have a distributed wrapper.
    """
    blocks = find_blocks(model)
    for block in blocks.values():
        norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        # ``nn.Module.compile`` uses the same attribute. Copies of a module, such as a moving
        # average, do not have it.
        block._compiled_call_impl = partial(_call_checkpointed, block, norms)
    logger.info(f"Activation checkpointing of {len(blocks)} blocks")


def _call_checkpointed(block: nn.Module, norms: list[_BatchNorm], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return block._call_impl(*args, **kwargs)
    return checkpoint(
        block._call_impl,
        *args,
        use_reentrant=False,  # one context for the forward pass, one for the recomputation
        context_fn=lambda: (contextlib.nullcontext(), _preserved_statistics(norms)),
        **kwargs,
    )


def run_depthwise_in_float32(model: nn.Module) -> None:
    """Lets slow depthwise convolutions train in float32 under the CPU's autocast, in place.

    With a stride, or a kernel above 3 x 3, oneDNN's backward pass in bfloat16 takes 4 to 10 times
    as long as in float32. Outputs still have autocast's dtype.
    """
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or module._compiled_call_impl is not None:
            continue
        if module.groups != module.in_channels or module.groups == 1:
            continue
        if max(module.stride) > 1 or max(module.kernel_size) > 3:
            module._compiled_call_impl = partial(_call_in_float32, module)


def _call_in_float32(module: nn.Module, x: Tensor) -> Tensor:
    is_half = torch.is_autocast_enabled("cpu") and x.device.type == "cpu"
    if not (module.training and is_half and torch.is_grad_enabled()):
        return cast(Tensor, module._call_impl(x))
    with torch.autocast("cpu", enabled=False):
        y = cast(Tensor, module._call_impl(x.float()))
    return y.to(torch.get_autocast_dtype("cpu"))


@contextlib.contextmanager
def _preserved_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Lets a recomputation update copies of BatchNorm's statistics instead of the originals."""
    pairs = [(norm, name) for norm in norms for name in _STATISTICS if norm.training]
    kept = [(norm, name, norm._buffers[name]) for norm, name in pairs if name in norm._buffers]
    for norm, name, buffer in kept:  # a copy, as both passes must save equally many tensors
        norm._buffers[name] = buffer.clone() if buffer is not None else None
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            norm._buffers[name] = buffer
