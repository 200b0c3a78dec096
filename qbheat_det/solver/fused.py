# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Steps that pass over weights and gradients once: fused optimizers, and clipping beside them.

PyTorch's fused kernels compute the same up to rounding and keep the same state, so that
checkpoints go both ways.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


def build_fused(
    optimizer: Callable[..., Optimizer], groups: Sequence[dict[str, Any]], **arguments: Any
) -> Optimizer:
    """Builds an optimizer with fused kernels, or without them where PyTorch has none.

    What it loads may come from a run without them, or of another memory layout.
    """
    groups = [{**group, "params": list(group["params"])} for group in groups]
    try:
        _try_fused(optimizer, groups, arguments)
        arguments = {**arguments, "fused": True}
    except (RuntimeError, TypeError) as error:
        device = groups[0]["params"][0].device.type
        logger.info(f"the optimizer's step is not fused on '{device}': {error}")
    built = optimizer(groups, **arguments)
    # Else a scaler of fp16 gradients leaves them scaled, and what clips them does not know.
    built._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    kernels = {key: built.defaults.get(key) for key in ("fused", "foreach")}

    def keep_kernels(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, **kernels} for group in state["param_groups"]]}

    built.register_load_state_dict_pre_hook(keep_kernels)
    built.register_load_state_dict_post_hook(_keep_layout)
    return built


def _try_fused(
    optimizer: Callable[..., Optimizer], groups: Sequence[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    """Takes a fused step on a number of each type and device: constructors do not tell."""
    kinds = dict.fromkeys((p.device, p.dtype) for group in groups for p in group["params"])
    tried = [nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for device, dtype in kinds]
    for parameter in tried:
        parameter.grad = torch.zeros_like(parameter)
    optimizer([{**groups[0], "params": tried}], fused=True, **arguments).step()


def clip_before_step(optimizer: Optimizer, *, max_norm: float, norm_type: float) -> None:
    """Makes each step of ``optimizer`` first clip the norm of all its gradients together.

    The norm before clipping is then ``optimizer.gradient_norm``. A gradient scaler that skips a
    step leaves the norm of the step before.
    """

    def clip(stepped: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        parameters = [p for group in stepped.param_groups for p in group["params"]]
        norm = clip_norm(parameters, max_norm=max_norm, norm_type=norm_type)
        stepped.gradient_norm = norm  # type: ignore[attr-defined]

    optimizer.register_step_pre_hook(clip)


def clip_norm(parameters: Sequence[nn.Parameter], *, max_norm: float, norm_type: float) -> Tensor:
    """As ``nn.utils.clip_grad_norm_``, but leaves gradients on a CPU alone if nothing is clipped.

    Returns:
        0-d, the norm before clipping.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients, norm_type).detach()
    # There the norm is known at once; a GPU would be waited for, and multiplies by 1 instead.
    if norm.device.type != "cpu" or not max_norm / (norm + 1e-6) >= 1:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _keep_layout(optimizer: Optimizer) -> None:
    """Gives moments the layout of their parameters, which fused kernels take for granted."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
