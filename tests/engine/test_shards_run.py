# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run whose images stop answering: a checkpoint, a sentence, and the same bits afterwards."""

import shutil
from pathlib import Path

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.data import open_source, pack_source
from qbheat_det.data.shard_cache import cache_folder
from qbheat_det.engine.step import StepTrainer
from tests.data.shard_cases import Server, serve

from . import tiny_training
from .conftest import forget_runs
from .test_resume import assert_same_bits
from .tiny_training import state

KEYS = {
    "DATALOADER.SHUFFLE_SHARDS": "2",
    "DATALOADER.RETRY_SECONDS": "1.0",
    "SOLVER.CHECKPOINT_PERIOD": "100",
}


def train(output_dir: Path, address: str, val: Path, *flags: str) -> None:
    forget_runs()
    opts = {**tiny_training.TINY, **KEYS, "OUTPUT_DIR": str(output_dir)}
    data = ["--data", address, "--val", str(val / "annotations.json")]
    tiny_training.start_run(
        tiny_training.parse_run(tiny_training.CONFIG, opts, *flags, *data)
    ).train()


def fail_at(iteration: int, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the cache away and lets the server refuse everything from an iteration on."""
    run_step = StepTrainer.run_step

    def run(self: StepTrainer) -> None:
        if self.iter == iteration:
            server.faults = {"*": ["503"] * 10_000}
            shutil.rmtree(cache_folder())
        run_step(self)

    monkeypatch.setattr(StepTrainer, "run_step", run)


def test_a_run_that_loses_its_shards_saves_and_goes_on_to_the_same_bits(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    for name in ("QBHEAT_SHARDS_CACHE_GB", "QBHEAT_SHARDS_RETRY_SECONDS"):
        monkeypatch.setenv(name, "1")  # and forgotten after the test
    source = open_source(str(tiny_data / "annotations.json"), str(tiny_data / "images"))
    pack_source(source, tmp_path / "shards", shard_bytes=8_000)
    train(tmp_path / "whole", str(tmp_path / "shards"), tiny_data)
    broken = tmp_path / "broken"
    with serve(tmp_path / "shards") as server, monkeypatch.context() as patch:
        fail_at(3, server, patch)
        with pytest.raises(UserError, match=server.address):
            train(broken, server.address, tiny_data)
        assert [path.name for path in broken.glob("*.pth")] == ["model_0000002.pth"]
        server.faults = {}
        patch.undo()
        monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
        train(broken, str(tmp_path / "shards"), tiny_data, "--resume")
    found, expected = state(broken), state(tmp_path / "whole")
    for key in ("model", "trainer"):
        assert_same_bits(found[key], expected[key])
    forget_runs()
