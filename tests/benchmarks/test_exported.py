# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of exported files: both runtimes get the same image, and ours is the file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import exported
from benchmarks.timing import Sample
from qbheat_det.config import get_cfg


@pytest.mark.parametrize(("quick", "names"), [(False, "ab"), (True, "a")])
def test_each_model_is_timed_in_both_runtimes_on_one_image(
    monkeypatch: pytest.MonkeyPatch, quick: bool, names: str
) -> None:
    seen: dict[str, list[Any]] = {"pytorch": [], "onnxruntime": []}

    def load(cfg: Any, path: Path, threads: int) -> dict[str, exported.Call]:
        assert (cfg.INPUT.MIN_SIZE_TEST == 120) is quick
        assert threads == 3
        return {name: images.append for name, images in seen.items()}

    def time_each(calls: Any, rounds: int) -> dict[str, Sample]:
        assert rounds == (2 if quick else 7)
        for call in calls.values():
            call()
        return {name: Sample.of([3.0 if name.endswith("pytorch") else 2.0]) for name in calls}

    monkeypatch.setattr(exported, "CONFIGS", {"a": get_cfg, "b": get_cfg})
    monkeypatch.setattr(exported, "load", load)
    monkeypatch.setattr(exported, "time_interleaved", time_each)
    monkeypatch.setattr(exported, "set_threads", lambda threads: None)
    rows = {row.name: row for row in exported.run(quick=quick, threads=3)}
    assert set(rows) == {f"exported/{name}_onnxruntime_vs_pytorch" for name in names}
    assert {row.ratio for row in rows.values()} == {1.5}
    images = [image for shown in seen.values() for image in shown]
    assert len(images) == 2 * len(names)
    for image in images:
        np.testing.assert_array_equal(image, images[0])


def test_every_model_of_it_is_a_detector_of_the_package() -> None:
    for make_config in exported.CONFIGS.values():
        cfg = make_config()
        assert torch.device(cfg.MODEL.DEVICE).type == "cpu"
        assert cfg.MODEL.META_ARCHITECTURE in ("MFDETR", "SyncRetinaNet", "RetinaNet")
