# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Propagated features: against eigenvectors, the equation they solve, and a double loop."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.propagation import (
    decode_map,
    draw_beyond,
    extend_map,
    find_generator,
    propagate,
)
from qbheat_det.core.figures import NotApplicable
from qbheat_det.modeling.pretrain.heat_predictor import extend

from .conftest import check_files
from .tiny_runs import TinyRuns

DIM, SIZE = 3, 4
NAMES = ("A1", "A2", "B1", "B2")


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def draw_generators() -> dict[str, Tensor]:
    return {name: 0.4 * draw(seed, DIM, DIM) for seed, name in enumerate(NAMES)}


def test_the_generator_gives_the_learned_step() -> None:
    step, eye = 0.08 * draw(8, 6, 6), torch.eye(6, dtype=torch.float64)
    exact = find_generator(step, 0.25)
    torch.testing.assert_close(propagate(eye, exact, 0.25).mT, eye + step)
    # It is complex where the step reverses a direction. I + M: -0.5 and 1.2.
    a = find_generator(torch.diag(torch.tensor([-1.5, 0.2])), 0.5)
    found = propagate(torch.tensor([[2.0, 1.0]]), a, 1.0).real.float()
    torch.testing.assert_close(found, torch.tensor([[0.5, 1.44]]))
    with pytest.raises(NotApplicable, match="singular"):
        find_generator(-torch.eye(3), 0.5)


def test_every_position_is_that_of_a_double_loop() -> None:
    z, generators, margin = draw(9, 2, SIZE, SIZE, DIM), draw_generators(), 5
    found = extend_map(z, generators, margin)

    def source(place: int, forth: str, back: str) -> tuple[int, Tensor]:
        """Where along an axis a place comes from, and by which exponential."""
        inside = min(max(place, 0), SIZE - 1)
        name = forth if place > inside else back
        return inside, torch.matrix_exp(generators[name] * abs(place - inside) / SIZE)

    for row in range(-margin, SIZE + margin):
        for column in range(-margin, SIZE + margin):
            y, down = source(row, "B1", "B2")
            x, along = source(column, "A1", "A2")
            torch.testing.assert_close(
                found[:, row + margin, column + margin], z[:, y, x] @ (along @ down).T
            )


def test_windows_are_decoded_where_they_are() -> None:
    places = torch.stack(torch.meshgrid(2 * [torch.arange(3 * SIZE)], indexing="ij"), dim=-1)

    def decode(z: Tensor) -> Tensor:
        """What a position holds says where it is; the decoder adds which window it was in."""
        return torch.cat([z, z[:, :1, :1].expand_as(z)], dim=-1).flatten(1, 2)

    maps = torch.stack([places, places + 100]).float()
    found = decode_map(maps, decode, SIZE)
    torch.testing.assert_close(found[..., :2], maps)
    corners = SIZE * (places // SIZE).float()
    torch.testing.assert_close(found[..., 2:], torch.stack([corners, corners + 100]))


def test_propagation_is_drawn_at_every_distance_beside_the_control(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    run, detector = tiny.get("qb_heat"), tiny.get("retinanet")
    options = FigureOptions(images=photos, num_images=1)
    figure = draw_beyond([detector, run], options, distances=[0.5, 0.25], scale="centre")
    check_files(figure, tmp_path)
    assert figure.data["runs"] == {"qb_heat": {"scale": "centre", "offset": 0.25}}
    for runs, folder in (([detector], photos), ([run], None)):
        with pytest.raises(NotApplicable):
            draw_beyond(runs, FigureOptions(images=folder))


def test_a_step_of_the_offset_is_the_predictor_s() -> None:
    steps = {name: 0.3 * draw(seed, DIM, DIM) for seed, name in enumerate(NAMES)}
    generators = {name: find_generator(step, 0.5) for name, step in steps.items()}
    z = draw(9, 1, SIZE, SIZE, DIM)
    half = SIZE // 2
    found = extend_map(z, generators, half)
    # The lower right quarter, as a visible block in the upper left corner of twice its side.
    others = {name: torch.zeros(DIM, DIM).double() for name in ("C11", "C12", "C21", "C22")}
    whole = extend(z[:, half:, half:], 0, steps | others)
    torch.testing.assert_close(found[:, -1, -half - 1], whole[:, -1, half - 1])
