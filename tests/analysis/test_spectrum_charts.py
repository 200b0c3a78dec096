# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The charts of a spectrum, at zero too, and those of carried features."""

import math

import pytest
import torch

from qbheat_det.analysis.propagation_charts import plot_over_distance
from qbheat_det.analysis.spectrum import NAMES, RotatedControl, describe_models
from qbheat_det.analysis.spectrum_charts import (
    plot_eigenvalues,
    plot_energy_ratios,
    plot_spectrum,
)


@pytest.mark.parametrize("factor", [0.0, 0.1])
@pytest.mark.parametrize("scales", [{"corner": 0.5}, {"corner": 0.5, "centre": 0.25}])
def test_a_chart_has_a_panel_for_each_scale_and_one_for_both(
    scales: dict[str, float], factor: float
) -> None:
    torch.manual_seed(0)
    models = {
        scale: (offset, {name: factor * torch.randn(5, 5) for name in NAMES})
        for scale, offset in scales.items()
    }
    chart = plot_spectrum(describe_models(models), RotatedControl().describe(models)).decode()
    assert chart.count('id="axes_') == len(scales) + (len(scales) == 2)
    png = plot_spectrum(describe_models(models), theme="dark", format="png")
    assert png.startswith(b"\x89PNG")


def test_eigenvalues_ratios_and_distances_have_titles_units_and_a_legend_in_light_and_dark() -> (
    None
):
    torch.manual_seed(0)
    models = {"corner": (0.5, {name: torch.randn(3, 3) for name in NAMES})}
    plane = plot_eigenvalues(describe_models(models), theme="dark").decode()
    for text in ("corner, Δx = 0.5 W", "real part, per side of the image", *NAMES):
        assert f"<!-- {text} -->" in plane
    ratios = {"run, corner": ([1.0, 2.0], [0.9, math.nan])}
    course = plot_energy_ratios(ratios, x_label="epochs").decode()
    for text in ("epochs", "E(A) / E(B)", "run, corner"):
        assert f"<!-- {text} -->" in course
    lines = {"right": ([0.0, 1.0], [1.0, 3.0])}
    settings = {"title": "Growth", "label": "norm", "level": 1.0, "level_label": "as it was"}
    growth = plot_over_distance(lines, **settings).decode()  # type: ignore[arg-type]
    for text in ("Growth", "norm", "distance, sides of the image", "right", "as it was"):
        assert f"<!-- {text} -->" in growth
