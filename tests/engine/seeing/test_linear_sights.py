# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Spectrum and what lies beyond the frame, of files of weights and of a run with checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qbheat_det.analysis.exhibit import Exhibit, write_exhibit
from qbheat_det.analysis.propagation import find_generator
from qbheat_det.analysis.spectrum import NAMES, describe_models
from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing import beyond, spectrum
from qbheat_det.engine.seeing.beyond import see_beyond
from qbheat_det.engine.seeing.linear_models import list_checkpoints, read_linear_models
from qbheat_det.engine.seeing.options import SightOptions
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.spectrum import see_spectrum
from qbheat_det.engine.seeing.subject import Subject
from tests.data.pictures import draw, save

from .encoder_subjects import cut_short, detector_config, make_subject, pretraining_config

EARLIER = (10, 20, 30)  # steps


def give_models(subject: Subject, factor: float) -> dict[str, Tensor]:
    """Writes random linear models into the weights of a subject; returns all weights."""
    path = str(subject.weights)
    weights, _ = read_weights(path)
    torch.manual_seed(5)
    for name, tensor in weights.items():
        if name.startswith("predictor."):
            weights[name] = factor * torch.randn_like(tensor)
    info = WeightsInfo.from_config(pretraining_config(), iteration=39, commit="")
    save_weights(path, weights, info)
    return weights


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A run of QB-Heat with three checkpoints before its last weights."""
    folder = tmp_path_factory.mktemp("run")
    weights = give_models(make_subject(folder, pretraining_config(), "model_final"), 0.2)
    for steps in EARLIER:
        part = {name: tensor * steps / 40 for name, tensor in weights.items()
                if name.startswith("predictor.")}  # fmt: skip
        torch.save({"model": part}, folder / f"model_{steps - 1:07d}.pth")
    (folder / "model_0000098.pth").symlink_to(folder / f"model_{EARLIER[0] - 1:07d}.pth")
    cfg = pretraining_config()
    cfg.SOLVER.EPOCHS, cfg.SOLVER.MAX_ITER = 4.0, 40
    (folder / "config.yaml").write_text(cfg.dump())
    return Subject.open(folder, label="run", device="cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(2):
        save(folder / f"{index}.png", draw(80, 96, seed=index))
    return folder


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("detector"), detector_config(), "detector")


def read(exhibit: Exhibit, folder: Path) -> dict[str, Any]:
    """Writes an exhibit, and returns its figures as its JSON has them."""
    paths = write_exhibit(exhibit, folder)
    assert all(path.stat().st_size for path in paths)
    return dict(json.loads(paths[0].read_text())["figures"])


def test_a_run_has_a_row_for_each_checkpoint_itself_and_its_controls(
    run: Subject, detector: Subject, tmp_path: Path
) -> None:
    exhibit = see_spectrum([cut_short(run, tmp_path), run, detector], SightOptions())
    figures = read(exhibit, tmp_path)
    assert exhibit.table is not None
    assert [row[0] for row in exhibit.table.rows] == [
        "run, epoch 1", "run, epoch 2", "run, epoch 3", "run", "run, rotated", "run, untrained",
    ]  # fmt: skip
    assert list(exhibit.pictures) == ["energy_ratios", "1_magnitudes", "1_eigenvalues"]
    assert all(picture.dark and picture.alt for picture in exhibit.pictures.values())
    found = figures["subjects"]["run"]
    assert [point["steps"] for point in found["course"]] == [*EARLIER, 40]
    # The same matrices, shorter: energies grow with them, and their ratio stays.
    energies = [point["energy_A_centre"] for point in found["course"]]
    np.testing.assert_allclose(energies, energies[-1] * np.array([0.25, 0.5, 0.75, 1]), rtol=1e-4)
    models = read_linear_models(run.weights, "run")
    expected = describe_models(models).scales["corner"]
    assert found["scales"]["corner"]["energy_ratio"] == pytest.approx(expected.energy_ratio, 1e-5)
    magnitudes = found["controls"]["untrained"]["scales"]["corner"]["matrices"]["A1"]["magnitudes"]
    assert len(magnitudes) == len(models["corner"][1]["A1"])
    assert figures["left_out"][0].startswith("'cut': ")
    assert "no linear models of QB-Heat in 'detector'" in figures["left_out"][1]
    assert "detector" in exhibit.explanation[-1]


def test_a_checkpoint_or_a_config_that_cannot_be_read_costs_its_rows_alone(
    run: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_draw", "_draw_courses"):  # tested above, and slow
        monkeypatch.setattr(spectrum, name, lambda *given: {})
    assert run.folder is not None
    for name in ("model_final.safetensors", "model_0000009.pth", "model_0000019.pth"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    (tmp_path / "model_0000019.pth").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "config.yaml").write_text("MODEL:\n  NO_SUCH_KEY: 1\n")
    again = Subject.open(tmp_path, label="again", device="cpu")
    exhibit = see_spectrum([again], SightOptions(extra={"checkpoints": 5}))
    assert exhibit.table is not None
    assert [row[0] for row in exhibit.table.rows][:2] == ["again, step 10", "again"]
    step, epochs = exhibit.figures["left_out"]
    assert step.startswith("step 20 of 'again': ")
    assert "NO_SUCH_KEY" in epochs
    assert epochs in exhibit.explanation[-1]


def test_checkpoints_are_spread_over_the_run_and_none_counts_twice(run: Subject) -> None:
    assert run.folder is not None
    assert [found.steps for found in list_checkpoints(run.folder, 5)] == list(EARLIER)
    assert [found.steps for found in list_checkpoints(run.folder, 2)] == [10, 30]
    assert [found.steps for found in list_checkpoints(run.folder, 1)] == [30]
    assert list_checkpoints(run.folder, 0) == []


@pytest.mark.parametrize("number", [8, 4, 2])
def test_implicit_models_follow_from_the_explicit_ones_in_the_file(
    number: int, tmp_path: Path
) -> None:
    names = {8: (*NAMES, "C11", "C12", "C21", "C22"), 4: NAMES, 2: ("A1", "B1")}[number]
    state = {f"predictor.scales.centre.{name}": torch.randn(3, 3) for name in names}
    torch.save({"model": state}, tmp_path / "weights.pth")
    ((scale, (offset, models)),) = read_linear_models(tmp_path / "weights.pth", "run").items()
    assert (scale, offset, len(models)) == ("centre", 0.25, 8)
    for name in names:
        torch.testing.assert_close(models[name], state[f"predictor.scales.centre.{name}"])
    if number == 2:
        torch.testing.assert_close(models["A2"], -models["A1"])


def test_linear_models_that_are_not_whole_are_a_mistake(tmp_path: Path) -> None:
    torch.save({"predictor.scales.corner.A1": torch.randn(3, 3)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match="not whole"):
        read_linear_models(tmp_path / "weights.pth", "run")


def test_what_lies_beyond_is_drawn_at_every_distance_beside_what_was_not_carried(
    run: Subject, detector: Subject, pictures: Path, tmp_path: Path
) -> None:
    options = SightOptions(images=pictures, extra={"distances": [0.5, 0.25]})
    exhibit = see_beyond([detector, run, cut_short(run, tmp_path)], options)
    figures = read(exhibit, tmp_path)
    assert list(exhibit.pictures) == ["1_pictures", "growth", "error"]
    assert [Path(name).name for name in figures["images"]] == ["0.png", "1.png"]
    found = figures["subjects"]["run"]
    assert found["growth"]["distances"][0] == 0
    for way in ("right", "left", "down", "up"):
        assert found["growth"][way][0] == pytest.approx(1)
        assert len(found["error"][way]) == len(found["error"]["distances"]) == 3  # of 4 positions
    for name in NAMES:
        agreement = found["eigenvectors"][name]
        assert agreement["difference"] < 1e-12 * agreement["condition"]
    assert "no linear models" in figures["left_out"][0]
    assert figures["left_out"][1].startswith("'cut': ")


def test_the_frame_continues_by_the_scale_and_the_generator_that_are_asked_for(
    run: Subject, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beyond, "draw_charts", lambda found: {})  # tested above, and slow
    extra = {"distances": [0.25], "scale": "centre", "generator": "first", "source": "offset"}
    exhibit = see_beyond([run, run], SightOptions(images=pictures, num_images=1, extra=extra))
    found = exhibit.figures["subjects"]["run"]
    assert (found["scale"], found["offset"]) == ("centre", 0.25)
    offset, matrices = read_linear_models(run.weights, "run")["centre"]
    a = find_generator(matrices["A1"], offset, order="first")
    largest = float(torch.linalg.matrix_norm(torch.matrix_exp(2 * a), 2))
    assert 0 < found["growth"]["right"][-1] <= largest
    assert "M / Δx" in exhibit.explanation[0]


def test_nothing_lies_beyond_what_has_no_linear_models_or_no_pictures(
    run: Subject, detector: Subject, pictures: Path
) -> None:
    with pytest.raises(NothingToSee, match="no linear models"):
        see_spectrum([detector], SightOptions())
    with pytest.raises(NothingToSee, match="no linear models"):
        see_beyond([detector], SightOptions(images=pictures))
    with pytest.raises(NothingToSee, match="no pictures"):
        see_beyond([run], SightOptions())
    with pytest.raises(UserError, match="above 0"):
        see_beyond([run], SightOptions(extra={"distances": [0.0]}))
