# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Nearest neighbours as a run goes and from its weights, by flags, and what they refuse."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.modeling import build_model

from qbheat_det.checkpoint import ExactCheckpointer
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper, load_labelled_sets
from qbheat_det.engine import evaluate
from qbheat_det.engine.data_flags import CUSTOM_IMAGES, CUSTOM_KNN_TRAIN, CUSTOM_KNN_VAL
from qbheat_det.evaluation import KnnScore, score_neighbours
from qbheat_det.modeling.pretrain import QBHeat

from .conftest import forget_runs
from .held_out_cases import configure, make_folder, train

SETS = (CUSTOM_IMAGES, CUSTOM_KNN_TRAIN, CUSTOM_KNN_VAL)
Folders = tuple[str, str]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    forget_runs(*SETS)
    yield
    forget_runs(*SETS)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Four classes, of which the second folder has three, and a broken image."""
    for i, name in enumerate("abcd"):
        make_folder(tmp_path / "train" / name, 4, first=10 * i)
        if name != "b":
            make_folder(tmp_path / "val" / name, 2, first=10 * i + 4)
    (tmp_path / "train" / "c" / "x.jpg").write_text("no image")
    return str(tmp_path / "train"), str(tmp_path / "val")


def by_hand(weights: str, flags: tuple[str, ...]) -> KnnScore:
    """The score from features of one image at a time."""
    forget_runs(*SETS)
    cfg, _ = configure({"MODEL.WEIGHTS": weights}, "--eval-only", *flags)
    model = build_model(cfg).eval()
    assert isinstance(model, QBHeat)
    ExactCheckpointer(model).load(weights)
    mapper = build_mapper(cfg, is_train=False)
    parts = []
    for records in load_labelled_sets([CUSTOM_KNN_TRAIN], [CUSTOM_KNN_VAL]):
        good = [record for record in records if not record["file_name"].endswith("x.jpg")]
        with torch.no_grad():
            maps = [
                model.backbone(model.preprocess_image([mapper(record)]))["s16_expanded"]
                for record in good
            ]
        labels = torch.tensor([record["label"] for record in good])
        parts.append((torch.cat(maps).mean(dim=(2, 3)), labels))
    return score_neighbours(*parts)


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_the_score_of_a_run_is_that_of_its_weights_and_that_by_hand(
    folders: Folders, tmp_path: Path, num_workers: str
) -> None:
    flags = ("--knn-train-folder", folders[0], "--knn-val-folder", folders[1])
    output = tmp_path / "run"
    # Whatever VIS.ENABLED is: the score was asked for by name.
    opts = {"DATALOADER.NUM_WORKERS": num_workers, "VIS.ENABLED": str(num_workers == "2")}
    train(output, opts, "--image-folder", folders[0], *flags)
    first, last = sorted((output / "looks").glob("knn_*.json"))
    assert (first.name, last.name) == ("knn_0000000.json", "knn_0000002.json")
    found = json.loads(last.read_text())
    assert found["num_images"] == 6
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    assert lines[-1]["knn/top1"] == pytest.approx(found["top1"])
    assert (output / "log.txt").read_text().count("Left out of the nearest-neighbour score, 1") == 1

    weights = str(output / "model_final.safetensors")
    expected = by_hand(weights, flags)
    assert 0 < expected.top5 <= 100
    assert {name: found[name] for name in expected.to_dict()} == pytest.approx(expected.to_dict())
    cfg, _ = configure({"MODEL.WEIGHTS": weights, "DATASETS.TEST": "()"}, "--eval-only", *flags)
    assert evaluate(cfg) == {"knn": pytest.approx(expected.to_dict())}


@pytest.mark.parametrize(
    ("flags", "opts", "expected"),
    [
        (("--knn-train-folder", "TRAIN"), {}, "go together"),
        (("--knn-train-folder", "TRAIN", "--knn-val-folder", "nowhere"), {}, "does not exist"),
        (("--knn-train-folder", "VAL", "--knn-val-folder", "TRAIN"), {}, r"1 classes that .*\(b\)"),
        (("--knn-train-folder", "TRAIN", "--knn-val-folder", "FLAT"), {}, "lies in no class"),
        (
            ("--knn-train-folder", "TRAIN", "--knn-val-folder", "VAL"),
            {"TEST.KNN.TRAIN": "('a',)"},
            "choose one",
        ),
        (
            ("--knn-train-folder", "TRAIN", "--knn-val-folder", "VAL"),
            {"TEST.KNN.K": "0"},
            "must be positive",
        ),
        ((), {"TEST.KNN.TRAIN": "('qbheat_toy_val_images',)"}, "TRAIN and TEST.KNN.VAL go"),
    ],
)
def test_what_cannot_be_scored_ends_in_a_sentence(
    flags: tuple[str, ...], opts: dict[str, str], expected: str, folders: Folders
) -> None:
    known = {"TRAIN": folders[0], "VAL": folders[1], "FLAT": f"{folders[0]}/a"}
    given = [known.get(flag, flag) for flag in flags]
    with pytest.raises(UserError, match=expected):
        configure(opts, "--image-folder", folders[0], *given)
    assert CUSTOM_IMAGES in DatasetCatalog
