# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former from ``timm.create_model``, against ``MobileFormer`` with the same weights."""

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2

from qbheat_det import model_zoo
from qbheat_det.modeling.backbone import MobileFormer, TimmBackbone

NAME = "mobile_former_285m"
MAPS = ["s2", "s4", "s8", "s16"]
IMAGES = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def load_encoder(state, prefix):
    """A Mobile-Former with all outputs that its tensors in ``state`` allow."""
    weights = {name.removeprefix(prefix): value for name, value in state.items() if prefix in name}
    encoder = MobileFormer(arch="285M", out_features=[*MAPS, "s16_expanded", "tokens"])
    encoder.load_state_dict(weights)
    return encoder.eval()


@pytest.mark.parametrize(
    ("options", "indices"),
    [
        ({}, [0, 1, 2, 3]),
        ({"out_indices": (1, 2)}, [1, 2]),
        ({"out_indices": (-1,)}, [3]),
        ({"out_indices": 2}, [2, 3]),
    ],
)
def test_feature_maps_are_those_of_the_encoder_and_the_rest_is_pruned(options, indices):
    torch.manual_seed(0)
    whole = timm.create_model(NAME).eval()
    torch.manual_seed(0)
    model = timm.create_model(NAME, features_only=True, **options).eval()
    encoder = load_encoder(whole.state_dict(), "encoder.")
    expected = encoder(IMAGES)
    maps = model(IMAGES)
    assert len(maps) == len(indices)
    for index, channels, stride, found in zip(
        indices, model.feature_info.channels(), model.feature_info.reduction(), maps, strict=True
    ):
        assert torch.equal(found, expected[MAPS[index]])
        assert found.shape == (2, channels, 64 // stride, 96 // stride)
    sum(found.sum() for found in maps).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    last, maps = whole.forward_intermediates(IMAGES, indices=options.get("out_indices"))
    assert torch.equal(last, whole.forward_features(IMAGES))
    assert all(
        torch.equal(found, expected[MAPS[i]]) for i, found in zip(indices, maps, strict=True)
    )


def test_without_classes_a_model_returns_vectors():
    model = timm.create_model(NAME, num_classes=0).eval()
    outputs = load_encoder(model.state_dict(), "encoder.")(IMAGES)
    pooled = outputs["s16_expanded"].mean(dim=(2, 3))
    vectors = torch.cat([pooled, outputs["tokens"][:, 0]], dim=1)
    torch.testing.assert_close(model(IMAGES), vectors)
    assert vectors.shape == (2, model.num_features)
    model.reset_classifier(3)
    expected = vectors @ model.get_classifier().weight.T + model.get_classifier().bias
    torch.testing.assert_close(model(IMAGES), expected)
    torch.testing.assert_close(
        model.forward_head(model.forward_features(IMAGES), pre_logits=True), vectors
    )


@pytest.mark.parametrize("options", [{}, {"num_classes": 5}, {"features_only": True}])
def test_pretrained_weights_are_those_of_the_zoo(options):
    model = timm.create_model(NAME, pretrained=True, **options).eval()
    zoo = model_zoo.get("distill/285M", device="cpu").backbone.state_dict()
    state = model.state_dict()
    for name, value in state.items():
        short = name.partition("encoder.")[2]
        if short:
            assert torch.equal(value, zoo[short].float()), name
    assert len([name for name in state if "encoder." in name]) > 100


def test_grey_images_and_a_file_of_ones_own(tmp_path):
    grey = timm.create_model(NAME, pretrained=True, in_chans=1)
    colour = timm.create_model(NAME, pretrained=True)
    torch.testing.assert_close(
        grey.encoder.stem.weight, colour.encoder.stem.weight.sum(1, keepdim=True)
    )
    torch.save(grey.state_dict(), tmp_path / "mine.pth")
    overlay = {"file": str(tmp_path / "mine.pth"), "input_size": (1, 64, 64)}
    again = timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay)
    for name, value in again.state_dict().items():
        assert torch.equal(value, grey.state_dict()[name])


def test_sizes_without_weights_say_so():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for mobile_former_1_0g"):
        timm.create_model("mobile_former_1_0g", pretrained=True)
    assert timm.list_pretrained("mobile_former*") == [f"{NAME}.distill"]


@pytest.mark.parametrize(
    ("name", "arch"),
    [(NAME, "285M"), ("mobile_former_1_0g", "1.0G"), ("mobile_former_3_7g", "3.7G")],
)
def test_the_networks_are_those_of_the_paper_and_backbones_too(name, arch):
    with torch.device("meta"):
        model = timm.create_model(name, features_only=True)
        encoder = MobileFormer(arch=arch, out_features=["s16"])
    found = {name.partition("encoder.")[2]: v.shape for name, v in model.state_dict().items()}
    assert found == {name: value.shape for name, value in encoder.state_dict().items()}
    if arch == "285M":
        backbone = TimmBackbone(name=name, out_features=["s8", "s16"]).eval()
        encoder = MobileFormer(arch=arch, out_features=["s8", "s16"]).eval()
        state = backbone.state_dict()
        encoder.load_state_dict({key: state[f"net.encoder.{key}"] for key in encoder.state_dict()})
        for key, value in encoder(IMAGES).items():
            assert torch.equal(backbone(IMAGES)[key], value)


def test_timms_layer_decay_has_a_layer_per_block():
    model = timm.create_model(NAME, num_classes=3)
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, layer_decay=0.5)
    scales = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scales[parameter] = group["lr_scale"]
    # Stem, lite block, eleven blocks, the expansion and the classifier.
    assert scales[model.classifier.weight] == 1
    assert scales[model.encoder.expand.weight] == 0.5
    assert scales[model.encoder.tokens] == scales[model.encoder.stem.weight] == 0.5**14
    blocks = [block for stage in model.encoder.stages for block in stage]
    for index, block in enumerate(blocks):
        expected = 0.5 ** (len(blocks) + 1 - index)
        assert {scales[parameter] for parameter in block.parameters()} == {expected}
    assert len(set(group_parameters(model, model.group_matcher(coarse=True)))) == 7


def test_gradient_checkpointing_is_refused_as_timm_does():
    model = timm.create_model(NAME)
    model.set_grad_checkpointing(False)
    with pytest.raises(AssertionError, match="not supported"):
        model.set_grad_checkpointing()
