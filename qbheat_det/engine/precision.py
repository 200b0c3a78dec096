# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The precision of training steps: ``SOLVER.AMP``, and float32 where a CPU needs it."""

import logging
from functools import partial
from typing import cast

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from qbheat_det.core.environment import supports_bfloat16

logger = logging.getLogger(__name__)
PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_precision(cfg: CfgNode) -> torch.dtype | None:
    """Returns the autocast dtype that ``SOLVER.AMP`` names; None for float32.

    That is the case if AMP is disabled, or on a processor that only emulates bfloat16, where a step
    would take ten times as long.
    """
    if not cfg.SOLVER.AMP.ENABLED:
        return None
    device = torch.device(cfg.MODEL.DEVICE)
    if device.type == "cpu" and not supports_bfloat16(device):
        logger.warning("SOLVER.AMP: training in float32, as this processor has no bfloat16")
        return None
    return PRECISIONS[cfg.SOLVER.AMP.PRECISION]


def run_depthwise_in_float32(model: nn.Module) -> None:
    """Lets slow depthwise convolutions train in float32 under the CPU's autocast, in place.

    With a stride, or a kernel above 3 x 3, oneDNN's backward pass in bfloat16 takes 4 to 10 times
    as long as in float32. Outputs still have autocast's dtype. Evaluation, copies of the model and
    parameter names stay the same.
    """
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or module.groups != module.in_channels:
            continue
        if module.groups > 1 and (max(module.stride) > 1 or max(module.kernel_size) > 3):
            # ``nn.Module.compile`` uses the same attribute. Copies of a module, such as a moving
            # average, do not have it.
            module._compiled_call_impl = partial(_call_in_float32, module)


def _call_in_float32(module: nn.Module, x: Tensor) -> Tensor:
    is_half = torch.is_autocast_enabled("cpu") and x.device.type == "cpu"
    if not (module.training and is_half and torch.is_grad_enabled()):
        return cast(Tensor, module._call_impl(x))
    with torch.autocast("cpu", enabled=False):
        y = cast(Tensor, module._call_impl(x.float()))
    return y.to(torch.get_autocast_dtype("cpu"))
