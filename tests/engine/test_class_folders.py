# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``--data`` and ``--val``: classes, runs and evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.checkpoint import class_names_of
from qbheat_det.data import build_train_stream, register_image_folders
from qbheat_det.engine import Trainer, evaluate
from qbheat_det.engine.data_sources import LABELLED_TRAIN, LABELLED_VAL

from .classifier_cases import configure, make_classes, train

Folders = tuple[str, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Four classes, of which the second folder has three, one image of it broken."""
    root = tmp_path_factory.mktemp("classes")
    train_folder = make_classes(root / "train", {"ape": 3, "bee": 4, "cat": 3, "dog": 2})
    val_folder = make_classes(root / "val", {"bee": 3, "cat": 2, "dog": 2}, first=200)
    (root / "val" / "dog" / "x.jpg").write_text("no image")
    return train_folder, val_folder


def flags_of(folders: Folders) -> list[str]:
    return ["--data", folders[0], "--val", folders[1]]


def labels_of(entries: list[dict[str, Any]]) -> set[tuple[str, int]]:
    return {(Path(entry["file_name"]).parts[-2], entry["label"]) for entry in entries}


def test_classes_come_from_the_training_folder_and_labels_from_their_names(
    folders: Folders,
) -> None:
    cfg, _ = configure({}, *flags_of(folders))
    assert cfg.MODEL.CLASS_NAMES == ["ape", "bee", "cat", "dog"]
    assert cfg.MODEL.CLASSIFIER.NUM_CLASSES == 4
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == ((LABELLED_TRAIN,), (LABELLED_VAL,))
    assert build_train_stream(cfg).num_images == 12
    entries = [entry for batch in Trainer.build_test_loader(cfg, LABELLED_VAL) for entry in batch]
    assert labels_of(entries) == {("bee", 1), ("cat", 2), ("dog", 3)}
    assert len(entries) == 7


def test_several_sets_of_unlike_classes_are_one(folders: Folders, tmp_path: Path) -> None:
    more = make_classes(tmp_path / "more", {"cat": 1, "eel": 2}, first=400)
    register_image_folders("more_classes", [more], labelled=True)
    register_image_folders(LABELLED_TRAIN, [folders[0]], labelled=True)
    names = f"('{LABELLED_TRAIN}', 'more_classes')"
    cfg, _ = configure({"DATASETS.TRAIN": names, "INPUT.PRETRAIN.MEMORY_GB": "0"})
    assert cfg.MODEL.CLASS_NAMES == ["ape", "bee", "cat", "dog", "eel"]
    stream = iter(build_train_stream(cfg))
    seen = labels_of([entry for _ in range(4) for entry in next(stream)])
    assert seen <= {(name, i) for i, name in enumerate(cfg.MODEL.CLASS_NAMES)}
    assert len(seen) > 2


def test_a_run_trains_evaluates_scores_neighbours_and_is_evaluated_alone(
    folders: Folders, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    opts = {"TEST.EVAL_PERIOD": "2", "VIS.ENABLED": "True"}
    trainer = train(whole, opts, *flags_of(folders), "--knn")
    found = trainer._last_eval_results["classification"]
    assert 0 <= found["top1"] <= found["top5"] == 100  # there are but four classes
    written = json.loads((whole / "inference" / LABELLED_VAL / "classification.json").read_text())
    assert written["num_images"] == 7
    assert (whole / "model_best.safetensors").is_file()
    assert "x.jpg" in (whole / "log.txt").read_text()
    assert list((whole / "visualizations").glob("knn_*.json"))
    weights = str(whole / "model_final.safetensors")
    assert class_names_of(weights) == ("ape", "bee", "cat", "dog")

    # The weights know more classes than the folder has.
    cfg, _ = configure({"MODEL.WEIGHTS": weights}, "--eval-only", "--val", folders[1])
    assert cfg.MODEL.CLASSIFIER.NUM_CLASSES == 4
    assert evaluate(cfg) == {"classification": pytest.approx(found)}
    cfg, _ = configure({"OUTPUT_DIR": str(whole)}, "--eval-only", "--resume", "--val", folders[1])
    assert evaluate(cfg, resume=True) == {"classification": pytest.approx(found)}
