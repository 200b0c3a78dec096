# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The file of a failed step: what it holds, and that reading it runs nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine.failure import dump_failure, read_failure, report_failure


def make_state() -> dict[str, Any]:
    """Arguments of ``dump_failure`` but for the path, with every kind of data in the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    model.register_buffer("offset", torch.tensor(0.25), persistent=False)
    model(torch.rand(2, 1))
    instances = Instances(
        (8, 6),
        gt_boxes=Boxes([[0.5, 1, 2, 3]]),
        gt_classes=torch.tensor([2]),
        gt_masks=PolygonMasks([[np.array([0.0, 0, 3, 0, 3, 3])]]),
        gt_bits=BitMasks(torch.ones(1, 8, 6, dtype=torch.bool)),
    )
    entry = {
        "image": torch.rand(100, 3, 8, 6)[7],  # a view of a large tensor
        "instances": instances,
        "features": {"s8": torch.ones(2)},
        "array": np.arange(3),
        "height": np.int64(8),
        "path": Path("a.jpg"),
    }
    return {
        "cfg": get_cfg(),
        "model": model,
        "batched_inputs": [[entry], [entry]],
        "iteration": 12,
        "seed": 3,
        "rank": 1,
        "losses": {"loss_a": float("nan"), "loss_b": 2.0},
        "normalizers": torch.tensor([1.0, 3.0]),
        "scale": 8.0,
    }


def test_the_file_holds_all_that_a_replay_needs_and_no_more(tmp_path: Path) -> None:
    path, state = tmp_path / "step.pt", make_state()
    dump_failure(path, **state)
    assert path.stat().st_size < 100_000
    failed = read_failure(path)
    assert (failed.iteration, failed.seed, failed.rank, failed.scale) == (12, 3, 1, 8.0)
    assert (failed.num_processes, failed.device) == (1, "cpu")
    assert "META_ARCHITECTURE" in failed.config
    assert np.isnan(failed.losses["loss_a"])
    torch.testing.assert_close(failed.normalizers, state["normalizers"])
    torch.testing.assert_close(failed.weights, dict(state["model"].state_dict()))
    assert failed.buffers["offset"].item() == 0.25
    assert failed.buffers.keys().isdisjoint(failed.weights)
    ((found,), _), ((entry,), _) = failed.batches, state["batched_inputs"]
    torch.testing.assert_close(found["image"], entry["image"])
    torch.testing.assert_close(found["features"], entry["features"])
    assert found["array"] == repr(entry["array"])
    assert (found["height"], found["path"]) == (8, repr(Path("a.jpg")))
    instances, expected = found["instances"], entry["instances"]
    assert instances.image_size == (8, 6)
    assert instances.get_fields().keys() == expected.get_fields().keys()
    torch.testing.assert_close(instances.gt_boxes.tensor, expected.gt_boxes.tensor)
    torch.testing.assert_close(instances.gt_bits.tensor, expected.gt_bits.tensor)
    polygons = instances.gt_masks.polygons
    np.testing.assert_array_equal(polygons[0][0], expected.gt_masks.polygons[0][0])


def test_the_error_names_iteration_losses_and_file(tmp_path: Path) -> None:
    error = report_failure(str(tmp_path), **make_state())
    path = tmp_path / "failure_0000012_rank1.pt"
    assert path.is_file()
    for part in ("iteration 12", "loss_a", f"--replay {path}"):
        assert part in str(error)
    # A folder that cannot be written to does not hide the failure.
    (tmp_path / "file").write_text("in the way")
    error = report_failure(str(tmp_path / "file"), **make_state())
    assert "loss_a" in str(error)
    assert "--replay" not in str(error)


def test_other_files_are_refused_and_run_nothing(tmp_path: Path) -> None:
    path, mark = tmp_path / "step.pt", tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> Any:
            return (mark.write_text, ("x",))

    form = {"format": "qbheat_det failed step, 3"}
    contents = [7, {"model": {}}, {**form, "config": Attack()}, {**form, "config": ""}]
    for content in (*contents, b"", b"half a file", None):
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        with pytest.raises(UserError, match=r"step\.pt"):
            read_failure(path)
    assert not mark.exists()
