# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Spectra of linear models and spatial correlation: by construction, by hand, as figures."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.attention import crop_squares
from qbheat_det.analysis.pretraining import (
    draw_correlation,
    measure_spatial_correlation,
)
from qbheat_det.analysis.run import FigureOptions, Run
from qbheat_det.analysis.spectrum import (
    NAMES,
    Models,
    commutator,
    describe_models,
    draw_spectrum,
    effective_rank,
    inverse_error,
    magnitude_correlation,
    read_linear_models,
    rotate_models,
)
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable

from .conftest import check_files
from .tiny_runs import TinyRuns, truncate

DIM = 6


def draw(seed: int, dim: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, dim, dtype=torch.float64, generator=generator)


def with_eigenvalues(values: list[float], seed: int = 0) -> Tensor:
    """A matrix that is not symmetric, of given real eigenvalues."""
    basis = draw(seed, len(values))
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.inverse()


def test_energies_and_inverse_errors_are_those_by_hand() -> None:
    values = {"A1": [1.0, -2.0], "A2": [3.0, 0.5], "B1": [1.0, 1.5], "B2": [-2.0, 0.5]}
    matrices = {name: with_eigenvalues(found) for name, found in values.items()}
    found = describe_models({"centre": (0.25, matrices)})
    torch.testing.assert_close(
        found.eigenvalues["centre"]["A1"].abs(), torch.tensor([2.0, 1.0]).double() / 0.25
    )
    # Both directions of an axis count: (3 + 3.5) / (2.5 + 2.5).
    assert found.summary["energy_A_centre"] == pytest.approx(6.5 / 0.25)
    assert found.summary["energy_ratio_centre"] == pytest.approx(6.5 / 5.0)

    identity = torch.eye(DIM, dtype=torch.float64)
    forth = 0.1 * draw(4)
    back = torch.linalg.inv(identity + forth) - identity
    assert inverse_error(forth, back) == pytest.approx(0.0, abs=1e-12)
    # The opposite matrix misses by M squared, and the same one by twice M.
    assert inverse_error(1e-4 * forth, -1e-4 * forth) < 1e-4
    assert inverse_error(1e-4 * forth, 1e-4 * forth) == pytest.approx(1.0, abs=1e-4)
    assert inverse_error(1e-6 * draw(5, 200), 1e-6 * draw(6, 200)) == pytest.approx(0.707, abs=0.02)
    assert math.isnan(inverse_error(0 * forth, 0 * forth))


def make_models(factor: float) -> Models:
    return {
        scale: (offset, {name: (factor * draw(10 * i + j)).float() for j, name in enumerate(NAMES)})
        for i, (scale, offset) in enumerate({"corner": 0.5, "centre": 0.25}.items())
    }


def test_rotated_models_have_the_learned_singular_values_and_share_opposites() -> None:
    models = make_models(0.3)
    (_, one), (_, again) = (rotate_models(models)["corner"] for _ in range(2))
    other = models["corner"][1]
    for name in NAMES:
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name])
        expected = torch.linalg.svdvals(models["corner"][1][name])
        torch.testing.assert_close(torch.linalg.svdvals(one[name]), expected)
    offset, matrices = models["corner"]
    opposite = {"corner": (offset, {**matrices, "A2": -matrices["A1"]})}
    _, found = rotate_models(opposite)["corner"]
    assert torch.equal(found["A2"], -found["A1"])
    assert not torch.equal(found["B2"], -found["B1"])


def test_linear_models_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    state = {f"predictor.scales.centre.{name}": torch.randn(3, 3) for name in ("A1", "B1")}
    torch.save({"model": state}, path)
    ((scale, (offset, models)),) = read_linear_models(path, "run").items()
    assert (scale, offset, len(models)) == ("centre", 0.25, 8)
    torch.testing.assert_close(models["A1"], state["predictor.scales.centre.A1"])
    torch.testing.assert_close(models["A2"], -models["A1"])
    torch.save({"predictor.scales.corner.A1": torch.randn(3, 3)}, path)
    with pytest.raises(UserError, match=r"weights\.pth"):
        read_linear_models(path, "run")


def test_commutator_correlation_and_rank_equal_hand_computed_values() -> None:
    a, b = with_eigenvalues([1.0, 2, 3, 4]), with_eigenvalues([0.5, -1, 2, 7])
    assert commutator(a, b) == pytest.approx(0.0, abs=1e-12)  # of one basis
    up = torch.tensor([[0.0, 1.0], [0.0, 0.0]])  # AB - BA = diag(1, -1), of norms 1
    assert commutator(5 * up, 0.1 * up.T) == pytest.approx(math.sqrt(2))
    falling, steep = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([9.0, 1.0, 1.0, 1.0])
    # Deviations (1.5, .5, -.5, -1.5) and (6, -2, -2, -2): 12 / (sqrt(5) sqrt(48)).
    assert magnitude_correlation(falling, steep) == pytest.approx(12 / math.sqrt(240))
    assert math.isnan(magnitude_correlation(falling, torch.ones(4)))
    # Shares 1/2, 1/4, 1/4: an entropy of 3/2 log 2.
    assert effective_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))) == pytest.approx(2**1.5)
    assert math.isnan(effective_rank(torch.zeros(3, 3)))


def test_checkpoints_and_their_controls_have_rows(tiny: TinyRuns, tmp_path: Path) -> None:
    run, detector = tiny.get("qb_heat"), tiny.get("retinanet")
    earlier = Run.open(run.folder / "model_0000009.pth", label="early", device="cpu")
    (tmp_path / "b.pth").write_bytes(b"PK\x03\x04 and no more")
    broken = Run.open(tmp_path / "b.pth", label="broken")
    figure = draw_spectrum([earlier, run, detector, broken], FigureOptions())
    check_files(figure, tmp_path)
    assert [row[0] for row in figure.table.rows] == [
        "early", "early, rotated", "qb_heat", "qb_heat, rotated"
    ]  # fmt: skip
    # The same matrices, scaled by 1/4: energies grow with them.
    early, late = (figure.data["rows"][row]["energy_A_centre"] for row in ("early", "qb_heat"))
    assert early == pytest.approx(late / 4, rel=1e-4)
    assert ["retinanet" in figure.data["left_out"][0], "b.pth" in figure.data["left_out"][1]]
    with pytest.raises(NotApplicable, match="retinanet"):
        draw_spectrum([detector], FigureOptions())


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
    figure = draw_correlation(runs, FigureOptions(images=photos), correlated_images=3)
    check_files(figure, tmp_path)
    found = figure.data["runs"]
    assert list(found) == ["masking", "untrained", "classifier", "retinanet"]
    assert "cut" in figure.data["left_out"][0]
    assert [found[name]["map"] for name in ("masking", "retinanet")] == ["s16_expanded", "s16"]
    run = runs[0]
    image = crop_squares(run.cfg, [str(photos / "2.png")])[0]["image"]

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
