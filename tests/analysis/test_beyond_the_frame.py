# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features and pixels beyond the frame, position by position."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.beyond_pictures import DecodingModel, draw_beyond
from qbheat_det.analysis.beyond_the_frame import (
    continue_map,
    decode_map,
    frame_image,
    measure_error,
    measure_growth,
)
from qbheat_det.analysis.propagation import find_generator
from qbheat_det.modeling.pretrain import ReconstructionLoss, extend

DIM, SIZE = 3, 4
NAMES = ("A1", "A2", "B1", "B2")


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def draw_generators() -> dict[str, Tensor]:
    return {name: 0.4 * draw(seed, DIM, DIM) for seed, name in enumerate(NAMES)}


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_every_position_is_that_of_a_double_loop(stride: int) -> None:
    z, generators, margin = draw(9, 2, SIZE, SIZE, DIM), draw_generators(), 5
    found = continue_map(z, generators, margin, stride=stride)

    def source(place: int) -> tuple[int, str, int]:
        """Where along an axis a place comes from, which way, and how many positions."""
        steps, way = 0, "forth"
        while place >= SIZE:
            place, steps = place - stride, steps + stride
        while place < 0:
            place, steps, way = place + stride, steps + stride, "back"
        return place, way, steps

    for row in range(-margin, SIZE + margin):
        for column in range(-margin, SIZE + margin):
            y, up_or_down, rows = source(row)
            x, left_or_right, columns = source(column)
            b = generators["B1" if up_or_down == "forth" else "B2"]
            a = generators["A1" if left_or_right == "forth" else "A2"]
            carried = torch.matrix_exp(a * columns / SIZE) @ torch.matrix_exp(b * rows / SIZE)
            torch.testing.assert_close(
                found[:, row + margin, column + margin], z[:, y, x] @ carried.T
            )


def test_learned_steps_beyond_the_frame_are_those_of_the_predictor() -> None:
    steps = {name: 0.3 * draw(seed, DIM, DIM) for seed, name in enumerate(NAMES)}
    generators = {name: find_generator(step, 0.5) for name, step in steps.items()}
    z = draw(9, 1, SIZE, SIZE, DIM)
    half = SIZE // 2
    found = continue_map(z, generators, half, stride=half)
    # The lower right quarter, as a visible block in the upper left corner of twice its side.
    models = {**steps, **{name: torch.zeros(DIM, DIM).double() for name in
                          ("C11", "C12", "C21", "C22")}}  # fmt: skip
    whole = extend(z[:, half:, half:], 0, models)
    torch.testing.assert_close(found[:, SIZE : SIZE + half, -half:], whole[:, :half, half:])
    torch.testing.assert_close(found[:, -half:, SIZE : SIZE + half], whole[:, half:, :half])


def test_without_generators_the_outermost_features_go_on() -> None:
    z = draw(9, 1, SIZE, SIZE, DIM).float()
    found = continue_map(z, {name: torch.zeros(DIM, DIM) for name in NAMES}, 2, stride=1)
    padded = torch.nn.functional.pad(z.permute(0, 3, 1, 2), (2, 2, 2, 2), mode="replicate")
    torch.testing.assert_close(found, padded.permute(0, 2, 3, 1))
    with pytest.raises(ValueError, match="1 to 4 positions, not 5"):
        continue_map(z, draw_generators(), 2, stride=5)


