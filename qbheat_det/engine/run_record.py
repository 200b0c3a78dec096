# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The record of a run's starts, ``OUTPUT_DIR/run.json``: command, data, code, versions, device."""

import functools
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from .data_sources import find_sources

RUN_FILE = "run.json"
_PACKAGES = ("torch", "torchvision", "detectron2", "qbheat_det", "timm", "numpy")
_CODE = ("qbheat_det", "configs", "tools")
_CHECKOUT = Path(__file__).resolve().parents[2]


def write_run_record(
    cfg: CfgNode,
    *,
    command: Sequence[str],
    resumed_from: str | None = None,
    processes: int = 1,
    seed: int | None = None,
) -> None:
    """Appends this start to the list in ``OUTPUT_DIR/run.json``, on the main process.

    Args:
        cfg: of the run, as it resolves.
        command: arguments of the command line, the program first.
        resumed_from: checkpoint that the run continues from; None if it begins.
        processes: number of training processes.
        seed: of the run.

    Raises:
        UserError: the file cannot be written, or is no list of starts.
    """
    path, device = Path(cfg.OUTPUT_DIR) / RUN_FILE, cfg.MODEL.DEVICE
    commit, dirty = find_code_version()
    if device.startswith("cuda") and torch.cuda.is_available():
        device = f"{device} ({torch.cuda.get_device_name()})"
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "data": find_sources(cfg),
        "resumed_from": resumed_from,
        "commit": commit,
        "dirty": dirty,
        "versions": list_versions(),
        "device": device,
        "processes": processes,
        "seed": seed,
    }
    text = json.dumps([*read_run_record(path), start], indent=2) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))


def read_run_record(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the starts in a ``run.json``, oldest first; none if there is no file.

    Raises:
        UserError: the file holds something else.
    """
    if not Path(path).is_file():
        return []
    try:
        starts = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        starts = None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise UserError(f"'{path}' is no list of starts: move it")
    return starts


def list_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # on the path without being installed
            module = importlib.import_module(package)
            versions[package] = str(getattr(module, "__version__", "unknown"))
    return versions


def find_commit() -> str:
    """Returns the commit of the code, with ``-dirty`` where it was changed; "" if unknown."""
    commit, dirty = find_code_version()
    return f"{commit}{'-dirty' if dirty else ''}" if commit else ""


@functools.cache
def find_code_version(checkout: Path = _CHECKOUT) -> tuple[str | None, bool | None]:
    """Returns the commit of a checkout, and whether its code was changed.

    Both are None for an installed wheel, and without git.
    """
    # Inside a git hook, GIT_DIR and its kin name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        run = subprocess.run(
            command, check=True, cwd=checkout, env=environment, capture_output=True, text=True,
            timeout=20,
        )  # fmt: skip
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "qbheat_det/__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", *_CODE))
    except (OSError, subprocess.SubprocessError):
        return None, None
