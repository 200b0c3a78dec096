# Copyright (c) qbheat_det contributors. Apache-2.0.
"""BatchNorm folded into convolutions."""

import copy

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from timm.layers import BatchNormAct2d
from torch import nn
from torch.testing import assert_close

from qbheat_det.fast import fold_batch_norms
from tests.modeling.reference_mobile_former import randomise_


def normed_convolution(norm, bias):
    return Conv2d(3, 6, 3, padding=1, bias=bias, groups=3, norm=norm)


@pytest.mark.parametrize(
    "net",
    [
        normed_convolution(nn.BatchNorm2d(6, eps=0.1), False),
        normed_convolution(FrozenBatchNorm2d(6), True),
        nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()),
    ],
)
def test_a_folded_pair_equals_the_two_layers(net):
    net = copy.deepcopy(net).double().eval()
    randomise_(net)
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    expected = net(x)
    assert fold_batch_norms(net) == (1, 0)
    assert_close(net(x), expected, rtol=1e-12, atol=1e-12)
    assert not any(isinstance(m, nn.BatchNorm2d | FrozenBatchNorm2d) for m in net.modules())


def test_shared_convolutions_and_norms_that_do_more_are_not_folded():
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
