# Copyright (c) qbheat_det contributors. Apache-2.0.
"""AdamW or SGD with a learning rate of its own for the backbone and full-model clipping."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver import build as detectron2_build
from torch import nn
from torch.optim import Optimizer

from qbheat_det.errors import UserError

_OPTIMIZERS = ("SGD", "ADAMW")


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Builds ``SOLVER.OPTIMIZER`` over the trainable parameters.

    ``SOLVER.CLIP_GRADIENTS`` takes one more type than Detectron2's: "full_model" clips the norm
    over all parameters together, as DETR does.

    Raises:
        UserError: the optimizer has no such name, or nothing is left to train.
    """
    groups = parameter_groups(
        model,
        lr=cfg.SOLVER.BASE_LR,
        backbone_multiplier=cfg.SOLVER.BACKBONE_MULTIPLIER,
        weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        weight_decay_norm=cfg.SOLVER.WEIGHT_DECAY_NORM,
        weight_decay_bias=cfg.SOLVER.WEIGHT_DECAY_BIAS,
    )
    if not groups:
        raise UserError("no parameter is trainable: MODEL.BACKBONE.FREEZE_AT froze all there is")
    clip = cfg.SOLVER.CLIP_GRADIENTS
    full_model = clip.ENABLED and clip.CLIP_TYPE == "full_model"
    optimizer: Callable[..., Optimizer]
    arguments: dict[str, Any]
    if cfg.SOLVER.OPTIMIZER == "ADAMW":
        optimizer, arguments = torch.optim.AdamW, {}
    elif cfg.SOLVER.OPTIMIZER == "SGD":
        optimizer = torch.optim.SGD
        arguments = {"momentum": cfg.SOLVER.MOMENTUM, "nesterov": cfg.SOLVER.NESTEROV}
    else:
        raise UserError(f"SOLVER.OPTIMIZER is one of {_OPTIMIZERS}, not '{cfg.SOLVER.OPTIMIZER}'")
    if not full_model:
        optimizer = detectron2_build.maybe_add_gradient_clipping(cfg, optimizer)
    built = optimizer(groups, lr=cfg.SOLVER.BASE_LR, **arguments)
    if full_model:
        clip_before_step(built, max_norm=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE)
    return built


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    backbone_multiplier: float,
    weight_decay: float,
    weight_decay_norm: float,
    weight_decay_bias: float | None,
) -> list[dict[str, Any]]:
    """Groups the trainable parameters by learning rate and weight decay, each in one group.

    Args:
        model: a meta-architecture; its child ``backbone`` may have another learning rate.
        lr: learning rate.
        backbone_multiplier: the backbone's learning rate relative to ``lr``.
        weight_decay: of weights; the global tokens of a Mobile-Former have none.
        weight_decay_norm: of the affine parameters of norms.
        weight_decay_bias: of biases; None for that of weights.
    """
    overrides = {"tokens": {"weight_decay": 0.0}}
    if weight_decay_bias is not None:  # Detectron2 knows biases by the name "bias" alone
        overrides["in_proj_bias"] = {"weight_decay": weight_decay_bias}
    groups: list[dict[str, Any]] = []
    for name, child in model.named_children():
        groups += detectron2_build.get_default_optimizer_params(
            child,
            base_lr=lr * backbone_multiplier if name == "backbone" else lr,
            weight_decay=weight_decay,
            weight_decay_norm=weight_decay_norm,
            weight_decay_bias=weight_decay_bias,
            overrides=dict(overrides),  # which it writes to
        )
    return groups


def clip_before_step(optimizer: Optimizer, *, max_norm: float, norm_type: float) -> None:
    """Makes each step of ``optimizer`` first clip the norm of all its gradients together."""

    def clip(stepped: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        parameters = [p for group in stepped.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    optimizer.register_step_pre_hook(clip)
