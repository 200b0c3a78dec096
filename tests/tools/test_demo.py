# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/demo.py from its command line, with one step on the photographs of the package."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from qbheat_det.checkpoint import read_weights
from tests.tool_modules import load_tool, refuse

SHORT = {
    "SOLVER.EPOCHS": "0.0",
    "SOLVER.CHECKPOINT_EPOCHS": "0.0",
    "SOLVER.MAX_ITER": "1",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.WARMUP_ITERS": "0",
    "TEST.EVAL_EPOCHS": "0.0",
    "DATALOADER.NUM_WORKERS": "0",
    "MODEL.DEVICE": "cpu",
    "INPUT.FIXED_VIEWS.COUNT": "1",
    "INPUT.MIN_SIZE_TRAIN": "(32,)",
    "INPUT.MIN_SIZE_TEST": "32",
}


@pytest.fixture
def demo() -> ModuleType:
    return load_tool("demo")


def test_a_step_of_each_ends_in_a_report_and_a_result(
    demo: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "FIGURES", ("curves",))
    monkeypatch.setattr(demo, "NUM_RECALIBRATED", 2)
    output = tmp_path / "demo"
    cache = {"MODEL.CACHE_FEATURES.FOLDER": str(tmp_path / "cache")}
    words = [word for pair in (SHORT | cache).items() for word in pair]
    demo.main(["--output", str(output), *words])
    assert capsys.readouterr().out.strip().endswith(f"open  {output / 'report.html'}")
    result = json.loads((output / "result.json").read_text())
    assert set(result) == {"pretrained", "random", "seconds"}
    encoders = []
    for name in ("pretrained", "random"):
        assert set(result[name]) == {"AP", "AP50"}
        encoder, _ = read_weights(str(output / f"encoder_{name}.safetensors"))
        trained, _ = read_weights(str(output / name / "model_final.safetensors"))
        start = "backbone.bottom_up."
        kept = {k.removeprefix(start): v for k, v in trained.items() if k.startswith(start)}
        assert kept
        for key, tensor in kept.items():
            if not key.endswith("num_batches_tracked"):  # frozen norms count nothing
                torch.testing.assert_close(tensor, encoder[key], rtol=0, atol=0)
        encoders.append(encoder)
    assert any((encoders[0][key] != value).any() for key, value in encoders[1].items())


def test_a_folder_that_is_not_of_the_demo_is_left_alone(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "pretrained" / "model_final.pth"
    weights.parent.mkdir()
    weights.write_bytes(b"a week of training")
    assert "--output" in refuse(demo.main, ["--output", str(tmp_path)], capsys)
    assert weights.read_bytes() == b"a week of training"
