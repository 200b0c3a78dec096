# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checkpoints go to an address, whole or not at all, and another machine continues from there."""

import signal
from pathlib import Path

import pytest

from qbheat_det.core.errors import Interrupted, UserError
from qbheat_det.engine import transfer
from qbheat_det.engine.resume import decide_to_resume

from . import tiny_training
from .test_interruption import signal_at
from .test_resume import assert_same_bits
from .tiny_training import losses, state


def start(folder: Path, data: Path, address: str, *flags: str) -> None:
    opts = {
        "SOLVER.CHECKPOINT_URL": address,
        "SOLVER.CHECKPOINT_PERIOD": "1",
        "SOLVER.CHECKPOINTS_KEPT": "2",
    }
    args = tiny_training.parse(folder, data, opts, *flags)
    args.resume = decide_to_resume(args)
    tiny_training.start_run(args).train()


def run_on_two_machines(
    address: str, tiny_data: Path, whole: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Stops a run on one machine and continues on another; returns what was there between."""
    with monkeypatch.context() as patch:
        signal_at(2, patch, signal.SIGTERM)
        with pytest.raises(Interrupted):
            start(folder / "first", tiny_data, address)
    files, root = transfer.open_address(address)
    between = [os.path.basename(path) for path in files.ls(root, detail=False)]
    with pytest.raises(UserError, match=r"model_0000002\.pth"):  # a new run would mix with it
        start(folder / "refused", tiny_data, address)
    start(folder / "second", tiny_data, address, "--resume")
    assert losses(folder / "second") == losses(whole)
    assert_same_bits(state(folder / "second")["model"], state(whole)["model"])
    assert files.exists(f"{root}/model_final.safetensors")
    assert files.cat_file(f"{root}/last_checkpoint") == b"model_final.pth"
    return between


def test_a_run_continues_on_another_machine(
    tiny_data: Path, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    between = run_on_two_machines(f"file://{bucket}", tiny_data, whole_run, tmp_path, monkeypatch)
    assert {name for name in between if name.endswith(".pth")} == {
        "model_0000001.pth",
        "model_0000002.pth",
    }
    assert {"config.yaml", "metrics.json", "last_checkpoint"} < set(between)

    # A checkpoint without its tag, as a killed transfer leaves it, is not what others begin from.
    (tmp_path / "x").mkdir()
    shutil.copy(whole_run / "model_final.pth", tmp_path / "x" / "model_0000009.pth")
    transfer.send(tmp_path / "x", f"file://{bucket}", 1, ["model_0000009.pth"])
    transfer.fetch(tmp_path / "third", f"file://{bucket}", [])
    assert [path.name for path in tmp_path.glob("third/*.pth")] == ["model_final.pth"]

    # A later one that is here stays, unless other machines take part.
    (bucket / "last_checkpoint").write_text("model_0000002.pth")
    for machines, expected in (("1", "model_0000009.pth"), ("2", "model_0000002.pth")):
        (tmp_path / "x" / "last_checkpoint").write_text("model_0000009.pth")
        monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
        transfer.fetch(tmp_path / "x", f"file://{bucket}", [])
        assert (tmp_path / "x" / "last_checkpoint").read_text() == expected


def test_an_address_that_fails_is_named_before_training(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for address in (f"file://{tmp_path}/file/run", "nothing://bucket"):
        with pytest.raises(UserError, match=address):
            start(tmp_path / "run", tiny_data, address)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
