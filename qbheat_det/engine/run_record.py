# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The record of a run's starts, ``OUTPUT_DIR/run.json``: command, data, code, versions, device."""

import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

RUN_FILE = "run.json"
_PACKAGES = ("torch", "torchvision", "detectron2", "qbheat_det", "timm", "numpy")
_CODE = ("qbheat_det", "configs", "tools")
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CodeVersion:
    """Commit of the checkout that the package is used from, and whether its code was changed."""

    commit: str
    dirty: bool


def write_run_record(
    output_dir: str | os.PathLike[str],
    *,
    command: Sequence[str],
    resumed_from: str | None = None,
    device: str = "cpu",
    processes: int = 1,
    seed: int | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Appends this start to the list in ``OUTPUT_DIR/run.json``, on the main process.

    Args:
        output_dir: folder of the run.
        command: arguments of the command line, the program first.
        resumed_from: checkpoint that the run continues from; None if it begins.
        device: ``MODEL.DEVICE``.
        processes: number of training processes.
        seed: of the run.
        data: see ``find_sources``.

    Raises:
        UserError: the file cannot be written, or is no list of starts.
    """
    path = Path(output_dir) / RUN_FILE
    code = find_code_version()
    if device.startswith("cuda") and torch.cuda.is_available():
        device = f"{device} ({torch.cuda.get_device_name()})"
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "data": dict(data or {}),
        "resumed_from": resumed_from,
        "commit": code.commit if code else None,
        "dirty": code.dirty if code else None,
        "versions": list_versions(),
        "device": device,
        "processes": processes,
        "seed": seed,
    }
    _write(path, [*read_run_record(path), start])


def add_to_run_record(output_dir: str | os.PathLike[str], **values: Any) -> None:
    """Adds values by name to the last start; does nothing if there is no ``run.json``."""
    path = Path(output_dir) / RUN_FILE
    starts = read_run_record(path)
    if starts:
        starts[-1].update(values)
        _write(path, starts)


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
        raise UserError(f"'{path}' is no list of starts: move it, or choose another OUTPUT_DIR")
    return starts


def list_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that decide what a run computes."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def find_commit() -> str:
    """Returns the commit of the code, with ``-dirty`` where it was changed; "" if unknown."""
    code = find_code_version()
    return f"{code.commit}{'-dirty' if code.dirty else ''}" if code else ""


@functools.cache
def find_code_version(checkout: Path = _CHECKOUT) -> CodeVersion | None:
    """Returns the version of a checkout; None for an installed wheel, and without git."""
    try:
        _git(checkout, "ls-files", "--error-unmatch", "qbheat_det/__init__.py")
        commit = _git(checkout, "rev-parse", "HEAD").strip()
        changes = _git(checkout, "status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.SubprocessError):
        return None
    return CodeVersion(commit, bool(changes.strip()))


def _write(path: Path, starts: Sequence[Mapping[str, Any]]) -> None:
    text = json.dumps(starts, indent=2) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))


def _git(folder: Path, *arguments: str) -> str:
    # Inside a git hook, GIT_DIR and its kin name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return subprocess.run(
        ["git", "--no-optional-locks", *arguments],
        check=True,
        cwd=folder,
        env=environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=20,
    ).stdout


def _version(package: str) -> str:
    for name in (package, package.replace("_", "-")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    # On the path without being installed.
    return str(getattr(importlib.import_module(package), "__version__", "unknown"))
