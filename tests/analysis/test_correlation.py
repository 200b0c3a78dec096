# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Spatial correlation by hand, against NumPy, and as a figure."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from PIL import Image

from qbheat_det.analysis.correlation import (
    draw_correlation,
    measure_in_training,
    measure_spatial_correlation,
)
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.run import Run
from qbheat_det.core.figures import NotApplicable

from .conftest import check_files
from .tiny_runs import TinyRuns, truncate


def test_it_is_the_mean_over_all_pairs_of_positions() -> None:
    torch.manual_seed(0)
    maps = torch.randn(3, 5, 2, 3)
    expected = []
    for features in maps.flatten(2).numpy():
        matrix = np.abs(np.corrcoef(features.T))
        expected.append([matrix[i, j] for i in range(6) for j in range(6) if i != j])
    torch.testing.assert_close(
        measure_spatial_correlation(maps), torch.tensor(expected).mean(dim=1).float()
    )

    maps = torch.zeros(1, 2, 2, 2)
    maps[0, 0, 0] = 1.0  # two of four positions, equal: one pair of six
    torch.testing.assert_close(measure_spatial_correlation(maps), torch.tensor([1 / 6]))
    equal = torch.full((1, 720, 2, 2), 0.1)  # whose mean is not 0.1 to the last bit
    torch.testing.assert_close(measure_spatial_correlation(equal), torch.zeros(1))
    with pytest.raises(NotApplicable, match="two positions"):
        measure_spatial_correlation(torch.zeros(1, 2, 1, 1))


def test_runs_are_compared_on_the_same_images_in_a_chart_for_each_map(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    runs = [tiny.get(name) for name in ("masking", "untrained", "classifier", "retinanet")]
    runs.append(truncate(runs[0], tmp_path))
    figure = draw_correlation(runs, FigureOptions(images=photos), correlated_images=3, size=96)
    check_files(figure, tmp_path)
    found = figure.data["runs"]
    assert list(found) == ["masking", "untrained", "classifier", "retinanet"]
    assert "cut" in figure.data["left_out"][0]
    assert [found[name]["map"] for name in ("masking", "retinanet")] == ["s16_expanded", "s16"]
    run = runs[0]
    pixels = np.asarray(Image.open(photos / "2.png"))  # 96 x 96, neither cropped nor resized
    pixels = pixels if run.cfg.INPUT.FORMAT == "RGB" else pixels[..., ::-1].copy()
    image = torch.tensor(pixels).permute(2, 0, 1)

    def measure(run: Run) -> float:
        with torch.no_grad():
            maps = run.model.backbone(((image - run.model.pixel_mean) / run.model.pixel_std)[None])
        return float(measure_spatial_correlation(maps["s16_expanded"]))

    assert found["masking"]["values"][2] == pytest.approx(measure(run), abs=1e-5)
    # An untrained encoder gets statistics of the images.
    assert found["untrained"]["values"][2] != pytest.approx(measure(runs[1]), abs=1e-4)
    assert [one["is_control"] for one in found.values()] == [False, True, False, False]
    first, second = (figure.images[f"histograms_{name}"] for name in ("s16_expanded", "s16"))
    assert b"untrained" in first.content
    assert b"retinanet" not in first.content
    assert b"retinanet" in second.content


def test_training_logs_the_mean(tiny: TinyRuns, photos: Path) -> None:
    run = tiny.get("masking")
    with torch.no_grad():
        figure = measure_in_training(run.model, lambda n: run.load_images(n, photos), run.cfg)
    assert figure.scalars == {"correlation/mean": fmean(figure.data["values"])}
    assert len(figure.data["images"]) == 3
    with pytest.raises(NotApplicable):
        measure_in_training(tiny.get("retinanet").model, lambda n: [], run.cfg)
