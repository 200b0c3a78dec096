# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Scattered masking as a whole: what the encoder sees, what is reconstructed, what is refused."""

import pytest
import torch
from detectron2.modeling import build_model
from torch import Tensor, nn

from qbheat_det.modeling.pretrain import MaskTokenMasking, QBHeat, ReconstructionLoss
from qbheat_det.modeling.pretrain.random_masking import (
    InterpolatedFeatures,
    MaskToken,
    RandomMask,
    RandomMasking,
)
from tests.modeling.tiny_pretraining import (
    MEAN,
    STD,
    Copies,
    PatchesAsMap,
    make_inputs,
    make_tiny_config,
)

ARCHS = ("InterpolatedMasking", "MaskTokenMasking")
CPU = torch.device("cpu")


def build(arch: str) -> RandomMasking:
    return build_model(make_tiny_config(arch))


def make_copying_model(
    arch: type[RandomMasking], predictor: InterpolatedFeatures | MaskToken
) -> RandomMasking:
    """What is visible passes through unchanged, and what is filled in is taken for pixels."""
    model = arch(
        backbone=PatchesAsMap(),
        predictor=predictor,
        decoder=Copies(grid_size=4, patch_size=16),
        loss=ReconstructionLoss(normalize_patches=False),
        in_feature="map",
        pixel_mean=MEAN,
        pixel_std=STD,
        mask_ratio=0.5,
    )
    nn.init.dirac_(model.projection.weight)
    return model.eval()


def pixels(visible: Tensor) -> Tensor:
    """From positions (N, 4, 4) to pixels (N, 64, 64)."""
    return visible.repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)


@pytest.mark.parametrize("arch", ARCHS)
def test_hidden_pixels_change_nothing_of_what_is_reconstructed(arch: str) -> None:
    model = build(arch).eval()
    seen: list[Tensor] = []
    model.backbone.register_forward_hook(lambda _, args, out: seen.append(out["s16_expanded"]))
    image = make_inputs(1)[0]["image"]
    visible = model.mask.draw(1, device=CPU)
    mask = pixels(visible)
    with torch.no_grad():
        for changed in (
            image,
            torch.where(mask[0], image, 255 - image),
            torch.where(mask[0], 255 - image, image),
        ):
            model([{"image": changed}], visible)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_copying_reproduces_what_is_visible_and_a_token_what_it_stands_for() -> None:
    model = make_copying_model(MaskTokenMasking, MaskToken(dim=768))
    nn.init.zeros_(model.predictor.token)
    entry, visible = make_inputs(1)[0], model.mask.draw(1, device=CPU)
    (result,) = model([entry], visible)
    mask = pixels(visible)[0]
    assert torch.equal(result["visible"], mask)
    mean = torch.tensor(MEAN).view(3, 1, 1)
    expected = torch.where(mask, entry["image"].float(), mean)
    torch.testing.assert_close(result["reconstruction"], expected, rtol=0, atol=1e-3)
    error = ((entry["image"] - mean) / torch.tensor(STD).view(3, 1, 1))[:, ~mask].square().mean()
    torch.testing.assert_close(result["loss_reconstruction"], error)
    assert "place" not in result


@pytest.mark.parametrize("arch", ARCHS)
def test_an_image_is_evaluated_with_its_own_mask_in_any_batch(arch: str) -> None:
    model = build(arch).eval()
    inputs = [{**entry, "image_id": i} for i, entry in enumerate(make_inputs(5))]
    with torch.no_grad():
        together = model(inputs)
        alone = [model([entry])[0] for entry in inputs]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        assert one["visible"].float().mean() == 0.25
    assert len({tuple(one["visible"].flatten().tolist()) for one in together}) > 1


@pytest.mark.parametrize("arch", ARCHS)
def test_training_has_the_loss_that_evaluation_has_for_any_number_of_hidden_patches(
    arch: str,
) -> None:
    model, inputs = build(arch).eval(), make_inputs(2)
    for count in (4, 11):
        visible = torch.stack([torch.randperm(16).view(4, 4) < count for _ in inputs])
        model.training = False
        expected = torch.stack([r["loss_reconstruction"] for r in model(inputs, visible)]).mean()
        model.training = True  # but not the BatchNorms
        found = model(inputs, visible)["loss_reconstruction"]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_gradient_reaches_every_parameter(arch: str) -> None:
    model = build(arch)
    model(make_inputs(4))["loss_reconstruction"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_two_differ_from_each_other_and_from_qb_heat_in_the_predictor_alone() -> None:
    states = {
        arch: {
            name: tensor.shape
            for name, tensor in build_model(make_tiny_config(arch)).state_dict().items()
            if not name.startswith("predictor.")
        }
        for arch in (*ARCHS, "QBHeat")
    }
    assert states["InterpolatedMasking"] == states["MaskTokenMasking"] == states["QBHeat"]
    assert QBHeat.pretrain_only_modules == RandomMasking.pretrain_only_modules
    names = {arch: {name for name, _ in build(arch).named_children()} for arch in ARCHS}
    for arch in ARCHS:
        assert names[arch] == {*RandomMasking.pretrain_only_modules, "backbone", "loss"}
    assert isinstance(build(ARCHS[0]).predictor, InterpolatedFeatures)
    assert isinstance(build(ARCHS[1]).predictor, MaskToken)


@pytest.mark.parametrize(
    ("grid", "ratio", "count"), [(8, 0.75, 16), (16, 0.75, 64), (4, 0.6, 6), (2, 0.5, 2)]
)
def test_as_many_positions_are_visible_in_each_image(grid: int, ratio: float, count: int) -> None:
    visible = RandomMask(grid_size=grid, mask_ratio=ratio).draw(50, device=CPU)
    assert visible.shape == (50, grid, grid)
    assert visible.dtype == torch.bool
    assert set(visible.sum(dim=(1, 2)).tolist()) == {count}


def test_the_mask_of_an_image_follows_from_its_name_alone() -> None:
    mask = RandomMask(grid_size=8)
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    together = mask.of_images(["a", "b", "c"], device=CPU)
    torch.testing.assert_close(torch.rand(()), expected, rtol=0, atol=0)
    assert torch.equal(together[1:2], mask.of_images(["b"], device=CPU))
    assert not torch.equal(together[0], together[1])
    assert together.sum() == 3 * 16
