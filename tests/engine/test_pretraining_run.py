# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat under the package's trainer, from a shipped recipe: it runs, and resumes to the bit."""

from pathlib import Path

import torch

from qbheat_det.data import register_image_folders
from tests.engine.tiny_pretraining import train
from tests.engine.tiny_training import losses, make_data, state


def test_a_run_that_was_interrupted_ends_with_the_same_weights(tmp_path: Path) -> None:
    register_image_folders("qb_heat_run", [make_data(tmp_path / "data") / "images"])
    opts = {"DATASETS.TRAIN": "('qb_heat_run',)", "MODEL.MOBILE_FORMER.VARIANT": "285M"}
    train(tmp_path, opts)
    whole, expected = state(tmp_path)["model"], losses(tmp_path)
    assert sorted(expected) == [0, 1, 2, 3]
    (tmp_path / "model_final.pth").unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    train(tmp_path, opts, "--resume")
    assert losses(tmp_path) == expected
    resumed = state(tmp_path)["model"]
    halfway = state(tmp_path, "model_0000001")["model"]
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
        assert not (name.startswith("predictor") and torch.equal(halfway[name], tensor)), name
