# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstructions: pixels, losses, and figures of several runs."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from qbheat_det.analysis.attention import crop_squares
from qbheat_det.analysis.plotting import to_rgb
from qbheat_det.analysis.pretraining import (
    draw_reconstructions,
    reconstruct_images,
)
from qbheat_det.analysis.run import FigureOptions
from qbheat_det.core.figures import NotApplicable

from .conftest import check_files
from .tiny_runs import TinyRuns, truncate


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
