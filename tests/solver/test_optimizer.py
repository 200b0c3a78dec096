# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parameter groups, layers, clipping and fused steps against hand arithmetic and others."""

import copy

import pytest
import torch
from detectron2.layers import batch_norm
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.solver import build_optimizer, layers_above, parameter_groups
from qbheat_det.solver.optimizer import build_fused, clip_before_step

RECIPES = [
    "ImageNet-QBHeat/qb_heat_285M_400ep.yaml",
    "ImageNet-finetune/tran4_285M.yaml",
    "objectives/moco_v2.yaml",
    "coco/retinanet_285M_probe.yaml",
    "coco/mf_detr_211_285M_finetune.yaml",
    "coco/mf_detr_522_285M_finetune.yaml",
]
PROBE = "coco/mf_detr_211_285M_probe.yaml"
FINETUNE = "coco/mf_detr_211_285M_finetune.yaml"
CPU = ["MODEL.DEVICE", "cpu"]
PLAIN = {
    "lr": 1.0,
    "backbone_multiplier": 1.0,
    "weight_decay": 0.1,
    "weight_decay_norm": 0.0,
    "weight_decay_bias": 0.0,
}


def naive_settings(model, decay, weight_decay):
    """Learning rate (of 1.0, backbone x 0.5) and weight decay of every trainable parameter.

    By names and shapes: in these models all that is one-dimensional is a norm or a bias.
    """
    layers = []
    settings = {}
    places = {}
    for name, _ in model.named_parameters():
        prefix = "backbone.bottom_up." if ".bottom_up." in name else "backbone."
        if not name.startswith(prefix) or name.startswith(("backbone.fpn", "backbone.top")):
            continue
        parts = name.removeprefix(prefix).split(".")
        block = "/".join(parts[:3]) if parts[0] == "stages" else parts[0]
        block = "stem" if block == "tokens" else block
        layers += [block] if block not in layers else []
        places[name] = layers.index(block)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr = 0.5 if name.startswith("backbone.") else 1.0
        if name in places:
            lr *= decay ** (len(layers) - places[name])
        plain = parameter.ndim > 1 and name.split(".")[-1] != "tokens"
        settings[name] = [lr, weight_decay if plain else 0.0]
    return settings


@pytest.mark.parametrize("name", RECIPES)
def test_every_parameter_of_every_recipe_lies_in_one_group_with_its_settings(name):
    cfg = load_config(get_config_path(name), ["MODEL.DEVICE", "meta"])
    cfg.SOLVER.BASE_LR, cfg.SOLVER.BACKBONE_MULTIPLIER, cfg.SOLVER.LAYER_DECAY = 1.0, 0.5, 0.8
    cfg.SOLVER.WEIGHT_DECAY = 0.3
    with torch.device("meta"):
        model = build_model(cfg)
    groups = build_optimizer(cfg, model).param_groups
    names = {p: key for key, p in model.named_parameters()}
    found = {}
    for group in groups:
        for parameter in group["params"]:
            assert names[parameter] not in found, f"{names[parameter]} lies in two groups"
            found[names[parameter]] = [group["lr"], group["weight_decay"]]
    expected = naive_settings(model, 0.8, 0.3)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values), key
    assert len(groups) == len({tuple(value) for value in found.values()})


