# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former built by timm: what timm's own tests ask of its models, and that it is the same."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.modeling.classification import TIMM_NAMES, LinearDecoder, TimmMobileFormer
from tests.modeling.tiny_pretraining import SMALL_ARCH


def _tiny(**kwargs: Any) -> TimmMobileFormer:
    return TimmMobileFormer(**{"arch": SMALL_ARCH, "num_classes": 5, **kwargs}).eval()


def _images(size: int = 64, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size)


@pytest.mark.parametrize(("size", "name"), TIMM_NAMES.items())
def test_timm_lists_all_sizes_and_describes_them(size: str, name: str) -> None:
    assert name in timm.list_models("mobile_former*")
    arch = MOBILE_FORMER_ARCHS[size]
    with torch.device("meta"):
        model = timm.create_model(name)
        features = timm.create_model(name, features_only=True)
    cfg = model.default_cfg
    assert cfg["architecture"] == name
    assert cfg["num_classes"] == model.num_classes == model.get_classifier().out_features == 1000
    for key in ("crop_pct", "interpolation", "mean", "std", "input_size", "pool_size", "license"):
        assert cfg[key]
    names = model.state_dict()
    assert {f"{cfg['classifier']}.weight", f"{cfg['first_conv']}.weight"} <= set(names)
    assert model.num_features == arch.expanded + arch.token_dim
    assert model.head_hidden_size == (arch.head_dim or model.num_features)
    *maps, _, _ = arch.output_shapes().values()
    assert features.feature_info.reduction() == [shape.stride for shape in maps]
    assert features.feature_info.channels() == [shape.channels for shape in maps]


def test_the_networks_names_and_outputs_are_those_of_the_backbone() -> None:
    model = _tiny()
    outputs = ["s2", "s4", "s8", "s16", "s16_expanded", "tokens"]
    backbone = MobileFormer(arch=SMALL_ARCH, out_features=outputs).eval()
    state = model.state_dict()
    assert set(state) - set(backbone.state_dict()) == {"classifier.weight", "classifier.bias"}
    backbone.load_state_dict({key: state[key] for key in backbone.state_dict()})
    x = torch.randn(2, 3, 50, 70)
    with torch.no_grad():
        expected = backbone(x)
        last, maps = model.forward_intermediates(x)
    torch.testing.assert_close(maps, [expected[key] for key in outputs[:4]], rtol=0, atol=0)
    torch.testing.assert_close(last[:, :40], expected["s16_expanded"], rtol=0, atol=0)
    token = expected["tokens"][:, 0]
    for row in range(last.shape[2]):
        torch.testing.assert_close(last[:, 40:, row, 0], token, rtol=0, atol=0)


def test_scores_are_those_of_the_packages_linear_decoder() -> None:
    model = _tiny()
    backbone = MobileFormer(arch=SMALL_ARCH, out_features=["s16_expanded", "tokens"]).eval()
    decoder = LinearDecoder(input_shape=backbone.output_shape(), num_classes=5)
    state = model.state_dict()
    backbone.load_state_dict({key: state[key] for key in backbone.state_dict()})
    decoder.classifier.load_state_dict(model.get_classifier().state_dict())
    x = _images()
    with torch.no_grad():
        torch.testing.assert_close(model(x), decoder(backbone(x)))


@pytest.mark.parametrize("indices", [None, 2, (-1, 1)])
def test_stages_asked_for_are_the_same_with_the_rest_cut_off(indices: Any) -> None:
    model, x = _tiny(), _images(48)
    with torch.no_grad():
        everything = model.forward_intermediates(x, intermediates_only=True)
        numbers = {None: [0, 1, 2, 3], 2: [2, 3], (-1, 1): [1, 3]}[indices]
        expected = [everything[number] for number in numbers]
        last, found = model.forward_intermediates(x, indices)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(last, model.forward_features(x), rtol=0, atol=0)
        whole = len(model.state_dict())
        taken = model.prune_intermediate_layers(indices, prune_norm=True)
        assert sorted(taken) == numbers
        assert len(model.stages) == max(numbers) + 1
        assert len(model.state_dict()) < whole
        found = model.forward_intermediates(x, taken, intermediates_only=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
