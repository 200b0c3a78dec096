# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A small detector, a small classifier, and photos."""

from pathlib import Path

import pytest

from tests.data.pictures import draw, save
from tests.engine.classifier_cases import configure, make_classes
from tests.engine.tiny_detectors import make_retinanet_config, save_run

NAMES = ["ape", "bee", "cat", "dog", "emu", "fox"]
SIZES = {"a.png": (80, 60), "b.jpg": (60, 80), "deep/a.png": (80, 60), "e.png": (64, 64)}


@pytest.fixture(scope="session")
def detector(tmp_path_factory):
    """Weights of a RetinaNet."""
    return save_run(make_retinanet_config(), tmp_path_factory.mktemp("detector"))


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder of images of ``SIZES`` and, in the middle of them, a file that is none."""
    folder = tmp_path_factory.mktemp("inference") / "photos"
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save(folder / name, draw(*size))
    (folder / "c.png").write_text("no image")
    return folder


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """Folder of an image of each of ``NAMES``, with a file that is none; config; weights."""
    root = Path(make_classes(tmp_path_factory.mktemp("train"), dict.fromkeys(NAMES, 1)))
    cfg, _ = configure({"DATASETS.VAL_FRACTION": "0"}, "--data", str(root))
    (root / "bee" / "x.jpg").write_text("no image")
    return str(root), cfg, save_run(cfg, tmp_path_factory.mktemp("classifier"), seed=4)
