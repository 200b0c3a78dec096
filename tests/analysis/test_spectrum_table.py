# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Rows of spectra, and the control that nothing was learned by."""

import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.spectrum import NAMES, describe_models
from qbheat_det.analysis.spectrum_table import draw_untrained, summarize, tabulate

OFFSETS = {"corner": 0.5, "centre": 0.25}


def make_models(dim: int, factor: float = 0.1) -> dict[str, tuple[float, dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    return {
        scale: (
            offset,
            {name: factor * torch.randn(dim, dim, generator=generator) for name in NAMES},
        )
        for scale, offset in OFFSETS.items()
    }


def test_untrained_matrices_correlate_across_scales_all_but_perfectly() -> None:
    # What pretraining alone must not be credited with: the diagonal of Fig. 7.
    models = make_models(128)
    for _, matrices in models.values():  # a learned E(A)/E(B) of 2 is not lent to the control
        matrices["A1"], matrices["A2"] = 2 * matrices["A1"], 2 * matrices["A2"]
    assert describe_models(models).scales["corner"].energy_ratio == pytest.approx(2, abs=0.1)
    untrained = describe_models(draw_untrained(models))
    assert min(untrained.correlations.values()) > 0.99
    for scale in untrained.scales.values():
        assert scale.energy_ratio == pytest.approx(1, abs=0.05)
        assert {matrix.rank for matrix in scale.matrices.values()} == {128}


def test_untrained_matrices_have_the_size_and_the_shared_directions_of_the_learned() -> None:
    models = make_models(8)
    models["corner"][1]["A2"] = -models["corner"][1]["A1"]
    drawn = draw_untrained(models, seed=1)
    for scale, (offset, matrices) in models.items():
        assert drawn[scale][0] == offset
        mean = torch.stack([matrix.norm() for matrix in matrices.values()]).mean()
        for name in NAMES:
            torch.testing.assert_close(drawn[scale][1][name].norm(), mean)
            assert not torch.equal(drawn[scale][1][name], matrices[name])
    torch.testing.assert_close(drawn["corner"][1]["A2"], -drawn["corner"][1]["A1"])
    torch.testing.assert_close(
        draw_untrained(models, seed=1)["centre"][1]["B1"], drawn["centre"][1]["B1"]
    )


def test_beside_models_at_zero_untrained_ones_still_have_a_spectrum() -> None:
    summary = summarize(describe_models(draw_untrained(make_models(16, factor=0.0))))
    assert summary["rank"] == 16
    assert summary["correlation"] > 0.8


def test_a_row_has_the_ratios_of_table_3_the_smaller_offset_first() -> None:
    diagonal = {"A1": [1.0, -2.0], "A2": [3.0, 0.5], "B1": [1.0, 1.5], "B2": [-2.0, 0.5]}
    corner = {name: torch.diag(torch.tensor(values)) for name, values in diagonal.items()}
    centre = {**corner, "B1": 2 * corner["B1"]}
    spectrum = describe_models({"corner": (0.5, corner), "centre": (0.25, centre)})
    zero = describe_models(make_models(2, factor=0.0))
    one = describe_models({"corner": (0.5, corner)})
    table = tabulate({"learned": spectrum, "at zero": zero, "one scale": one})
    assert table.header[1:3] == ["E(A)/E(B) at Δx = 0.25 W", "E(A)/E(B) at Δx = 0.5 W"]
    # (3 + 3.5) / (5 + 2.5) and (3 + 3.5) / (2.5 + 2.5).
    assert table.rows[0][:3] == ["learned", "0.8667", "1.3000"]
    assert table.rows[1][:4] == ["at zero", "n/a", "n/a", "n/a"]
    assert table.rows[2][:4] == ["one scale", "n/a", "1.3000", "n/a"]
    assert all(len(row) == len(table.header) for row in table.rows)
    # I + A1 is diag(2, -1), I + A2 diag(4, 1.5), I + B1 diag(2, 2.5), I + B2 diag(-1, 1.5); those
    # of the centre, with 2 B1, diag(3, 4): the greatest is 8 / 3.
    assert summarize(spectrum)["condition"] == pytest.approx(8 / 3)
    assert summarize(spectrum)["commutator"] == pytest.approx(0)
    assert summarize(spectrum)["energy_A_corner"] == pytest.approx(6.5 / 0.5)
