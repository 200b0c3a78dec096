# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Flags that name data: sets that they make, what is refused, and what an older run left."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_train_stream
from qbheat_det.engine import build_config
from qbheat_det.engine.data_sources import CUSTOM_SETS, find_sources

from .classifier_cases import make_classes
from .conftest import forget_runs
from .tiny_pretraining import RECIPE, make_folder
from .tiny_training import CONFIG, parse_run

PRETRAIN = "INPUT.DATASET_MAPPER_NAME pretrain DATALOADER.ASPECT_RATIO_GROUPING False"
CLASSIFY = get_config_path("objectives/supervised.yaml")
OTHERS = "TEST.KNN.TRAIN ('custom_knn_train',) TEST.KNN.VAL ('custom_knn_val',)"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Works in a folder with small sets of images; sets of classes are in capitals."""
    monkeypatch.chdir(tmp_path)
    make_folder(Path("one"), 2)
    make_folder(Path("two"), 3)
    Path("empty").mkdir()
    make_classes(Path("TRAIN"), {"ape": 1, "bee": 2})
    make_classes(Path("VAL"), {"bee": 1})
    make_classes(Path("ONE"), {"ape": 1})
    make_classes(Path("OTHER"), {"ape": 1, "yak": 1})
    content = {"images": [{"id": 1, "file_name": "1.jpg"}]}
    Path("images.json").write_text(json.dumps(content))
    yield
    forget_runs(*CUSTOM_SETS)


def configure(words: str, config: str = CONFIG) -> CfgNode:
    args = parse_run(config, {}, *words.split())
    return build_config(args)


def test_folders_are_all_that_is_trained_on_and_are_recorded(tmp_path: Path) -> None:
    older = f"DATASETS.TEST ('custom_val_images',) {OTHERS}"  # sets that another run's flags made
    cfg = configure(f"--image-folder one --image-folder two {older} {PRETRAIN}")
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("custom_images",), ())
    assert (cfg.TEST.KNN.TRAIN, cfg.TEST.KNN.VAL) == ((), ())
    assert cfg.MODEL.CLASS_NAMES == []
    assert build_train_stream(cfg).num_images == 5
    folders = [str(tmp_path / name) for name in ("one", "two")]
    assert find_sources(cfg) == {"custom_images": {"image_folders": folders, "labelled": False}}


def test_an_annotation_file_gives_its_images_without_a_set_to_evaluate_on() -> None:
    cfg = configure(f"--train-json images.json --train-images one {PRETRAIN}")
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("custom_images",), ())
    (record,) = DatasetCatalog.get("custom_images")
    assert Path(record["file_name"]) == Path("one/1.jpg").absolute()


def test_a_tool_without_the_flags_of_images_is_configured_too() -> None:
    sets = "DATASETS.TRAIN ('qbheat_toy_val_images',) DATASETS.TEST ()"
    args = parse_run(CONFIG, {}, *f"{sets} {PRETRAIN}".split())
    del args.image_folder
    assert MetadataCatalog.get(build_config(args).DATASETS.TRAIN[0]).unlabelled


BAD_IMAGES = {
    "--image-folder nowhere": "'nowhere'",
    "--image-folder one/0.jpg": r"one/0\.jpg",
    "--image-folder one --eval-only": "--eval-only",
    "--image-folder one --train-json a --train-images b": "--train-json and --train-images",
    "--image-folder one DATASETS.TRAIN ('a',)": r"DATASETS\.TRAIN",
    "--val-image-folder one --val-json a --val-images b": "--val-json",
    "--val-image-folder one DATASETS.TEST ('a',)": r"DATASETS\.TEST",
    "--knn-train-folder one": "--knn-val-folder",
    "DATASETS.TRAIN ('imagenet_train',)": "imagenet_train.*DETECTRON2_DATASETS",
    "--train-json nowhere.json --train-images one": r"nowhere\.json",
    "--train-json images.json --train-images two/2.jpg": r"two/2\.jpg",
    "--train-json images.json": "--train-images",
    "DATASETS.TRAIN ('custom_images',) DATASETS.TEST ()": "--image-folder",
}
BAD_BOXES = {
    "--image-folder one INPUT.DATASET_MAPPER_NAME detr": "'detr'",
    "--train-json images.json --train-images one": "--val-json",
    "--val-json images.json --val-images one": "--eval-only",
    "--train-folder TRAIN INPUT.DATASET_MAPPER_NAME default": "'default'",
}
BAD_CLASSES = {
    "--train-folder nowhere": "'nowhere'",
    "--train-folder empty": "'empty'",
    "--train-folder one": "class folder",
    "--train-folder ONE": "'ape'",
    "--val-folder VAL": "--eval-only",
    "--train-folder TRAIN --val-folder OTHER": "yak",
    "--train-folder TRAIN --eval-only": "--val-folder",
    "--train-folder TRAIN --image-folder VAL": "--image-folder",
    "--train-folder TRAIN --val-json a": "--val-json",
    "--train-folder TRAIN DATASETS.TRAIN ('a',)": r"DATASETS\.TRAIN and --train-folder",
    "--train-folder TRAIN MODEL.CLASSIFIER.NUM_CLASSES 9": "NUM_CLASSES is 9",
    "--train-folder TRAIN --knn": "--train-folder and --val-folder",
    "--train-folder TRAIN --val-folder VAL --knn TEST.KNN.TRAIN ('a',)": r"KNN\.TRAIN",
    "--image-folder TRAIN": "--train-folder",
    "": "imagenet_train.*--train-folder",
    "DATASETS.TRAIN ()": "--train-folder",
    "--train-folder TRAIN INPUT.DATASET_MAPPER_NAME pretrain": "'pretrain'",
}

BAD_EVALUATIONS = {
    "--eval-only DATASETS.TEST ()": "--val-image-folder",
    "--image-folder one DATASETS.TEST ('qbheat_toy_val',)": "'qbheat_toy_val'",
    "--image-folder one --knn-train-folder TRAIN --knn-val-folder OTHER": "images of yak",
    "--image-folder one --knn-train-folder TRAIN --knn-val-folder VAL TEST.KNN.K 0": r"KNN\.K",
    "--image-folder one TEST.KNN.TRAIN ('qbheat_toy_val_images',)": r"TEST\.KNN\.VAL",
    "--image-folder one --val-image-folder two MODEL.META_ARCHITECTURE MoCo": "MoCo",
}
BAD = [
    *((f"{words} {PRETRAIN}", named, CONFIG) for words, named in BAD_IMAGES.items()),
    *((words, named, CONFIG) for words, named in BAD_BOXES.items()),
    *((words, named, CLASSIFY) for words, named in BAD_CLASSES.items()),
    *((words, named, RECIPE) for words, named in BAD_EVALUATIONS.items()),
]


@pytest.mark.parametrize(("words", "named", "config"), BAD)
def test_bad_flags_are_named(words: str, named: str, config: str) -> None:
    with pytest.raises(UserError, match=named):
        configure(words, config)
