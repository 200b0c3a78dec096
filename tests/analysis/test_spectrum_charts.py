# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The chart of a spectrum, at zero too."""

import pytest
import torch

from qbheat_det.analysis.spectrum import NAMES, RotatedControl, describe_models
from qbheat_det.analysis.spectrum_charts import plot_spectrum


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
