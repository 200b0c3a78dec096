# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images into the backbone, patches, the decoder and the loss, by hand arithmetic and loops."""

import pytest
import torch

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain import (
    ReconstructionDecoder,
    ReconstructionLoss,
    patchify,
    take,
)
from qbheat_det.modeling.pretrain.base import PretrainingModel, find_map
from qbheat_det.modeling.pretrain.pixel_decoder import masked_positions
from tests.modeling.tiny_pretraining import MEAN, STD, PatchesAsMap, make_inputs

PATCHES = torch.tensor([[[0.0, 0, 3], [1, 2, 3]]])
PREDICTED = torch.tensor([[[0.0, 0, 0], [1, 1, 1]]])
VISIBLE = torch.tensor([[True, False]])


def test_patches_come_row_by_row_and_hold_the_pixels_of_their_square() -> None:
    images = torch.randn(2, 3, 12, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 9, 48)
    for row in range(3):
        for column in range(3):
            square = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            torch.testing.assert_close(patches[:, 3 * row + column], square.flatten(1))


@pytest.mark.parametrize(("positions", "expected"), [("masked", 5 / 3), ("all", 7 / 3)])
def test_raw_pixels_give_the_mean_squared_error(positions: str, expected: float) -> None:
    # The patches' errors are 9 / 3 and (0 + 1 + 4) / 3.
    loss = ReconstructionLoss(positions=positions, normalize_patches=False)
    found = loss(PREDICTED, PATCHES, VISIBLE)
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_the_loss_of_an_image_depends_on_nothing_but_its_masked_patches() -> None:
    patches, predicted = torch.randn(2, 3, 4, 48).unbind()
    visible = torch.tensor([[True, False, False, False]] * 3)
    changed = predicted.clone()
    changed[:, 0] = 100
    changed[2] = 100
    loss = ReconstructionLoss()
    before, after = (loss(each, patches, visible) for each in (predicted, changed))
    torch.testing.assert_close(after[:2], before[:2])
    assert after[2] > before[2]


@pytest.mark.parametrize("normalize", [True, False])
def test_restoring_undoes_the_normalisation(normalize: bool) -> None:
    patches = 5 + 3 * torch.randn(2, 4, 48)
    loss = ReconstructionLoss(normalize_patches=normalize)
    mean = patches.mean(dim=-1, keepdim=True)
    deviation = patches.std(dim=-1, keepdim=True)
    target = (patches - mean) / deviation if normalize else patches
    torch.testing.assert_close(loss.restore(target, patches), patches)


def make_decoder(in_channels: int = 16) -> ReconstructionDecoder:
    return ReconstructionDecoder(
        in_channels=in_channels, grid_size=4, patch_size=2, dim=16, depth=2, num_heads=4
    ).eval()


def test_some_positions_are_reconstructed_as_among_all_with_the_same_gradients() -> None:
    decoder = make_decoder(24).double()
    positions = torch.tensor([[0, 3, 9], [15, 2, 2]])
    z = torch.randn(2, 4, 4, 24, dtype=torch.float64)
    weights = torch.randn(2, 3, 12, dtype=torch.float64)
    gradients = []
    for found in (decoder(z, positions), take(decoder(z), positions)):
        decoder.zero_grad()
        (found * weights).sum().backward()
        gradients.append([found, *(parameter.grad for parameter in decoder.parameters())])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_over_a_batch_is_the_mean_of_those_of_its_images(normalize: bool) -> None:
    patches, predicted = torch.randn(2, 3, 4, 48).unbind()
    visible = torch.eye(4, dtype=torch.bool)[[0, 2, 0]]
    loss = ReconstructionLoss(normalize_patches=normalize)
    hidden = masked_positions(visible, 3)
    found = loss.over_batch(take(predicted, hidden), take(patches, hidden))
    torch.testing.assert_close(found, loss(predicted, patches, visible).mean())


def make_model() -> PretrainingModel:
    values = {"backbone": PatchesAsMap(), "in_feature": "map", "head_in_features": ["map"]}
    return PretrainingModel(**values, image_size=32, pixel_mean=MEAN, pixel_std=STD)


def test_images_are_normalised_by_channel() -> None:
    inputs = make_inputs(3, 32)
    found = make_model().preprocess_image(inputs)
    for channel in range(3):
        expected = (inputs[1]["image"][channel].float() - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(found[1, channel], expected)


@pytest.mark.parametrize("key", ["image", "image_key"])
def test_an_image_of_another_size_or_none_is_named(key: str) -> None:
    entry = {"image": torch.zeros(3, 32, 16, dtype=torch.uint8), "file_name": "a.jpg"}
    with pytest.raises(UserError, match="a\\.jpg"):
        make_model().preprocess_image([entry], key=key)


@pytest.mark.parametrize(("multiple", "size"), [(1, 72), (4, 72), (4, 0), (None, 0)])
def test_a_side_that_does_not_fall_into_positions_is_refused(
    multiple: int | None, size: int
) -> None:
    shapes, side = PatchesAsMap().output_shape(), 16 * (multiple or 1)
    assert find_map(shapes, "map", side, multiple=multiple).stride == 16
    with pytest.raises(ValueError, match=rf"multiple of {side}, not {size}: set .* to \d+"):
        find_map(shapes, "map", size, multiple=multiple)
