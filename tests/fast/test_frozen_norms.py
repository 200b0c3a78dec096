# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Frozen BatchNorms that are computed in the convolution before them, against plain layers."""

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.testing import assert_close

from qbheat_det.fast import frozen_norms, optimize
from qbheat_det.fast.frozen_norms import FoldedNorm, NormedConv2d
from qbheat_det.modeling.backbone.norm_inputs import NormInputs
from qbheat_det.modeling.backbone.timm_backbone import TimmBackbone

# Plain and "same" padding, residual blocks, and norms before the convolution.
NETWORKS = ("tf_efficientnet_lite0", "resnet18", "resnetv2_50")


def make_backbone(name="resnet18", **settings):
    torch.manual_seed(0)
    backbone = TimmBackbone(name=name, out_features=["s8", "s16"], **settings).double()
    for module in backbone.modules():
        if hasattr(module, "running_var"):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_()
    return backbone


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


def run(model, x):
    """Returns the maps and the gradients by name."""
    x = x.clone().requires_grad_()
    maps = model(x)
    model.zero_grad()
    sum(each.square().mean() for each in maps.values()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return maps, {**gradients, "input": x.grad}


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_and_gradients_are_those_of_the_plain_layers(name):
    plain = nn.Sequential(make_backbone(name, freeze_norms=True))
    fast = copy.deepcopy(plain)
    optimize(fast, "cpu_training")
    folded = count(fast, FoldedNorm)
    assert folded == count(fast, NormedConv2d) == len(plain[0].norm_inputs) > 0
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    assert_close(run(fast, x), run(plain, x))
    assert list(fast.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", [*NETWORKS, "efficientnet_b0", "mobilenetv3_small_100"])
@pytest.mark.parametrize("form", ["cpu_training", "cpu_inference"])
def test_maps_without_gradients_are_those_of_the_plain_layers(name, form):
    plain = nn.Sequential(make_backbone(name, freeze_norms=True)).float().eval()
    fast = copy.deepcopy(plain)
    optimize(fast, form)
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected = plain(x)
        exact = fast(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = fast(x)
    for key, feature_map in expected.items():
        scale = feature_map.abs().max()
        assert (exact[key] - feature_map).abs().max() < 1e-4 * scale
        assert (rounded[key] - feature_map).abs().max() < 0.1 * scale
        assert rounded[key].dtype == torch.bfloat16


def test_activations_are_computed_in_convolutions_only_without_gradients(monkeypatch):
    fused = []
    convolve = frozen_norms._convolve_and_activate

    def count_calls(*arguments):
        fused.append(arguments)
        return convolve(*arguments)

    monkeypatch.setattr(frozen_norms, "_convolve_and_activate", count_calls)
    plain = nn.Sequential(make_backbone("tf_efficientnet_lite0", freeze_at=3, freeze_norms=True))
    fast = copy.deepcopy(plain.float())
    optimize(fast, "cpu_training")
    x = torch.randn(2, 3, 64, 96)
    with_gradients = run(fast, x)  # the input has one
    assert not fused
    assert_close(with_gradients, run(plain, x), rtol=1e-3, atol=1e-3)
    fast(x)
    assert 0 < len(fused) < len(plain[0].norm_inputs)  # those of the frozen stages
    fused.clear()
    with torch.no_grad():
        fast(x)
    assert len(fused) == len(plain[0].norm_inputs)
    fused.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):  # for which oneDNN may have no form
        assert fast(x)["s8"].dtype == torch.float16
    assert not fused


def test_a_copy_and_loaded_weights_use_their_own_statistics():
    fast = nn.Sequential(make_backbone(freeze_norms=True))
    optimize(fast, "cpu_training")
    duplicate = copy.deepcopy(fast)
    x = torch.randn(1, 3, 64, 96, dtype=torch.float64)
    before, _ = run(fast, x)
    for buffer in duplicate.buffers():
        buffer.mul_(2)
    after, _ = run(fast, x)
    assert_close(after, before)
    assert not torch.allclose(duplicate(x)["s8"], before["s8"])
    duplicate.load_state_dict(fast.state_dict())
    assert_close(duplicate(x), before)


def test_trained_norms_are_not_folded():
    backbone = nn.Sequential(make_backbone(freeze_at=3))
    optimize(backbone, "cpu_training")
    norms = {name: m for name, m in backbone.named_modules() if hasattr(m, "running_var")}
    for name, norm in norms.items():
        has_parameters = bool(list(norm.parameters()))  # those of a frozen norm are buffers
        assert isinstance(norm, FoldedNorm) != has_parameters, name
    assert 0 < count(backbone, FoldedNorm) < len(norms)


class Branches(nn.Module):
    """A norm whose input has another reader, one behind a convolution that runs twice, and one."""

    def __init__(self):
        super().__init__()
        self.read_twice, self.runs_twice, self.plain = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.norm_1, self.norm_2, self.norm_3 = (BatchNormAct2d(3) for _ in range(3))

    def forward(self, x):
        y = self.read_twice(x)
        x = y + self.norm_1(y)
        x = self.norm_2(self.runs_twice(self.runs_twice(x)))
        return self.norm_3(self.plain(x))


def test_only_a_norm_that_alone_reads_a_convolution_is_paired():
    net = Branches().eval()
    with NormInputs(net) as norm_inputs:
        output = net(torch.zeros(1, 3, 2, 2))
    assert norm_inputs.find([output]) == {"norm_3": "plain"}
    assert not any(module._forward_hooks for module in net.modules())
