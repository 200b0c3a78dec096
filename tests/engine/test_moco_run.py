# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MoCo-v2 under the package's trainer: it runs, in micro-batches too, and resumes to the bit."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.engine.data_flags import CUSTOM_IMAGES, CUSTOM_VAL_IMAGES
from tests.engine import held_out_cases
from tests.engine.conftest import forget_runs
from tests.engine.held_out_cases import make_folder
from tests.engine.tiny_training import losses, state

OPTS = {
    "MODEL.MOCO.QUEUE_SIZE": "24",
    "MODEL.MOCO.HIDDEN_DIM": "16",
    "MODEL.MOCO.DIM": "8",
    "MODEL.MOCO.NORM_GROUPS": "2",
    "INPUT.PRETRAIN.SIZE": "64",
    "SOLVER.IMS_PER_BATCH": "8",
    "SOLVER.ACCUMULATE": "2",
    "SOLVER.MAX_ITER": "4",
    "SOLVER.CHECKPOINT_EPOCHS": "0.0",
    "SOLVER.CHECKPOINT_PERIOD": "2",
    "SOLVER.CHECKPOINTS_KEPT": "0",
    "SOLVER.EMA.ENABLED": "True",
}
RECIPE = get_config_path("objectives/moco_v2.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield make_folder(tmp_path / "images", 8)
    forget_runs(CUSTOM_IMAGES, CUSTOM_VAL_IMAGES)


def train(output_dir: Path, folder: Path, *flags: str) -> None:
    """Trains to the end, as ``tools/train_net.py`` does."""
    held_out_cases.train(output_dir, OPTS, "--image-folder", str(folder), *flags, config=RECIPE)


def test_a_run_that_was_interrupted_ends_with_the_same_weights_keys_and_copy(
    folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    train(output, folder)
    whole, expected = state(output)["model"], losses(output)
    assert sorted(expected) == [0, 1, 2, 3]
    figures = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    assert all(0 <= entry["contrast_accuracy"] <= 100 for entry in figures)
    assert int(whole["queue.next"]) == 4 * 8 % 24
    (output / "model_final.pth").unlink()
    (output / "last_checkpoint").write_text("model_0000001.pth")
    train(output, folder, "--resume")
    assert losses(output) == expected
    resumed = state(output)["model"]
    halfway = state(output, "model_0000001")["model"]
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=0)
        moved = (name.startswith("momentum_") and tensor.ndim == 4) or name == "queue.keys"
        assert not (moved and torch.equal(halfway[name], tensor)), name


def test_held_out_images_have_no_loss_and_the_sentence_says_so(
    folder: Path, tmp_path: Path
) -> None:
    held_out = make_folder(tmp_path / "held_out", 2, first=20)
    with pytest.raises(UserError, match=r"MoCo has no loss of an image by itself.*--knn-train"):
        train(tmp_path / "run", folder, "--val-image-folder", str(held_out))


def test_a_queue_that_does_not_hold_whole_batches_is_refused_before_anything_is_trained(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"QUEUE_SIZE 24 is no multiple of .*IMS_PER_BATCH 5"):
        held_out_cases.train(
            tmp_path / "run",
            {**OPTS, "SOLVER.IMS_PER_BATCH": "5"},
            *("--image-folder", str(folder)),
            config=RECIPE,
        )
