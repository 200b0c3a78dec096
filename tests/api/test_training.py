# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Detector.train``: the trainer underneath, and the trained weights in the detector."""

from pathlib import Path
from typing import Any

import pytest
import torch

import qbheat_det
from qbheat_det.api import Detector
from qbheat_det.core.errors import UserError
from qbheat_det.data import ToySpec, prepare_toy_set

QUICK = {
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.LOG_PERIOD": 1,
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "TEST.EVAL_PERIOD": 0,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A COCO json with its images beside it."""
    folder = tmp_path_factory.mktemp("toy")
    return (
        prepare_toy_set(ToySpec("train", num_images=20, image_size=64), folder) / "annotations.json"
    )


@pytest.mark.slow
def test_a_trained_detector_has_the_datas_classes_and_the_runs_weights(
    weights: str, toy: Path, tmp_path: Path, photos: Path
) -> None:
    detector = qbheat_det.load(weights, device="cpu")
    assert isinstance(detector, Detector)
    assert detector.model is not None
    before = {key: value.clone() for key, value in detector.model.state_dict().items()}
    images = str(toy.parent / "images")
    run = detector.train(toy, images=images, epochs=1, output=tmp_path / "run", overrides=QUICK)
    assert run.folder == tmp_path / "run"
    assert [record["iteration"] for record in run.metrics if "total_loss" in record]
    again = qbheat_det.load(run.path, device="cpu")
    assert isinstance(again, Detector)
    assert detector.weights == again.weights
    assert detector.class_names == again.class_names != ["square", "disc", "cross"]
    torch.testing.assert_close(
        detector.model.state_dict(), again.model.state_dict(), rtol=0, atol=0
    )
    name = "backbone.bottom_up.fine.weight"
    assert not torch.equal(before[name], detector.model.state_dict()[name])
    detector.predict(photos / "0.png")
    with pytest.raises(UserError, match="run"):  # the folder is taken
        detector.train(toy, output=tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data": "nowhere.yaml"}, "nowhere.yaml"),
        ({"images": "elsewhere"}, "elsewhere"),
        ({"overrides": {"SOLVER.NOTHING": 1}}, "SOLVER.NOTHING"),
        ({"overrides": {"SOLVER.EPOCHS": 1, "OUTPUT_DIR": "x"}}, "OUTPUT_DIR"),
        ({"wrong_flag": 1}, "wrong_flag"),
    ],
)
def test_what_cannot_be_trained_is_named(
    arguments: dict[str, Any], named: str, detector: Detector, toy: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        detector.train(**{"data": toy, "output": tmp_path / "run", **arguments})
    assert not (tmp_path / "run").exists()
