# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``--image-folder``, the images of an annotation file, and sets without annotations by name."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import build_train_stream
from qbheat_det.engine import build_config
from qbheat_det.engine.data_flags import CUSTOM_IMAGES, CUSTOM_VAL_IMAGES
from tests.data.pictures import draw, save
from tools.arguments import add_data_flags, add_image_flags, add_training_flags

from .conftest import forget_runs
from .tiny_training import CONFIG

PRETRAIN = ("INPUT.DATASET_MAPPER_NAME", "pretrain", "DATALOADER.ASPECT_RATIO_GROUPING", "False")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    forget_runs(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    add_data_flags(parser)
    add_image_flags(parser)
    return parser.parse_args(["--config-file", str(CONFIG), *words])


def configure(*words: str) -> CfgNode:
    return build_config(parse(*words, *PRETRAIN))


def make_images(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        save(folder / f"{i}.jpg", draw(20, 20, seed=i))
    return folder


def test_folders_are_all_that_is_trained_on(tmp_path: Path) -> None:
    one, two = make_images(tmp_path / "one", 2), make_images(tmp_path / "two", 3)
    cfg = configure("--image-folder", str(one), "--image-folder", str(two))
    assert (list(cfg.DATASETS.TRAIN), list(cfg.DATASETS.TEST)) == ([CUSTOM_IMAGES], [])
    assert cfg.MODEL.CLASS_NAMES == []
    assert build_train_stream(cfg).num_images == 5


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--image-folder nowhere", "'nowhere'"),
        ("--image-folder one --image-folder empty", "'empty'"),
        ("--image-folder one/0.jpg", r"one/0\.jpg"),
        ("--image-folder one --eval-only", "--eval-only"),
        ("--image-folder one --train-json a --train-images b", "--train-json and --train-images"),
        ("--image-folder one DATASETS.TRAIN ('a',)", "DATASETS.TRAIN"),
        ("--val-image-folder one --val-json a --val-images b", "--val-json"),
        ("--val-image-folder one DATASETS.TEST ('a',)", "DATASETS.TEST"),
        ("--knn-train-folder one", "--knn-val-folder"),
        ("DATASETS.TRAIN ('imagenet_train',)", "imagenet_train.*DETECTRON2_DATASETS"),
        ("--train-json nowhere.json --train-images one", r"nowhere\.json"),
        ("--train-json images.json --train-images two", "'two'"),
        ("--train-json images.json", "--train-images"),
        ("DATASETS.TRAIN ('custom_images',) DATASETS.TEST ()", "--image-folder"),
        ("--image-folder one INPUT.DATASET_MAPPER_NAME detr", "'detr'"),
        ("--image-folder one INPUT.DATASET_MAPPER_NAME default", "'default'"),
    ],
)
def test_bad_data_flags_are_named(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_images(tmp_path / "one", 1)
    (tmp_path / "empty").mkdir()
    Path("images.json").write_text(json.dumps({"images": [{"id": 1, "file_name": "0.jpg"}]}))
    given = words.split()
    mapper = () if "INPUT.DATASET_MAPPER_NAME" in given else PRETRAIN
    with pytest.raises(UserError, match=named):
        build_config(parse(*given, *mapper))


def test_an_annotation_file_gives_its_images_without_a_set_to_evaluate_on(tmp_path: Path) -> None:
    images = make_images(tmp_path / "one", 3)
    path = tmp_path / "images.json"
    path.write_text(json.dumps({"images": [{"id": 1, "file_name": "2.jpg"}]}))
    cfg = configure("--train-json", str(path), "--train-images", str(images))
    assert (list(cfg.DATASETS.TRAIN), list(cfg.DATASETS.TEST)) == ([CUSTOM_IMAGES], [])
    (record,) = DatasetCatalog.get(CUSTOM_IMAGES)
    assert record["file_name"] == str(images / "2.jpg")


def test_a_tool_without_the_flag_is_configured_too(tmp_path: Path) -> None:
    args = parse("DATASETS.TRAIN", "('qbheat_toy_val_images',)", "DATASETS.TEST", "()", *PRETRAIN)
    del args.image_folder
    assert MetadataCatalog.get(build_config(args).DATASETS.TRAIN[0]).unlabelled


@pytest.mark.parametrize("judged", ["all", "all/some"])
def test_images_both_learned_from_and_held_out_are_said_to_be(
    tmp_path: Path, judged: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_images(tmp_path / "all", 2)
    make_images(tmp_path / "all" / "some", 2)
    make_images(tmp_path / "other", 2)
    words = ["--image-folder", str(tmp_path / "all"), "--val-image-folder"]
    configure(*words, str(tmp_path / "other"))
    assert "share images" not in caplog.text
    forget_runs(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES)
    configure(*words, str(tmp_path / judged))
    assert "--image-folder and --val-image-folder share images" in caplog.text


def test_held_out_images_of_which_none_can_be_read_are_refused_at_once(tmp_path: Path) -> None:
    make_images(tmp_path / "one", 2)
    broken = tmp_path / "broken"
    broken.mkdir()
    for i in range(3):
        (broken / f"{i}.jpg").write_bytes(b"no")
    words = ["--image-folder", str(tmp_path / "one"), "--val-image-folder", str(broken)]
    with pytest.raises(UserError, match="custom_val_images"):
        configure(*words)
    make_images(tmp_path / "mixed", 1)
    (tmp_path / "mixed" / "a.jpg").write_bytes(b"no")
    forget_runs(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES)
    configure(*words[:-1], str(tmp_path / "mixed"))


def test_sets_that_flags_of_another_run_made_are_not_looked_for(tmp_path: Path) -> None:
    others = ("TEST.KNN.TRAIN", "('custom_knn_train',)", "TEST.KNN.VAL", "('custom_knn_val',)")
    images = str(make_images(tmp_path / "one", 2))
    cfg = configure("--image-folder", images, "DATASETS.TEST", "('custom_val_images',)", *others)
    assert (cfg.DATASETS.TEST, cfg.TEST.KNN.TRAIN, cfg.TEST.KNN.VAL) == ((), (), ())