def test_shared_parameters_lie_in_one_group_and_biases_follow_their_own_factor():
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(2, 2))
    model.backbone = nn.Linear(2, 2)
    model.head = nn.Linear(2, 2)
    model.head.weight = model.backbone.weight
    groups = parameter_groups(model, **PLAIN)
    held = [p for group in groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]

    model = nn.Sequential(nn.MultiheadAttention(4, 1), nn.Linear(4, 4))
    groups = parameter_groups(model, **PLAIN, bias_lr_factor=2.0)
    rates = {p: group["lr"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert rates[parameter] == (2.0 if name.endswith("bias") else 1.0), name


def test_norms_that_detectron2_does_not_know_as_such_have_no_decay():
    if not hasattr(batch_norm, "CycleBatchNormList"):
        pytest.skip("v0.6 of Detectron2 has none")
    norm = batch_norm.CycleBatchNormList(2, num_features=4)
    (group,) = parameter_groups(nn.Sequential(norm), **PLAIN)
    assert group["weight_decay"] == 0.0


def full_model_clipping(values):
    """Parameters at zero with the given gradients, and SGD at rate 1 that clips to norm 1."""
    weights = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = torch.tensor(value)
    optimizer = build_fused(torch.optim.SGD, [{"params": weights}], lr=1.0)
    clip_before_step(optimizer, max_norm=1.0, norm_type=2.0)
    return weights, optimizer


def test_full_model_clipping_scales_all_gradients_together_and_keeps_their_norm():
    weights, optimizer = full_model_clipping([[3.0, 0.0], [4.0], [0.0]])
    weights[2].grad = None
    optimizer.step()
    # The joint norm is 5, so every gradient is divided by 5.
    torch.testing.assert_close(weights[0].data, torch.tensor([-0.6, 0.0]))
    torch.testing.assert_close(weights[1].data, torch.tensor([-0.8]))
    torch.testing.assert_close(weights[2].data, torch.tensor([0.0]))
    torch.testing.assert_close(optimizer.gradient_norm, torch.tensor(5.0))


@pytest.mark.parametrize("unscale_before", [True, False])
def test_gradients_of_a_scaler_are_clipped_in_their_own_units(unscale_before):
    weights, optimizer = full_model_clipping([[0.0], [0.0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(3 * weights[0].sum() + 4 * weights[1].sum()).backward()
    if unscale_before:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(optimizer.gradient_norm, torch.tensor(5.0))
    torch.testing.assert_close(weights[1].data, torch.tensor([-0.8]))


def test_detectron2s_own_clipping_still_works():
    cfg = load_config(get_config_path(PROBE), [*CPU, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "value"])
    cfg.SOLVER.BETAS = (0.8, 0.95)
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2)})
    optimizer = build_optimizer(cfg, model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 10.0)
    optimizer.step()
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.95)
        assert max(p.grad.norm(float("inf")) for p in group["params"]) <= 0.1 + 1e-6
    assert optimizer.gradient_norm is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("OPTIMIZER", "LION"),
        ("BETAS", "(0.9, 1.0)"),
        ("LAYER_DECAY", "0"),
        ("LAYER_DECAY", "1.5"),
        ("BACKBONE_MULTIPLIER", "-1"),
        ("TOKEN_MULTIPLIER", "-1"),
        ("CLIP_GRADIENTS.CLIP_TYPE", "all"),
        ("CLIP_GRADIENTS.CLIP_VALUE", "0"),
    ],
)
def test_invalid_settings_are_refused_by_key(key, value):
    cfg = load_config(get_config_path(FINETUNE), [*CPU, f"SOLVER.{key}", value])
    with pytest.raises(UserError, match=f"SOLVER.{key}"):
        build_optimizer(cfg, nn.Sequential(nn.Linear(2, 2)))


def test_models_without_a_backbone_or_known_layers_are_refused_by_name():
    with pytest.raises(UserError, match="Sequential has no backbone"):
        parameter_groups(nn.Sequential(nn.Linear(2, 2)), **PLAIN, layer_decay=0.9)
    with pytest.raises(UserError, match=r"LAYER_DECAY.*Sequential"):
        layers_above(nn.Sequential(nn.Conv2d(3, 4, 1)))


def test_the_token_path_of_a_mobile_former_has_a_rate_of_its_own():
    cfg = load_config(get_config_path("objectives/qb_heat.yaml"), CPU)
    model = build_model(cfg)
    groups = parameter_groups(model, **{**PLAIN, "backbone_multiplier": 0.5}, token_multiplier=0.1)
    rates = {p: group["lr"] for group in groups for p in group["params"]}
    paths = (".mobile_to_former.", ".former.", "backbone.tokens")
    for name, parameter in model.named_parameters():
        rate = 0.5 if name.startswith("backbone.") else 1.0
        rate *= 0.1 if any(path in name for path in paths) else 1.0
        assert rates[parameter] == pytest.approx(rate), name


KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
}


def small_model(*, channels_last=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 5, 1))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def build(kind, model):
    optimizer, arguments = KINDS[kind]
    return build_fused(optimizer, [{"params": model.parameters()}], **arguments)


def train(model, optimizer, *, start, steps):
    for step in range(start, start + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 9, 9)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "channels_last"), [("AdamW", True), ("SGD", False)])
def test_fused_steps_are_those_of_the_plain_optimizer(kind, channels_last):
    models = [small_model(channels_last=channels_last).double() for _ in range(2)]
    plain, arguments = KINDS[kind]
    torch.set_default_dtype(torch.float64)
    try:
        optimizers = [
            build(kind, models[0]),
            plain(models[1].parameters(), foreach=False, **arguments),
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, start=0, steps=4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizers[0].param_groups[0]["fused"]
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("before", ["plain", "contiguous"])
def test_state_of_a_plain_run_and_of_another_layout_is_taken_up(before):
    old = small_model(channels_last=before == "plain")
    if before == "plain":
        optimizer = torch.optim.AdamW(old.parameters(), **KINDS["AdamW"][1])
    else:
        optimizer = build("AdamW", old)
    train(old, optimizer, start=0, steps=2)
    new = small_model(channels_last=True)
    new.load_state_dict(old.state_dict())
    continued = build("AdamW", new)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert continued.param_groups[0]["fused"]
    for parameter, state in continued.state.items():
        assert state["exp_avg"].stride() == parameter.stride()
    for model, stepped in ((old, optimizer), (new, continued)):
        train(model, stepped, start=2, steps=2)
    for ours, theirs in zip(new.parameters(), old.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    plain = torch.optim.AdamW(new.parameters(), fused=False)  # and the other way
    plain.load_state_dict(continued.state_dict())
    train(new, plain, start=4, steps=1)
