# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Confusion of classes: the same from the run's last evaluation as from the model itself."""

from pathlib import Path

import numpy as np
import pytest

from qbheat_det.analysis import confusion_matrix
from qbheat_det.engine.seeing.classes import see_classes
from qbheat_det.engine.seeing.options import SightOptions
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.subject import Subject
from qbheat_det.evaluation import ClassificationEvaluator
from tests.data.pictures import draw, save
from tests.engine.seeing.encoder_subjects import (
    CLASSES,
    classifier_config,
    cut_short,
    detector_config,
)
from tests.engine.seeing.run_folders import write_run


def _write_classifier(folder: Path, pictures: Path, *, top1: float) -> Path:
    cfg = classifier_config()
    cfg.DATASETS.TEST = ("custom_labelled_val",)
    cfg.DATALOADER.NUM_WORKERS = 0
    command = ["--val-folder", pictures]
    return write_run(folder, cfg, command=command, logged={"classification/top1": top1})


@pytest.fixture(autouse=True)
def _charts_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of charts take seconds, and have tests of their own."""
    monkeypatch.setattr(confusion_matrix, "encode", lambda *args: b"<svg/>")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for index, name in enumerate(CLASSES * 3):
        (folder / name).mkdir(exist_ok=True)
        save(folder / name / f"{index}.png", draw(80, 80, seed=index))
    return folder


def test_the_matrix_is_that_of_the_model_and_of_its_last_evaluation(
    pictures: Path, tmp_path: Path
) -> None:
    run = _write_classifier(tmp_path / "run", pictures, top1=-1.0)
    subject = Subject.open(str(run), device="cpu")
    exhibit = see_classes([cut_short(subject, tmp_path), subject], SightOptions())
    assert exhibit.figures["left_out"][0].startswith("'cut': ")
    inferred = exhibit.figures["runs"]["run"]
    assert inferred["counted_from"] == "inference"
    counts = np.diag([one["right"] for one in inferred["classes"]])
    for pair in inferred["confusions"]:
        counts[CLASSES.index(pair["class"]), CLASSES.index(pair["taken_for"])] = pair["images"]
    assert counts.sum(axis=1).tolist() == [3, 3, 3]

    # The file of a run's evaluator, and the figure that it logs.
    names = subject.cfg.MODEL.CLASS_NAMES
    folder = tmp_path / "again" / "inference" / "custom_labelled_val"
    top1 = 100 * counts.trace() / 9
    again = _write_classifier(tmp_path / "again", pictures, top1=top1)
    evaluator = ClassificationEvaluator("a set", class_names=names, output_dir=str(folder))
    evaluator.reset()
    entries = subject.load_entries(9)
    for entry in entries:
        evaluator.process([entry], subject.model([entry]))
    evaluator.evaluate()
    np.testing.assert_array_equal(evaluator.confusion, counts)
    read = see_classes([Subject.open(str(again), device="cpu")], SightOptions())
    found = read.figures["runs"]["again"]
    assert found["counted_from"] == "the run's last evaluation"
    assert found["classes"] == inferred["classes"]
    assert found["confusions"] == inferred["confusions"]
    assert read.table is not None
    assert read.table.rows[0][1] == f"{top1:.2f}"
    assert list(read.pictures) == ["confusion"]


def test_what_is_no_classifier_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "boxes", detector_config())
    with pytest.raises(NothingToSee, match=r"'boxes' \(detection\) is no classifier"):
        see_classes([Subject.open(str(run), device="cpu")], SightOptions())
