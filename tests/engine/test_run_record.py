# Copyright (c) qbheat_det contributors. Apache-2.0.
"""run.json: one entry a start, the commit of the code and not of another repository."""

import json
import subprocess
from pathlib import Path

import pytest
from detectron2.config import CfgNode

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine.writers import (
    find_code_version,
    read_run_record,
    write_run_record,
)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def make_config(folder: Path) -> CfgNode:
    cfg = get_cfg()
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE = str(folder), "cpu"
    return cfg


def test_every_start_adds_an_entry_without_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-mine")
    cfg = make_config(tmp_path / "new")
    write_run_record(cfg, command=["train_net.py", "SEED", "1"], seed=1)
    checkpoint = "model_0000019.pth"
    write_run_record(cfg, command=["--resume"], resumed_from=checkpoint, processes=2, seed=1)
    text = (tmp_path / "new" / "run.json").read_text()
    assert "a-secret-of-mine" not in text
    first, second = json.loads(text)
    assert first["command"] == ["train_net.py", "SEED", "1"]
    assert first["resumed_from"] is None
    assert second["resumed_from"] == checkpoint
    assert (second["processes"], second["seed"], second["device"]) == (2, 1, "cpu")
    assert first["started"].endswith("+00:00")
    names = {"python", "torch", "torchvision", "detectron2", "qbheat_det", "timm", "numpy"}
    assert set(first["versions"]) == names
    assert first["versions"]["torch"].startswith("2.")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"sta'])
def test_another_run_json_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"run\.json"):
        write_run_record(make_config(tmp_path), command=[])
    assert path.read_text() == content
    assert read_run_record(tmp_path / "missing.json") == []


def test_commit_and_changes_are_those_of_the_code_of_this_checkout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "qbheat_det").mkdir(parents=True)
    (checkout / "qbheat_det" / "__init__.py").write_text("")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        git(checkout, *arguments)
    find_code_version.cache_clear()
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "output").mkdir()
    (checkout / "output" / "log.txt").write_text("no code")
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))  # as inside a git hook
    assert find_code_version(checkout) == (commit, False)
    find_code_version.cache_clear()
    (checkout / "qbheat_det" / "new.py").write_text("")
    assert find_code_version(checkout) == (commit, True)

    # A wheel has no commit, and neither has a machine without git.
    installed = checkout / "venv" / "site-packages"
    (installed / "qbheat_det").mkdir(parents=True)
    (installed / "qbheat_det" / "__init__.py").write_text("")
    assert find_code_version(installed) == (None, None)
    assert find_code_version(checkout / "no such folder") == (None, None)
    find_code_version.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert find_code_version(checkout) == (None, None)
