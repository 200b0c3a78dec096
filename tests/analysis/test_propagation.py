# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Propagated features against eigenvectors and a double loop; reconstructions."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.figure import FigureOptions, crop_squares
from qbheat_det.analysis.plotting import to_rgb
from qbheat_det.analysis.propagation import (
    decode_map,
    draw_beyond,
    extend_map,
    find_generator,
    propagate,
)
from qbheat_det.analysis.reconstruction import (
    draw_reconstructions,
    draw_training_reconstructions,
    reconstruct_images,
)
from qbheat_det.core.figures import NotApplicable
from qbheat_det.modeling.pretrain.heat_predictor import extend

from .conftest import check_files
from .tiny_runs import TinyRuns, truncate

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


def test_visible_pixels_are_the_image_s_and_masked_ones_grey_or_made(
    tiny: TinyRuns, photos: Path
) -> None:
    run = tiny.get("untrained")
    entries = crop_squares(run.cfg, [str(photos / f"{i}.png") for i in range(2)])
    with torch.no_grad():
        made = reconstruct_images(run.model, entries, pixel_format=run.cfg.INPUT.FORMAT)
        outputs = run.model(entries, ["top_left", "top_right"])
    assert [row["place"] for row in made.losses["corner"]] == ["top_left", "top_right"]
    for i, output in enumerate(outputs):
        visible = output["visible"].numpy()
        image = to_rgb(entries[i]["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
        np.testing.assert_array_equal(made.columns["input"][i], image)
        shown, completed = made.columns["visible corner"][i], made.columns["from the corner"][i]
        np.testing.assert_array_equal(shown[visible], image[visible])
        np.testing.assert_array_equal(completed[visible], image[visible])
        assert (shown[~visible] == 128).all()
        pixels = to_rgb(output["reconstruction"], run.cfg.INPUT.FORMAT).clip(0, 255).round()
        np.testing.assert_array_equal(completed[~visible], pixels.astype(np.uint8)[~visible])
        loss = float(output["loss_reconstruction"])
        assert made.losses["corner"][i]["loss"] == pytest.approx(loss)


def test_each_run_has_a_grid_of_the_same_images(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    runs = [tiny.get(name) for name in ("qb_heat", "retinanet", "untrained", "masking")]
    runs.insert(0, truncate(runs[0], tmp_path))
    options = FigureOptions(images=photos, num_images=2)
    figure = draw_reconstructions(runs, options)
    check_files(figure, tmp_path)
    assert list(figure.images) == ["grid_1", "grid_2", "grid_3"]
    assert [Path(name).name for name in figure.data["images"]] == ["0.png", "1.png"]
    found = figure.data["runs"]
    for view, mean in found["qb_heat"]["mean_losses"].items():
        assert mean == pytest.approx(fmean(row["loss"] for row in found["qb_heat"]["losses"][view]))
    assert [row[0] for row in figure.table.rows] == ["qb_heat", "untrained", "masking"]
    assert figure.table.rows[2][1:3] == ("-", "-")
    assert [name in text for name, text in zip(("cut", "retinanet"), figure.data["left_out"],
                                               strict=True)]  # fmt: skip
    again = draw_reconstructions(runs[4:], options)
    assert again.data["runs"]["masking"] == found["masking"]  # masks are drawn from the seed
    with pytest.raises(NotApplicable, match="classifier"):
        draw_reconstructions([tiny.get("classifier")], options)


def test_training_draws_a_grid_and_logs_the_losses(tiny: TinyRuns, photos: Path) -> None:
    run = tiny.get("untrained")
    with torch.no_grad():
        figure = draw_training_reconstructions(
            run.model, lambda n: run.load_images(n, photos), run.cfg
        )
    assert list(figure.scalars) == ["reconstructions/corner", "reconstructions/centre"]
    assert figure.images["grid"].media_type == "image/jpeg"
    with pytest.raises(NotApplicable):
        draw_training_reconstructions(tiny.get("classifier").model, lambda n: [], run.cfg)
