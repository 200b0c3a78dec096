# Copyright (c) qbheat_det contributors. Apache-2.0.
"""AdamW or SGD with learning rates of its own for the backbone, and full-model clipping."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import batch_norm
from detectron2.solver import build as detectron2_build
from torch import nn
from torch.optim import Optimizer

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import get_backbone, get_token_parameters

from .fused import build_fused, clip_before_step
from .layers import layers_above
from .settings import CLIP_RULES, OPTIMIZER_RULES, check_settings


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Builds ``SOLVER.OPTIMIZER`` over the trainable parameters, see ``parameter_groups``.

    Its step is fused if PyTorch has kernels for the device, see ``build_fused``.

    Besides Detectron2's types, ``SOLVER.CLIP_GRADIENTS.CLIP_TYPE`` can be "full_model": it clips
    the norm over all parameters together, as DETR does. The optimizer's attribute
    ``gradient_norm`` is then this norm before clipping in the last step, a 0-d tensor; it is None
    before the first step and with other clipping.

    Raises:
        UserError: a setting is invalid, or no parameter is trainable.
    """
    clip = cfg.SOLVER.CLIP_GRADIENTS
    full_model = clip.ENABLED and clip.CLIP_TYPE == "full_model"
    optimizer: Callable[..., Optimizer]
    arguments: dict[str, Any]
    check_settings(cfg, OPTIMIZER_RULES)
    if clip.ENABLED:
        check_settings(cfg, CLIP_RULES)
    if cfg.SOLVER.OPTIMIZER == "ADAMW":
        optimizer, arguments = torch.optim.AdamW, {"betas": tuple(cfg.SOLVER.BETAS)}
    else:
        optimizer = torch.optim.SGD
        arguments = {"momentum": cfg.SOLVER.MOMENTUM, "nesterov": cfg.SOLVER.NESTEROV}
    if not full_model:
        optimizer = detectron2_build.maybe_add_gradient_clipping(cfg, optimizer)
    groups = parameter_groups(
        model,
        lr=cfg.SOLVER.BASE_LR,
        backbone_multiplier=cfg.SOLVER.BACKBONE_MULTIPLIER,
        layer_decay=cfg.SOLVER.LAYER_DECAY,
        token_multiplier=cfg.SOLVER.TOKEN_MULTIPLIER,
        bias_lr_factor=cfg.SOLVER.BIAS_LR_FACTOR,
        weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        weight_decay_norm=cfg.SOLVER.WEIGHT_DECAY_NORM,
        weight_decay_bias=cfg.SOLVER.WEIGHT_DECAY_BIAS,
    )
    if not groups:
        raise UserError("no parameter is trainable: MODEL.BACKBONE.FREEZE_AT froze all of them")
    built = build_fused(optimizer, groups, lr=cfg.SOLVER.BASE_LR, **arguments)
    built.gradient_norm = None  # type: ignore[attr-defined]
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
    layer_decay: float = 1.0,
    token_multiplier: float = 1.0,
    bias_lr_factor: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups the trainable parameters by learning rate and weight decay, each in one group.

    A parameter of the backbone that lies k layers below the head, 1 in the backbone's last, has the
    learning rate ``lr * backbone_multiplier * layer_decay ** k``, every other one ``lr``. There are
    as many groups as there are different pairs of learning rate and weight decay.

    Args:
        model: a meta-architecture; its child ``backbone`` may have learning rates of its own.
        lr: learning rate.
        backbone_multiplier: the backbone's learning rate relative to ``lr``.
        weight_decay: of weights; the global tokens of a Mobile-Former and a [MASK] token have none.
        weight_decay_norm: of the affine parameters of norms.
        weight_decay_bias: of biases; None for that of weights.
        layer_decay: see above, and ``layers_above``.
        token_multiplier: further factor on the learning rate of the backbone's token path.
        bias_lr_factor: the learning rate of biases relative to that of weights.

    Raises:
        UserError: ``layer_decay`` is not 1, and the backbone does not say what its layers are.
    """
    overrides = {name: {"weight_decay": 0.0} for name in ("tokens", "token")}
    # Detectron2 knows biases by the name "bias" alone.
    of_bias = {} if weight_decay_bias is None else {"weight_decay": weight_decay_bias}
    overrides["in_proj_bias"] = {"lr": lr * bias_lr_factor, **of_bias}
    groups = detectron2_build.get_default_optimizer_params(
        model,
        base_lr=lr,
        weight_decay=weight_decay,
        weight_decay_norm=weight_decay_norm,
        bias_lr_factor=bias_lr_factor,
        weight_decay_bias=weight_decay_bias,
        overrides=overrides,
    )
    factors = _backbone_factors(model, backbone_multiplier, layer_decay)
    for parameter in get_token_parameters(model):
        factors[parameter] = factors.get(parameter, 1.0) * token_multiplier
    norms = _norms_unknown_to_detectron2(model)
    single = []
    for group in groups:
        for parameter in group["params"]:
            settings = {**group, "params": [parameter]}
            settings["lr"] *= factors.get(parameter, 1.0)
            if parameter in norms:
                settings["weight_decay"] = weight_decay_norm
            single.append(settings)
    return list(detectron2_build.reduce_param_groups(single))


def adamw(
    *,
    params: Sequence[dict[str, Any]],
    lr: float,
    weight_decay: float,
    betas: Sequence[float] = (0.9, 0.999),
    max_norm: float = 0.0,
) -> Optimizer:
    """AdamW for LazyConfigs: its state is plain numbers, and it can clip as DETR does.

    omegaconf makes a list of its own of ``betas``, and a checkpoint with that in it is not read
    without unpickling.

    ``params`` is what ``parameter_groups`` gives; with a ``max_norm`` of 0 nothing is clipped.
    """
    first, second = betas
    built = build_fused(
        torch.optim.AdamW,
        params,
        lr=lr,
        betas=(float(first), float(second)),
        weight_decay=weight_decay,
    )
    if max_norm:
        clip_before_step(built, max_norm=max_norm, norm_type=2.0)
    return built


def _backbone_factors(
    model: nn.Module, multiplier: float, layer_decay: float
) -> dict[nn.Parameter, float]:
    backbone = get_backbone(model)
    if backbone is None:
        if layer_decay != 1.0 or multiplier != 1.0:
            raise UserError(
                f"{type(model).__name__} has no backbone: set SOLVER.BACKBONE_MULTIPLIER and "
                "SOLVER.LAYER_DECAY to 1.0"
            )
        return {}
    if layer_decay == 1.0:
        return dict.fromkeys(backbone.parameters(), multiplier)
    above = layers_above(backbone)
    return {p: multiplier * layer_decay ** above[name] for name, p in backbone.named_parameters()}


def _norms_unknown_to_detectron2(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of RetinaNet's norms and of "LN", which Detectron2's groups take for weights."""
    kinds = tuple(getattr(batch_norm, name, ()) for name in ("CycleBatchNormList", "LayerNorm"))
    return {p for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}
