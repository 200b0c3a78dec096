# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/predict.py with the weights of a classifier: the likeliest classes of each image."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from detectron2.modeling import build_model

from qbheat_det.data import build_mapper
from qbheat_det.engine.data_flags import LABELLED_TRAIN
from tests.engine.classifier_cases import configure, make_classes
from tests.engine.conftest import forget_runs
from tests.engine.tiny_detectors import save_run
from tests.tool_modules import load_tool

NAMES = ["ape", "bee", "cat", "dog", "emu", "fox"]


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    return load_tool("predict")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    forget_runs(LABELLED_TRAIN)


def test_each_image_gets_its_five_likeliest_classes_and_the_rest_is_named(
    predict: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_classes(tmp_path / "train", dict.fromkeys(NAMES, 1))
    cfg, _ = configure({}, "--train-folder", root)
    weights = save_run(cfg, tmp_path / "run", seed=4)
    (tmp_path / "train" / "bee" / "x.jpg").write_text("no image")
    (tmp_path / "train" / "clip.mp4").write_text("no film")
    out = tmp_path / "classes.json"
    arguments = ["--weights", weights, "--input", root, "--json", str(out), "--device", "cpu"]
    assert predict.main(arguments) == 1
    said = capsys.readouterr()
    assert "classes of 6 images" in said.out
    assert "clip.mp4" in said.err
    assert "x.jpg" in said.err

    torch.manual_seed(4)
    model = build_model(cfg).eval()
    mapper = build_mapper(cfg, is_train=False)
    for entry in json.loads(out.read_text()):
        with torch.no_grad():
            record = {"file_name": f"{root}/{entry['file_name']}", "image_id": 0}
            scores = model([mapper(record)])[0]["scores"]
        order = sorted(range(6), key=lambda k: -float(scores[k]))[:5]
        assert [found["name"] for found in entry["classes"]] == [NAMES[k] for k in order]
        found = torch.tensor([found["score"] for found in entry["classes"]])
        torch.testing.assert_close(found, scores[order], rtol=1e-4, atol=1e-6)


def test_pictures_of_boxes_are_not_asked_of_a_classifier(
    predict: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_classes(tmp_path / "train", {"ape": 1, "bee": 1})
    cfg, _ = configure({}, "--train-folder", root)
    weights = save_run(cfg, tmp_path / "run")
    arguments = ["--weights", weights, "--input", root, "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        predict.main([*arguments, "--device", "cpu"])
    assert "--output" in capsys.readouterr().err
