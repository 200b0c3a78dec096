# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fused AdamW or SGD with layer-wise learning rate decay for the backbone.

PyTorch's fused kernels give the same results as its other kernels up to rounding, and have the same
state.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import batch_norm
from detectron2.solver import build as detectron2_build
from timm.models import group_parameters
from torch import Tensor, nn
from torch.optim import Optimizer

from qbheat_det.config import Rules, at_least, check_values, one_of
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import (
    SupportsLayerGroups,
    get_backbone,
    get_body_name,
    get_token_parameters,
)

_OPTIMIZER_RULES: Rules = {
    "SOLVER.OPTIMIZER": one_of("SGD", "ADAMW"),
    "SOLVER.LAYER_DECAY": (lambda value: 0 < value <= 1, "a factor in (0, 1]"),
    "SOLVER.BACKBONE_MULTIPLIER": at_least(0),
    "SOLVER.TOKEN_MULTIPLIER": at_least(0),
    "SOLVER.BETAS": (
        lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
        "two factors in [0, 1)",
    ),
}
_CLIP_RULES: Rules = {
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": one_of("value", "norm", "full_model"),
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": (lambda value: value > 0, "above 0"),
}

_HEAD = "<head>"  # stands for the head's parameters: a name that no pattern of a layer matches


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Builds ``SOLVER.OPTIMIZER`` for the trainable parameters of a model.

    In addition to Detectron2's types, ``SOLVER.CLIP_GRADIENTS.CLIP_TYPE`` can be "full_model",
    which clips the norm over all parameters together, as in DETR. After each step, the optimizer's
    attribute ``gradient_norm`` is then the norm before clipping, a 0-d tensor. For all other types,
    and before the first step, it is None.

    Raises:
        UserError: a setting is invalid, or no parameter is trainable.
    """
    check_values(cfg, _OPTIMIZER_RULES)
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if clip.ENABLED:
        check_values(cfg, _CLIP_RULES)
    optimizer_class: Callable[..., Optimizer]
    arguments: dict[str, Any]
    if cfg.SOLVER.OPTIMIZER == "ADAMW":
        optimizer_class = torch.optim.AdamW
        arguments = {"betas": tuple(cfg.SOLVER.BETAS)}
    else:
        optimizer_class = torch.optim.SGD
        arguments = {"momentum": cfg.SOLVER.MOMENTUM, "nesterov": cfg.SOLVER.NESTEROV}
    clips_whole_model = clip.ENABLED and clip.CLIP_TYPE == "full_model"
    if not clips_whole_model:  # Detectron2 clips each parameter, if clipping is enabled
        optimizer_class = detectron2_build.maybe_add_gradient_clipping(cfg, optimizer_class)
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
    optimizer = build_fused(optimizer_class, groups, lr=cfg.SOLVER.BASE_LR, **arguments)
    optimizer.gradient_norm = None  # type: ignore[attr-defined]
    if clips_whole_model:
        clip_before_step(optimizer, max_norm=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE)
    return optimizer


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
    """Groups the trainable parameters by learning rate and weight decay.

    The backbone's k-th layer below the head has the learning rate
    ``lr * backbone_multiplier * layer_decay ** k``, where k is 1 for the last layer. Parameters
    outside the backbone have ``lr``.

    Args:
        model: a meta-architecture.
        lr: learning rate.
        backbone_multiplier: factor on the learning rate of the child ``backbone``.
        weight_decay: weight decay of weights. The tokens, which are inputs of the network, have no
            weight decay.
        weight_decay_norm: weight decay of the affine parameters of norms.
        weight_decay_bias: weight decay of biases. None means ``weight_decay``.
        layer_decay: factor on the learning rate from each layer to the layer below.
        token_multiplier: additional factor on the learning rate of the backbone's token path.
        bias_lr_factor: factor on the learning rate of biases.

    Raises:
        UserError: ``layer_decay`` is not 1, and the backbone has no ``group_matcher``. Or the model
            has no backbone, and ``layer_decay`` or ``backbone_multiplier`` is not 1.
    """
    overrides = {name: {"weight_decay": 0.0} for name in ("tokens", "token")}
    # Detectron2 recognizes biases only by the name "bias".
    overrides["in_proj_bias"] = {"lr": lr * bias_lr_factor}
    if weight_decay_bias is not None:
        overrides["in_proj_bias"]["weight_decay"] = weight_decay_bias
    groups = detectron2_build.get_default_optimizer_params(
        model,
        base_lr=lr,
        weight_decay=weight_decay,
        weight_decay_norm=weight_decay_norm,
        bias_lr_factor=bias_lr_factor,
        weight_decay_bias=weight_decay_bias,
        overrides=overrides,
    )
    factors = _find_backbone_factors(model, backbone_multiplier, layer_decay)
    for parameter in get_token_parameters(model):
        factors[parameter] = factors.get(parameter, 1.0) * token_multiplier
    norm_parameters = _find_unrecognized_norms(model)
    single_groups = []  # of one parameter each
    for group in groups:
        for parameter in group["params"]:
            group_lr = group["lr"] * factors.get(parameter, 1.0)
            single_group = {**group, "params": [parameter], "lr": group_lr}
            if parameter in norm_parameters:
                single_group["weight_decay"] = weight_decay_norm
            single_groups.append(single_group)
    # Joins the groups with equal settings.
    return list(detectron2_build.reduce_param_groups(single_groups))


def _find_unrecognized_norms(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters of norms that Detectron2 treats as weights.

    They are the norms of RetinaNet's head and the norm "LN". Old releases do not have both classes.
    """
    names = ("CycleBatchNormList", "LayerNorm")
    classes = tuple(getattr(batch_norm, name) for name in names if hasattr(batch_norm, name))
    parameters: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, classes):
            parameters.update(module.parameters())
    return parameters


