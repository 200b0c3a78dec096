# Copyright (c) qbheat_det contributors. Apache-2.0.
"""BatchNorm as a part of the convolution before it."""

import copy

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from timm.layers import BatchNormAct2d
from torch import nn
from torch.testing import assert_close

from qbheat_det.deployment.fused_blocks import fold_batch_norms
from tests.export.tiny_models import build, make_config
from tests.modeling.reference_mobile_former import randomise_


def own_norm(norm: nn.Module, bias: bool) -> nn.Module:
    return Conv2d(3, 6, 3, padding=1, bias=bias, groups=3, norm=norm)


@pytest.mark.parametrize(
    "net",
    [
        own_norm(nn.BatchNorm2d(6, eps=0.1), False),
        own_norm(FrozenBatchNorm2d(6), True),
        nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()),
    ],
)
def test_a_folded_pair_gives_the_same(net: nn.Module) -> None:
    net = copy.deepcopy(net).double().eval()
    randomise_(net)
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    expected = net(x)
    assert fold_batch_norms(net) == (1, 0)
    assert_close(net(x), expected, rtol=1e-12, atol=1e-12)
    assert not any(isinstance(m, nn.BatchNorm2d | FrozenBatchNorm2d) for m in net.modules())


def test_what_does_more_or_is_shared_stays() -> None:
    shared = nn.Conv2d(4, 4, 1)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)),
        nn.Sequential(shared, nn.BatchNorm2d(4)),
        nn.Sequential(shared, nn.BatchNorm2d(4)),
        Conv2d(4, 4, 1, norm=nn.GroupNorm(2, 4)),
        nn.Sequential(Conv2d(4, 4, 1, activation=torch.relu), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
    ).eval()
    randomise_(net)
    x = torch.randn(2, 3, 5, 5)
    expected = net(x)
    assert fold_batch_norms(net) == (0, 4)
    assert_close(net(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["mf_detr", "retinanet"])
def test_nothing_is_left_in_our_backbones(kind: str) -> None:
    model = build(make_config(kind)).double()
    x = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    expected = model.backbone(x)
    folded, left = fold_batch_norms(model.backbone)
    assert folded > 10
    assert left == 0
    assert_close(model.backbone(x), expected, rtol=1e-9, atol=1e-9)
