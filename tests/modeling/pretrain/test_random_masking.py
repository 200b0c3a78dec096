# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Random masking, and the patches, decoder and loss of all that reconstruct."""

import pytest
import torch
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.modeling.pretrain import (
    MaskTokenMasking,
    ReconstructionDecoder,
    ReconstructionLoss,
    take,
)
from qbheat_det.modeling.pretrain.random_masking import InterpolatedFeatures, MaskToken
from tests.modeling.tiny_pretraining import (
    MEAN,
    STD,
    make_copying_model,
    make_inputs,
    make_tiny_config,
)

ARCHS = ("InterpolatedMasking", "MaskTokenMasking")
CPU = torch.device("cpu")


def build(arch):
    return build_model(make_tiny_config(arch))


def pixels(visible):
    """From positions (N, 4, 4) to pixels (N, 64, 64)."""
    return visible.repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)


@pytest.mark.parametrize("arch", ARCHS)
def test_hidden_pixels_change_nothing_of_what_is_reconstructed(arch):
    model = build(arch).eval()
    seen = []
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


def test_copying_reproduces_what_is_visible_and_a_token_what_it_stands_for():
    model = make_copying_model(MaskTokenMasking, MaskToken(dim=768), 4, mask_ratio=0.5)
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
def test_an_image_is_evaluated_with_its_own_mask_in_any_batch(arch):
    model = build(arch).eval()
    inputs = [{**entry, "image_id": i} for i, entry in enumerate(make_inputs(5))]
    with torch.no_grad():
        together = model(inputs)
        alone = [model([entry])[0] for entry in inputs]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        assert one["visible"].float().mean() == 0.25
    assert len({tuple(one["visible"].flatten().tolist()) for one in together}) > 1


def make_filling(dim, *, std=0.0):
    filling = InterpolatedFeatures(dim=dim)
    for matrix in (filling.x, filling.y):
        torch.nn.init.normal_(matrix, std=std)
    return filling


def draw_visible(grid, count, num_images=4):
    order = torch.rand(num_images, grid * grid).argsort(dim=1)
    return (order < count).unflatten(1, (grid, grid))


def nearest(visible, start, step):
    """Walks from a position until it stands on a visible one, or over the border."""
    row, column = start[0] + step[0], start[1] + step[1]
    while 0 <= row < len(visible) and 0 <= column < len(visible):
        if visible[row, column]:
            return row, column
        row, column = row + step[0], column + step[1]
    return None


def fill_by_hand(z, visible, maps):
    """One image, position by position."""
    filled = z.clone()
    for row in range(len(z)):
        for column in range(len(z)):
            if visible[row, column]:
                continue
            found = []
            for matrix, step in zip(maps, ((0, 1), (1, 0)), strict=True):
                ends = [
                    nearest(visible, (row, column), (sign * step[0], sign * step[1]))
                    for sign in (-1, 1)
                ]
                distance = [
                    0 if end is None else abs(end[0] - row) + abs(end[1] - column) for end in ends
                ]
                if ends[0] is not None and ends[1] is not None:
                    near, far = z[ends[0]], z[ends[1]]
                    mixed = (distance[1] * near + distance[0] * far) / sum(distance)
                elif ends[0] is not None or ends[1] is not None:
                    mixed = z[ends[0] or ends[1]]
                else:
                    continue
                found.append(mixed + matrix @ mixed)
            filled[row, column] = torch.stack(found).mean(0) if found else z[visible].mean(0)
    return filled


@pytest.mark.parametrize(("grid", "count"), [(1, 1), (5, 1), (8, 16), (8, 5)])
def test_features_are_those_of_a_walk_to_the_neighbours(grid, count):
    torch.manual_seed(grid + count)
    filling = make_filling(3, std=0.5)
    z, visible = torch.randn(4, grid, grid, 3), draw_visible(grid, count)
    expected = [
        fill_by_hand(*pair, (filling.x, filling.y)) for pair in zip(z, visible, strict=True)
    ]
    torch.testing.assert_close(filling(z, visible), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("filling", [make_filling(3, std=0.5), MaskToken(dim=3)])
def test_hidden_features_have_no_influence_and_visible_ones_stay(filling):
    z, visible = torch.randn(4, 6, 6, 3), draw_visible(6, 7)
    found = filling(z, visible)
    for value in (7.0, torch.inf, torch.nan):
        changed = filling(torch.where(visible.unsqueeze(-1), z, value), visible)
        torch.testing.assert_close(changed, found, rtol=0, atol=0)
    torch.testing.assert_close(found[visible], z[visible], rtol=0, atol=0)


@pytest.mark.parametrize("normalize", [True, False])
def test_restoring_undoes_the_normalisation(normalize):
    patches = 5 + 3 * torch.randn(2, 4, 48)
    loss = ReconstructionLoss(normalize_patches=normalize)
    mean = patches.mean(dim=-1, keepdim=True)
    deviation = patches.std(dim=-1, keepdim=True)
    target = (patches - mean) / deviation if normalize else patches
    torch.testing.assert_close(loss.restore(target, patches), patches)


def make_decoder(in_channels=16):
    return ReconstructionDecoder(
        in_channels=in_channels, grid_size=4, patch_size=2, dim=16, depth=2, num_heads=4
    ).eval()


def test_some_positions_are_reconstructed_as_among_all_with_the_same_gradients():
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
