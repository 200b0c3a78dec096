# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run with tiles: evaluated on whole images, with the boxes that prediction finds."""

import json

import numpy as np
import pytest

from qbheat_det import load
from qbheat_det.core.errors import UserError

from .tiny_training import parse, start_run, train

OPTS = {
    "INPUT.TILE": "40",
    "MODEL.RETINANET.SCORE_THRESH_TEST": "0.001",
    "SOLVER.MAX_ITER": "3",
    "SOLVER.CHECKPOINT_PERIOD": "2",
}


def test_a_run_with_tiles_remembers_them(tmp_path, tiny_data):
    trainer = start_run(parse(tmp_path / "run", tiny_data, OPTS))
    assert trainer.data_loader.num_images > 12
    trainer.train()
    (stored,) = (tmp_path / "run" / "inference").rglob("coco_instances_results.json")
    results = json.loads(stored.read_text())
    content = json.loads((tiny_data / "annotations.json").read_text())
    detector = load(str(tmp_path / "run" / "model_final.safetensors"), device="cpu")
    image = content["images"][0]
    path = tiny_data / "images" / image["file_name"]
    found = detector.predict(path, threshold=0.0)
    evaluated = [one["score"] for one in results if one["image_id"] == image["id"]]
    whole = detector.predict(path, threshold=0.0, tile=0)
    assert len(found.scores) != len(whole.scores)
    expected = np.sort(evaluated)[::-1]
    np.testing.assert_allclose(np.sort(np.array(found.scores))[::-1], expected, atol=1e-4)


def test_a_tile_that_no_training_image_exceeds_is_refused(tmp_path, tiny_data):
    with pytest.raises(UserError, match="--tile 0"):
        train(tmp_path, tiny_data, {**OPTS, "INPUT.TILE": "64"})
    with pytest.raises(UserError, match=r"INPUT\.TILE"):
        train(tmp_path, tiny_data, {**OPTS, "INPUT.TILE": "31"})
