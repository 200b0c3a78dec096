# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``--train-folder`` and ``--val-folder``: classes, runs, evaluation, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from detectron2.data import MetadataCatalog
from torch.testing import assert_close

from qbheat_det.checkpoint import class_names_of, read_weights
from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_train_stream, register_image_folders
from qbheat_det.engine import Trainer, evaluate
from qbheat_det.engine.data_flags import (
    CUSTOM_IMAGES,
    CUSTOM_VAL_IMAGES,
    LABELLED_TRAIN,
    LABELLED_VAL,
)

from .classifier_cases import RECIPE, configure, evaluate_knower, make_classes, train
from .conftest import forget_runs
from .processes import make_args, run_in_processes

SETS = (LABELLED_TRAIN, LABELLED_VAL, CUSTOM_IMAGES, CUSTOM_VAL_IMAGES, "more_classes")
Folders = tuple[str, str]
DETECTOR = get_config_path("custom/retinanet_285M_scratch.yaml")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    forget_runs(*SETS)
    yield
    forget_runs(*SETS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Four classes, of which the second folder has three, one image of it broken."""
    root = tmp_path_factory.mktemp("classes")
    train_folder = make_classes(root / "train", {"ape": 3, "bee": 4, "cat": 3, "dog": 2})
    val_folder = make_classes(root / "val", {"bee": 3, "cat": 2, "dog": 2}, first=200)
    (root / "val" / "dog" / "x.jpg").write_text("no image")
    return train_folder, val_folder


def flags_of(folders: Folders) -> list[str]:
    return ["--train-folder", folders[0], "--val-folder", folders[1]]


def test_classes_come_from_the_training_folder_and_labels_from_their_names(
    folders: Folders,
) -> None:
    cfg, _ = configure({}, *flags_of(folders))
    assert cfg.MODEL.CLASS_NAMES == ["ape", "bee", "cat", "dog"]
    assert cfg.MODEL.CLASSIFIER.NUM_CLASSES == 4
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == ((LABELLED_TRAIN,), (LABELLED_VAL,))
    assert build_train_stream(cfg).num_images == 12
    entries = [entry for batch in Trainer.build_test_loader(cfg, LABELLED_VAL) for entry in batch]
    assert {(Path(entry["file_name"]).parts[-2], entry["label"]) for entry in entries} == {
        ("bee", 1),
        ("cat", 2),
        ("dog", 3),
    }
    assert len(entries) == 7


def test_several_sets_of_unlike_classes_are_one(folders: Folders, tmp_path: Path) -> None:
    more = make_classes(tmp_path / "more", {"cat": 1, "eel": 2}, first=400)
    register_image_folders("more_classes", [more], labelled=True)
    register_image_folders(LABELLED_TRAIN, [folders[0]], labelled=True)
    names = f"('{LABELLED_TRAIN}', 'more_classes')"
    cfg, _ = configure({"DATASETS.TRAIN": names, "INPUT.PRETRAIN.MEMORY_GB": "0"})
    assert cfg.MODEL.CLASS_NAMES == ["ape", "bee", "cat", "dog", "eel"]
    stream = iter(build_train_stream(cfg))
    seen = {
        (Path(entry["file_name"]).parts[-2], entry["label"])
        for _ in range(4)
        for entry in next(stream)
    }
    expected = {(name, i) for i, name in enumerate(cfg.MODEL.CLASS_NAMES)}
    assert seen <= expected
    assert len(seen) > 2


def test_a_run_trains_evaluates_scores_neighbours_resumes_and_is_evaluated_alone(
    folders: Folders, tmp_path: Path
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    flags = [*flags_of(folders), "--knn"]
    opts = {"TEST.EVAL_PERIOD": "2", "VIS.ENABLED": "True"}
    trainer = train(whole, opts, *flags)
    found = trainer._last_eval_results["classification"]
    assert 0 <= found["top1"] <= found["top5"] == 100  # there are but four classes
    written = json.loads((whole / "inference" / LABELLED_VAL / "classification.json").read_text())
    assert written["num_images"] == 7
    assert (whole / "model_best.safetensors").is_file()
    assert "x.jpg" in (whole / "log.txt").read_text()
    assert list((whole / "visualizations").glob("knn_*.json"))
    weights = str(whole / "model_final.safetensors")
    assert class_names_of(weights) == ("ape", "bee", "cat", "dog")

    # Continued from its checkpoint after two steps, it comes to the same weights.
    shutil.copytree(whole, again)
    for path in again.glob("model_final.*"):
        path.unlink()
    (again / "last_checkpoint").write_text("model_0000001.pth")
    forget_runs(*SETS)
    assert train(again, opts, "--resume", *flags).start_iter == 2
    first, second = (
        read_weights(str(run / "model_final.safetensors"))[0] for run in (whole, again)
    )
    assert_close(second, first, rtol=0, atol=0)

    # The weights know more classes than the folder has.
    forget_runs(*SETS)
    cfg, _ = configure({"MODEL.WEIGHTS": weights}, "--eval-only", "--val-folder", folders[1])
    assert cfg.MODEL.CLASSIFIER.NUM_CLASSES == 4
    assert evaluate(cfg) == {"classification": pytest.approx(found)}
    forget_runs(*SETS)
    cfg, _ = configure(
        {"OUTPUT_DIR": str(whole)}, "--eval-only", "--resume", "--val-folder", folders[1]
    )
    assert evaluate(cfg, resume=True) == {"classification": pytest.approx(found)}


def test_two_processes_find_what_one_finds(folders: Folders, tmp_path: Path) -> None:
    args = make_args(folder=folders[1], output_dir=str(tmp_path))
    alone = evaluate_knower(args)
    path = tmp_path / "inference" / LABELLED_VAL / "classification.json"
    written = path.read_text()
    main, other = run_in_processes(evaluate_knower, args, tmp_path)
    # Images 0, 3 and 6 of 7 are wrong; the broken one is the last.
    assert alone["classification"]["top1"] == pytest.approx(100 * 4 / 7)
    assert (main, other) == (alone, {})
    assert path.read_text() == written


def test_a_broken_folder_in_a_class_folder_and_shared_images_are_told(
    folders: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_classes(tmp_path / "train", {"ape": 1, "bee": 1})
    (tmp_path / "train" / "emu").mkdir()
    configure({}, "--train-folder", root, "--val-folder", root)
    assert "emu" in caplog.text
    assert "--train-folder and --val-folder share images" in caplog.text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--train-folder nowhere", "'nowhere'"),
        ("--train-folder EMPTY", "folder"),
        ("--train-folder ONE", "'ape'"),
        ("--train-folder FLAT", "class folder"),
        ("--val-folder VAL", "--eval-only"),
        ("--train-folder TRAIN --val-folder OTHER", "yak"),
        ("--train-folder TRAIN --eval-only", "--val-folder"),
        ("--train-folder TRAIN --image-folder VAL", "--image-folder"),
        ("--train-folder TRAIN --val-image-folder VAL", "--val-image-folder"),
        ("--train-folder TRAIN --val-json a", "--val-json"),
        ("--train-folder TRAIN DATASETS.TRAIN ('a',)", "DATASETS.TRAIN and --train-folder"),
        ("--train-folder TRAIN --val-folder VAL DATASETS.TEST ('a',)", "TEST and --val-folder"),
        ("--train-folder TRAIN MODEL.CLASSIFIER.NUM_CLASSES 9", "4 classes"),
        ("--train-folder TRAIN --knn", "--train-folder and --val-folder"),
        ("--knn", "--train-folder and --val-folder"),
        ("--train-folder TRAIN --val-folder VAL --knn TEST.KNN.TRAIN ('a',)", "KNN.TRAIN"),
        ("--image-folder TRAIN", "--train-folder"),
        ("", "imagenet_train.*--train-folder"),
        ("DATASETS.TRAIN ()", "--train-folder"),
        ("--train-folder TRAIN INPUT.DATASET_MAPPER_NAME default", "'default'"),
        ("--train-folder TRAIN INPUT.DATASET_MAPPER_NAME pretrain", "'pretrain'"),
    ],
)
def test_bad_class_folders_are_named(
    words: str, named: str, folders: Folders, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    known = {
        "TRAIN": folders[0],
        "VAL": folders[1],
        "FLAT": f"{folders[0]}/ape",
        "EMPTY": str(tmp_path / "empty"),
        "ONE": make_classes(tmp_path / "one", {"ape": 1}),
        "OTHER": make_classes(tmp_path / "other", {"ape": 1, "yak": 1}),
    }
    given = [known.get(word, word) for word in words.split()]
    keys = [i for i, word in enumerate(given) if word.isupper() and "." in word]
    opts = {given[i]: given[i + 1] for i in keys}
    flags = given[: keys[0]] if keys else given
    config = DETECTOR if opts.get("INPUT.DATASET_MAPPER_NAME") == "default" else RECIPE
    with pytest.raises(UserError, match=named):
        configure(opts, *flags, config=config)


def test_a_set_of_a_run_that_is_gone_is_not_looked_for(folders: Folders) -> None:
    opts = {"DATASETS.TEST": f"('{LABELLED_VAL}',)"}
    cfg, _ = configure(opts, "--train-folder", folders[0])
    assert cfg.DATASETS.TEST == ()
    assert MetadataCatalog.get(LABELLED_TRAIN).folder_classes == ["ape", "bee", "cat", "dog"]
    assert_close(torch.tensor(cfg.MODEL.CATEGORY_IDS), torch.arange(4))