def layers_above(backbone: nn.Module) -> dict[str, int]:
    """Returns, by parameter name, the number of layers above a parameter, including the head.

    ``group_matcher`` defines the layers, as in timm's models. The number is 1 for the last
    layer. It is 0 for parameters that belong to no layer, for example in a feature pyramid.

    Raises:
        UserError: the backbone has no ``group_matcher``.
    """
    body_name = get_body_name(backbone)  # of the network inside a feature pyramid
    if body_name and not isinstance(backbone, SupportsLayerGroups):
        counts = dict.fromkeys((name for name, _ in backbone.named_parameters()), 0)
        for name, count in layers_above(backbone.get_submodule(body_name)).items():
            counts[f"{body_name}.{name}"] = count
        return counts
    if not isinstance(backbone, SupportsLayerGroups):
        raise UserError(
            f"SOLVER.LAYER_DECAY: {type(backbone).__name__} does not name its layers: implement "
            "timm's `group_matcher`"
        )
    # timm puts parameters that match no pattern into one more layer, after the last one.
    parameters = [*backbone.named_parameters(), (_HEAD, None)]
    model_with_head = SimpleNamespace(named_parameters=lambda: parameters)
    matcher = backbone.group_matcher()
    # By parameter name, the index of its layer, from 0 for the first layer.
    layers: dict[str, int] = group_parameters(model_with_head, matcher, reverse=True)
    head_layer = layers[_HEAD]
    return {name: head_layer - layer for name, layer in layers.items() if name != _HEAD}


def build_fused(
    optimizer: Callable[..., Optimizer], groups: Sequence[dict[str, Any]], **arguments: Any
) -> Optimizer:
    """Builds an optimizer with fused kernels on CPUs and GPUs.

    The optimizer can load the state of optimizers without fused kernels.

    Args:
        optimizer: class or function that takes the groups and ``arguments``.
        groups: parameter groups.
        arguments: keyword arguments of ``optimizer``.
    """
    groups = [{**group, "params": list(group["params"])} for group in groups]
    device_types = {parameter.device.type for group in groups for parameter in group["params"]}
    has_fused_kernels = device_types <= {"cpu", "cuda"}
    built = optimizer(groups, **{**arguments, "fused": has_fused_kernels})
    # Otherwise the gradient scaler would not unscale float16 gradients before clipping.
    built._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    kernels = {key: built.defaults.get(key) for key in ("fused", "foreach")}

    def keep_kernels(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Replaces the choice of kernels in a loaded state by the choice of this optimizer."""
        groups_with_kernels = [{**group, **kernels} for group in state["param_groups"]]
        return {**state, "param_groups": groups_with_kernels}

    built.register_load_state_dict_pre_hook(keep_kernels)
    built.register_load_state_dict_post_hook(_keep_layout)
    return built


def clip_before_step(optimizer: Optimizer, *, max_norm: float, norm_type: float) -> None:
    """Clips all gradients before each step. ``optimizer.gradient_norm`` is their unclipped norm."""

    def clip(stepped: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        parameters: list[nn.Parameter] = []
        for group in stepped.param_groups:
            parameters += group["params"]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        stepped.gradient_norm = norm.detach()  # type: ignore[attr-defined]

    optimizer.register_step_pre_hook(clip)


def _keep_layout(optimizer: Optimizer) -> None:
    """Converts moments to the memory layout of their parameters, which fused kernels need."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_moment and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _find_backbone_factors(
    model: nn.Module, multiplier: float, layer_decay: float
) -> dict[nn.Parameter, float]:
    """Returns the factor on the learning rate of each parameter of the backbone.

    Raises a ``UserError`` if there are factors other than 1, but no backbone.
    """
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
    num_above = layers_above(backbone)
    factors: dict[nn.Parameter, float] = {}
    for name, parameter in backbone.named_parameters():
        factors[parameter] = multiplier * layer_decay ** num_above[name]
    return factors
