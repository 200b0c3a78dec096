# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parameter groups and clipping against hand arithmetic."""

import pytest
import torch
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.config import get_config_path, load_config
from qbheat_det.errors import UserError
from qbheat_det.solver import build_optimizer
from qbheat_det.solver.optimizer import clip_before_step

PROBE = "coco/mf_detr_211_285M_probe.yaml"
FINETUNE = "coco/mf_detr_211_285M_finetune.yaml"
CPU = ["MODEL.DEVICE", "cpu"]


@pytest.mark.parametrize("name", [PROBE, FINETUNE, "coco/retinanet_285M_finetune.yaml"])
def test_groups_hold_every_trainable_parameter_once(name: str) -> None:
    cfg = load_config(get_config_path(name), CPU)
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    trainable = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(held) == sorted(trainable)
    assert len(held) == len(set(held))


def test_backbone_rate_and_decay_follow_the_rules() -> None:
    opts = [*CPU, "SOLVER.BACKBONE_MULTIPLIER", "0.1", "MODEL.MOBILE_FORMER.NORM", "BN"]
    cfg = load_config(get_config_path(FINETUNE), opts)
    model = build_model(cfg)
    settings = {
        id(p): (group["lr"], group["weight_decay"])
        for group in build_optimizer(cfg, model).param_groups
        for p in group["params"]
    }
    norms = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            lr, decay = settings[id(parameter)]
            assert lr == pytest.approx(1e-6 if path.startswith("backbone") else 1e-5)
            none = isinstance(module, norms) or name.endswith("bias") or name == "tokens"
            assert decay == (0.0 if none else 1e-4), f"{path}.{name}"


def test_full_model_clipping_scales_all_gradients_together() -> None:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    clip_before_step(optimizer, max_norm=1.0, norm_type=2.0)
    weights[0].grad, weights[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    optimizer.step()
    # The joint norm is 5, so every gradient is divided by 5.
    torch.testing.assert_close(weights[0].data, torch.tensor([-0.6, 0.0]))
    torch.testing.assert_close(weights[1].data, torch.tensor([-0.8]))


@pytest.mark.parametrize("clip_type", ["value", "norm"])
def test_detectron2s_own_clipping_still_works(clip_type: str) -> None:
    opts = [*CPU, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", clip_type]
    cfg = load_config(get_config_path(PROBE), opts)
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 10.0)
    optimizer.step()
    largest = max(p.grad.norm(float("inf")) for g in optimizer.param_groups for p in g["params"])
    assert largest <= 0.1 + 1e-6


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    cfg = load_config(get_config_path(PROBE), [*CPU, "SOLVER.OPTIMIZER", "LION"])
    with pytest.raises(UserError, match="ADAMW"):
        build_optimizer(cfg, build_model(cfg))
