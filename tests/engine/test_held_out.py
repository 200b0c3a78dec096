# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The loss on held-out images: as training goes, from a file, and by two processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.data import DatasetCatalog

from qbheat_det.checkpoint import ExactCheckpointer, info_of
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper, register_image_folders
from qbheat_det.engine import Trainer
from qbheat_det.engine.data_flags import CUSTOM_IMAGES, CUSTOM_VAL_IMAGES
from qbheat_det.engine.dry_run import dry_run
from qbheat_det.modeling.pretrain import CORNERS, QBHeat

from .conftest import forget_runs
from .held_out_cases import configure, evaluate_weights, make_folder, train
from .processes import make_args, run_in_processes

NUM_HELD_OUT = 5


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    forget_runs(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES)
    yield
    forget_runs(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES, "held_out_classes")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Images to train on, and held-out ones of which one is broken."""
    root = tmp_path_factory.mktemp("held_out")
    held_out = make_folder(root / "val", NUM_HELD_OUT, first=50)
    (held_out / "a.jpg").write_text("no image")
    return str(make_folder(root / "train", 8)), str(held_out)


@pytest.fixture(scope="module")
def weights(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run without evaluation."""
    output = tmp_path_factory.mktemp("run")
    train(output, {}, "--image-folder", folders[0])
    forget_runs(CUSTOM_IMAGES)
    return str(output / "model_final.safetensors")


def metrics(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    key = "reconstruction/loss"
    return {line["iteration"]: line[key] for line in lines if key in line}


def by_hand(weights: str, folder: str) -> dict[str, float]:
    """Mean losses, one image and one view at a time."""
    cfg, _ = configure({"MODEL.WEIGHTS": weights}, "--eval-only", "--val-image-folder", folder)
    model = Trainer.build_model(cfg)
    assert isinstance(model, QBHeat)
    ExactCheckpointer(model).load(weights)
    model.eval()
    mapper = build_mapper(cfg, is_train=False)
    losses: dict[str, list[float]] = {"loss_corner": [], "loss_centre": []}
    for i, record in enumerate(DatasetCatalog.get(CUSTOM_VAL_IMAGES)):
        if record["file_name"].endswith("a.jpg"):
            continue
        for key, place in (("loss_corner", CORNERS[i % 4]), ("loss_centre", "centre")):
            with torch.no_grad():
                (output,) = model([mapper(record)], [place])
            losses[key].append(float(output["loss_reconstruction"]))
    means = {key: sum(values) / len(values) for key, values in losses.items()}
    return {**means, "loss": sum(means.values()) / 2}


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_a_run_evaluates_as_it_goes_and_keeps_the_lowest_loss_as_the_best(
    folders: tuple[str, str],
    tmp_path: Path,
    num_workers: str,
) -> None:
    flags = ("--image-folder", folders[0], "--val-image-folder", folders[1])
    opts = {"DATALOADER.NUM_WORKERS": num_workers, "TEST.EVAL_EPOCHS": "0.5"}
    results = train(tmp_path, opts, *flags)
    found = metrics(tmp_path)
    assert sorted(found) == [0, 1]  # half an epoch of 8 images is one step of 4
    best = info_of(str(tmp_path / "model_best.safetensors"))
    assert best is not None
    assert best.iteration == min(found, key=found.__getitem__)
    assert results["reconstruction"]["loss"] == pytest.approx(found[1])
    log = (tmp_path / "log.txt").read_text()
    assert log.count("Left out of the evaluation on 'custom_val_images', 1 in all") == 1
    assert "is not among the metrics" not in log


def test_weights_are_evaluated_as_by_hand(folders: tuple[str, str], weights: str) -> None:
    expected = by_hand(weights, folders[1])
    forget_runs(CUSTOM_VAL_IMAGES)
    args = make_args(weights=weights, folder=folders[1], output_dir="unused")
    found = evaluate_weights(args)["reconstruction"]
    assert found.pop("loss_standard_error") > 0
    assert found == pytest.approx(expected, rel=1e-5)


def test_two_processes_find_the_loss_of_one_and_its_nearest_neighbours(
    folders: tuple[str, str], weights: str, tmp_path: Path
) -> None:
    for i, name in enumerate("ab"):
        make_folder(tmp_path / "classes" / name, 3, first=10 * i)
    args = make_args(
        weights=weights,
        folder=folders[1],
        classes=str(tmp_path / "classes"),
        output_dir=str(tmp_path),
    )
    alone = evaluate_weights(args)
    main, other = run_in_processes(evaluate_weights, args, tmp_path)
    assert main["reconstruction"] == pytest.approx(alone["reconstruction"], rel=1e-5)
    assert main["knn"] == alone["knn"]
    assert other == {}


def test_class_folders_that_are_named_in_a_pre_training_run_give_their_loss(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    make_folder(tmp_path / "classes" / "one", 1)
    make_folder(tmp_path / "classes" / "two", 1, first=1)
    register_image_folders("held_out_classes", [tmp_path / "classes"], labelled=True)
    opts = {"DATASETS.TEST": "('held_out_classes',)", "SOLVER.MAX_ITER": "1"}
    results = train(tmp_path / "run", opts, "--image-folder", folders[0])
    assert set(results) == {"reconstruction"}


def test_an_objective_of_one_place_is_evaluated_at_that_place(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    flags = ("--image-folder", folders[0], "--val-image-folder", folders[1])
    opts = {"MODEL.QB_HEAT.VISIBLE": "corner", "SOLVER.MAX_ITER": "1"}
    found = train(tmp_path, opts, *flags)["reconstruction"]
    assert set(found) == {"loss_corner", "loss", "loss_standard_error"}


def test_a_dry_run_rehearses_it(folders: tuple[str, str], tmp_path: Path) -> None:
    flags = ("--image-folder", folders[0], "--val-image-folder", folders[1])
    cfg, _ = configure({"OUTPUT_DIR": str(tmp_path)}, *flags)
    report = dry_run(cfg, Trainer)
    assert f"Evaluation of {NUM_HELD_OUT + 1} images" in [cost.name for cost in report.costs]


@pytest.mark.parametrize(
    ("flags", "opts", "expected"),
    [
        (("--val-image-folder", "nowhere"), {}, "'nowhere' does not exist"),
        (("--val-image-folder", "VAL"), {"DATASETS.TEST": "('a',)"}, "DATASETS.TEST and --val-im"),
        (
            ("--val-image-folder", "VAL", "--val-json", "a", "--val-images", "b"),
            {"DATASETS.TRAIN": "('a',)"},
            "'a'",
        ),
        (("--eval-only",), {"DATASETS.TEST": "()"}, "names no dataset.*--val-image-folder"),
        (
            ("--image-folder", "VAL"),
            {"DATASETS.TEST": "('qbheat_toy_val',)"},
            "'qbheat_toy_val', a dataset with annotations.*--val-image-folder",
        ),
        (
            ("--image-folder", "VAL", "--val-image-folder", "VAL"),
            {"INPUT.DATASET_MAPPER_NAME": "default"},
            "no annotations",
        ),
    ],
)
def test_what_cannot_be_evaluated_on_ends_in_a_sentence(
    flags: tuple[str, ...], opts: dict[str, Any], expected: str, folders: tuple[str, str]
) -> None:
    given = [folders[1] if flag == "VAL" else flag for flag in flags]
    with pytest.raises(UserError, match=expected):
        configure(opts, *given)
