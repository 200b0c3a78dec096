# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation during training and of weights: as by hand, and by two processes as by one."""

import argparse
import json
import os
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.evaluation import DatasetEvaluator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from qbheat_det.checkpoint import ExactCheckpointer, info_of
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import ToySpec, build_mapper, load_labelled_sets, prepare_toy_set
from qbheat_det.engine import Trainer, evaluate
from qbheat_det.engine.data_sources import (
    CUSTOM_IMAGES,
    CUSTOM_KNN_TRAIN,
    CUSTOM_KNN_VAL,
    CUSTOM_VAL_IMAGES,
)
from qbheat_det.engine.evaluation import Evaluation
from qbheat_det.evaluation import score_neighbours

from .conftest import forget_runs
from .evaluation_cases import evaluate_all
from .held_out_cases import configure, evaluate_weights, make_folder, train
from .processes import make_args, run_in_processes

SETS = (CUSTOM_IMAGES, CUSTOM_VAL_IMAGES, CUSTOM_KNN_TRAIN, CUSTOM_KNN_VAL)
SIZES = {"an odd number": 5, "fewer than processes": 1}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    forget_runs(*SETS)
    yield
    forget_runs(*SETS)


class WhoLoads(Dataset[dict[str, Any]]):
    """Two images, each with the process that loaded it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError
        return {"process": os.getpid()}


class Collect(DatasetEvaluator):
    """Results are the processes that the images came from."""

    def reset(self) -> None:
        self.seen: set[int] = set()

    def process(self, inputs: list[dict[str, Any]], outputs: Any) -> None:
        self.seen |= {entry["process"] for entry in inputs}

    def evaluate(self) -> dict[str, Any]:
        return {"bbox": {"AP": float(next(iter(self.seen))), "workers": float(len(self.seen))}}


def test_one_worker_serves_every_evaluation_and_ends_with_them() -> None:
    def build_loader(_: CfgNode, __: str) -> DataLoader[Any]:
        return DataLoader(WhoLoads(), batch_size=1, num_workers=1, collate_fn=list)

    cfg = get_cfg()
    cfg.DATASETS.TEST = ("any",)
    evaluation = Evaluation(cfg, build_loader=build_loader, build_evaluator=lambda *_: Collect())
    first, second = (evaluation(nn.Identity())["bbox"] for _ in range(2))
    assert first == second
    worker = int(first["AP"])
    assert worker in {child.pid for child in active_children()}
    evaluation.close()
    assert worker not in {child.pid for child in active_children()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Images to train on; held-out ones; labelled ones. One held-out and one voter is broken."""
    root = tmp_path_factory.mktemp("images")
    for i, name in enumerate("abcd"):
        make_folder(root / "voters" / name, 4, first=10 * i)
        if name != "b":
            make_folder(root / "judged" / name, 2, first=10 * i + 4)
    make_folder(root / "train", 8)
    make_folder(root / "val", 5, first=50)
    for broken in (root / "val" / "x.jpg", root / "voters" / "c" / "x.jpg"):
        broken.write_text("no image")
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="module")
def run(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluates the held-out loss and the nearest-neighbour score as it trains."""
    output = tmp_path_factory.mktemp("run")
    flags = ["--image-folder", folders["train"], "--val-image-folder", folders["val"]]
    flags += ["--knn-train-folder", folders["voters"], "--knn-val-folder", folders["judged"]]
    train(output, {"TEST.EVAL_EPOCHS": "0.5"}, *flags)
    forget_runs(*SETS)
    return output


def lines(run: Path, key: str) -> dict[int, float]:
    entries = map(json.loads, (run / "metrics.json").read_text().splitlines())
    return {entry["iteration"]: entry[key] for entry in entries if key in entry}


def load(run: Path, *flags: str) -> tuple[CfgNode, Any]:
    """Returns the config that flags give, and the trained model."""
    weights = str(run / "model_final.safetensors")
    opts = {} if "--val-image-folder" in flags else {"DATASETS.TEST": "()"}
    cfg, _ = configure({"MODEL.WEIGHTS": weights, **opts}, "--eval-only", *flags)
    model = Trainer.build_model(cfg).eval()
    ExactCheckpointer(model).load(weights)
    return cfg, model


def test_a_run_logs_its_evaluations_and_keeps_the_lowest_loss_as_the_best(run: Path) -> None:
    found = lines(run, "reconstruction/loss")
    assert sorted(found) == [0, 1]  # half an epoch of 8 images is one step of 4
    best = info_of(str(run / "model_best.safetensors"))
    assert best is not None
    assert best.iteration == min(found, key=found.__getitem__)
    log = (run / "log.txt").read_text()
    assert log.count("left out of the evaluation") == 1
    assert log.count("left out of the nearest-neighbour score") == 1


def test_the_held_out_loss_is_that_of_one_image_and_view_at_a_time(
    run: Path, folders: dict[str, str]
) -> None:
    cfg, model = load(run, "--val-image-folder", folders["val"])
    views, mapper = model.views, build_mapper(cfg, is_train=False)
    expected: dict[str, list[float]] = {f"loss_{name}": [] for name in views}
    for i, record in enumerate(DatasetCatalog.get(CUSTOM_VAL_IMAGES)):
        if record["file_name"].endswith("x.jpg"):
            continue
        for name, quarters in views.items():
            with torch.no_grad():
                (output,) = model([mapper(record)], [quarters[i % len(quarters)]])
            expected[f"loss_{name}"].append(float(output["loss_reconstruction"]))
    means = {key: sum(values) / len(values) for key, values in expected.items()}
    means["loss"] = sum(means.values()) / len(means)
    last = {key: lines(run, f"reconstruction/{key}")[1] for key in means}
    assert last == pytest.approx(means, rel=1e-5)


def test_the_nearest_neighbour_score_is_that_of_one_image_at_a_time(
    run: Path, folders: dict[str, str]
) -> None:
    flags = ("--knn-train-folder", folders["voters"], "--knn-val-folder", folders["judged"])
    cfg, model = load(run, *flags)
    mapper, parts = build_mapper(cfg, is_train=False), []
    for records in load_labelled_sets([CUSTOM_KNN_TRAIN], [CUSTOM_KNN_VAL]):
        good = [record for record in records if not record["file_name"].endswith("x.jpg")]
        with torch.no_grad():
            images = [model.preprocess_image([mapper(record)]) for record in good]
            maps = [model.backbone(image)[model.in_feature] for image in images]
        labels = torch.tensor([record["label"] for record in good])
        parts.append((torch.cat(maps).mean(dim=(2, 3)), labels))
    expected = score_neighbours(*parts)
    assert 0 < expected["top5"] <= 100
    first, last = sorted((run / "visualizations").glob("knn_*.json"))
    assert (first.name, last.name) == ("knn_0000000.json", "knn_0000002.json")
    found = json.loads(last.read_text())["data"]
    assert found == pytest.approx(expected)
    assert lines(run, "knn/top1")[1] == pytest.approx(expected["top1"])
    assert evaluate(cfg) == {"knn": pytest.approx(expected)}


def test_two_processes_find_the_loss_and_the_score_of_one(
    run: Path, folders: dict[str, str], tmp_path: Path
) -> None:
    args = make_args(
        weights=str(run / "model_final.safetensors"),
        folder=folders["val"],
        classes=folders["judged"],
        output_dir=str(tmp_path),
    )
    alone = evaluate_weights(args)
    main, other = run_in_processes(evaluate_weights, args, tmp_path)
    assert main["reconstruction"] == pytest.approx(alone["reconstruction"], rel=1e-5)
    assert main["knn"] == alone["knn"]
    assert other == {}


@pytest.mark.parametrize(
    ("flags", "opts", "named"),
    [
        (("--val-image-folder", "nowhere"), {}, "'nowhere'"),
        (("--val-image-folder", "val"), {"DATASETS.TEST": "('a',)"}, "DATASETS.TEST"),
        (("--eval-only",), {"DATASETS.TEST": "()"}, "--val-image-folder"),
        (("--image-folder", "val"), {"DATASETS.TEST": "('qbheat_toy_val',)"}, "'qbheat_toy_val'"),
        (("--knn-train-folder", "voters"), {}, "--knn-val-folder"),
        (("--knn-train-folder", "judged", "--knn-val-folder", "voters"), {}, "images of b"),
        (
            ("--knn-train-folder", "voters", "--knn-val-folder", "judged"),
            {"TEST.KNN.K": "0"},
            "TEST.KNN.K",
        ),
        ((), {"TEST.KNN.TRAIN": "('qbheat_toy_val_images',)"}, "TEST.KNN.VAL"),
        (("--val-image-folder", "val"), {"MODEL.META_ARCHITECTURE": "MoCo"}, "MoCo"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    flags: tuple[str, ...], opts: dict[str, Any], named: str, folders: dict[str, str]
) -> None:
    given = [folders.get(flag, flag) for flag in flags]
    if "--eval-only" not in given and "--image-folder" not in given:
        given += ["--image-folder", folders["train"]]
    with pytest.raises(UserError, match=named):
        configure(opts, *given)


@pytest.fixture(scope="module")
def toy_sets(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    folder = tmp_path_factory.mktemp("evaluation")
    paths = {
        name: str(prepare_toy_set(ToySpec(name="tiny", num_images=size, image_size=64), folder))
        for name, size in SIZES.items()
    }
    return make_args(folders=paths, output_dir=str(folder / "two"))


def test_two_processes_gather_every_image_once_and_find_the_results_of_one(
    toy_sets: argparse.Namespace, tmp_path: Path
) -> None:
    main, other = run_in_processes(evaluate_all, toy_sets, tmp_path)
    for name, size in SIZES.items():
        folder = Path(toy_sets.output_dir) / "inference" / name
        found = json.loads((folder / "coco_instances_results.json").read_text())
        truth = json.loads((Path(toy_sets.folders[name]) / "annotations.json").read_text())
        expected = sorted(image["id"] for image in truth["images"])
        assert len(expected) == size
        assert sorted(result["image_id"] for result in found) == expected
    alone = evaluate_all(make_args(folders=toy_sets.folders, output_dir=str(tmp_path)))
    # As text: a class without objects has an AP of nan, which is not equal to itself.
    assert json.dumps(main) == json.dumps(alone)
    assert 0 < alone["an odd number"][0]["bbox"]["AP"] < 100
    assert other == {name: [{}, {}] for name in SIZES}