@pytest.mark.parametrize("margin", [0, 1, 2, 3, 4, 7])
def test_a_decoder_gives_each_position_its_own_pixels_and_the_image_one_window(margin: int) -> None:
    length = SIZE + 2 * margin
    # What a position holds says where it is; the decoder adds which window it was in.
    places = torch.stack(
        torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij"), dim=-1
    )
    windows: list[tuple[int, int]] = []

    def decode(z: Tensor) -> Tensor:
        assert z.shape[1:3] == (SIZE, SIZE)
        corner = z[:, :1, :1].expand_as(z)
        windows.append((int(z[0, 0, 0, 0]), int(z[0, 0, 0, 1])))
        return torch.cat([z, corner], dim=-1).flatten(1, 2)

    found = decode_map(places[None].float(), decode, SIZE)[0]
    torch.testing.assert_close(found[..., :2], places.float())
    middle = found[margin : margin + SIZE, margin : margin + SIZE, 2:]
    torch.testing.assert_close(middle, torch.full_like(middle, margin))
    assert len(windows) == len(set(windows)) == (1 + 2 * -(-margin // (SIZE // 2))) ** 2
    # No window could have been moved less by half windows, and still hold the position.
    for row in range(length):
        start = int(found[row, 0, 2])
        assert start <= row < start + SIZE
        beyond = max(margin - row, row - (margin + SIZE - 1), 0)
        assert abs(start - margin) < beyond + SIZE // 2


def test_beyond_the_frame_brightness_is_that_of_the_image_on_the_average() -> None:
    patches = draw(1, 2, SIZE, SIZE, 12).float() * 3 + 5
    predicted = draw(2, 2, SIZE + 2, SIZE + 2, 12).float()
    loss = ReconstructionLoss(normalize_patches=True)
    made = frame_image(patches, predicted, loss.restore)
    torch.testing.assert_close(made[:, 1:-1, 1:-1], patches)
    for image in range(2):
        mean = patches[image].mean(dim=-1).mean()
        deviation = patches[image].std(dim=-1).mean()
        corner = predicted[image, 0, 0] * deviation + mean
        torch.testing.assert_close(made[image, 0, 0], corner, rtol=1e-5, atol=1e-5)
    plain = ReconstructionLoss(normalize_patches=False)
    made = frame_image(patches, predicted, plain.restore)
    torch.testing.assert_close(made[:, 0], predicted[:, 0])


def test_growth_is_that_of_the_eigenvalue_where_there_is_one() -> None:
    generators = {name: value * torch.eye(DIM).double() for name, value in
                  zip(NAMES, (0.7, -0.2, 0.0, 1.5), strict=True)}  # fmt: skip
    growth = measure_growth(draw(1, 2, DIM), generators, [0.0, 0.5, 2.0])
    expected = {"right": 0.7, "left": -0.2, "down": 0.0, "up": 1.5}
    for way, value in expected.items():
        assert growth[way] == pytest.approx([np.exp(value * x) for x in (0.0, 0.5, 2.0)])


def test_a_map_that_obeys_the_equation_has_no_error_and_another_has_some() -> None:
    a, b = 0.8 * draw(3, DIM, DIM), torch.zeros(DIM, DIM).double()
    b += 0.5 * a @ a  # commutes with a
    z0 = draw(4, 2, DIM)
    z = torch.stack(
        [
            torch.stack(
                [z0 @ torch.matrix_exp((a * x + b * y) / SIZE).T for x in range(SIZE)], dim=1
            )
            for y in range(SIZE)
        ],
        dim=1,
    )
    lawful = measure_error(z, {"A1": a, "A2": -a, "B1": b, "B2": -b})
    for errors in lawful.values():
        assert errors == pytest.approx([0] * (SIZE - 1), abs=1e-10)
    still = measure_error(z, {name: torch.zeros(DIM, DIM).double() for name in NAMES})
    # By hand, for one step to the right.
    mean = z.mean(dim=(0, 1, 2))
    expected = (z[:, :, :-1] - z[:, :, 1:]).norm() / (z[:, :, 1:] - mean).norm()
    assert still["right"][0] == pytest.approx(float(expected))
    expected = (z[:, 2:] - z[:, :-2]).norm() / (z[:, :-2] - mean).norm()
    assert still["up"][1] == pytest.approx(float(expected))


def test_a_picture_has_the_image_in_its_frame_and_the_decoders_pixels_around_it() -> None:
    patch = 2

    class Decoder:
        grid_size, patch_size = SIZE, patch

        def __call__(self, z: Tensor) -> Tensor:
            return z.flatten(1, 2)[..., :1].expand(-1, -1, 3 * patch**2)

    model: Any = SimpleNamespace(
        decoder=Decoder(),
        loss=ReconstructionLoss(normalize_patches=False),
        pixel_mean=torch.full((3, 1, 1), 100.0),
        pixel_std=torch.full((3, 1, 1), 10.0),
    )
    image = torch.zeros(1, 3, SIZE * patch, SIZE * patch)
    image[:, 0] = 5  # 150 in the first channel, 100 in the others
    z = torch.full((1, SIZE, SIZE, DIM), 2.0)  # decoded as 120
    still = {name: torch.zeros(DIM, DIM) for name in NAMES}
    side = 2 * SIZE * patch  # with the margin, one picture pixel a pixel
    for pixel_format, expected in (("RGB", [150, 100, 100]), ("BGR", [100, 100, 150])):
        (picture,) = draw_beyond(
            cast(DecodingModel, model),
            image,
            z,
            still,
            margin=SIZE // 2,
            stride=1,
            pixel_format=pixel_format,
            side=side,
        )
        assert picture.shape == (side, side, 3)
        border = SIZE * patch // 2
        inside = picture[border:-border, border:-border]
        np.testing.assert_array_equal(inside, np.broadcast_to(expected, inside.shape))
        outside = np.ones((side, side), dtype=bool)
        outside[border - 1 : -border + 1, border - 1 : -border + 1] = False  # and the line
        assert set(picture[outside].ravel()) == {120}
