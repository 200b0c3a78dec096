# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``run.json``, the record of the starts of a run, and the last checkpoint in its folder."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.core.environment import find_commit, list_versions
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

RUN_FILE = "run.json"
FIRST_STAGE_FOLDER = "first_stage"
"""Subfolder of ``OUTPUT_DIR`` in which ``SOLVER.FIRST_STAGE`` trains."""


def record_start(
    cfg: CfgNode,
    data: Mapping[str, Any],
    *,
    resumed_from: str | None = None,
    seed: int | None = None,
) -> Callable[[float], None]:
    """Appends this start to ``OUTPUT_DIR/run.json``; call it on the main process.

    Args:
        cfg: resolved config.
        data: what ``RunData.describe`` returns.
        resumed_from: checkpoint that the run was resumed from; None for a new run.
        seed: seed of the run.

    Returns:
        A function that adds the duration of the training in seconds to the record.

    Raises:
        UserError: the file cannot be written, or is not a list of starts.
    """
    path = Path(cfg.OUTPUT_DIR) / RUN_FILE
    device = cfg.MODEL.DEVICE
    if device.startswith("cuda") and torch.cuda.is_available():
        device = f"{device} ({torch.cuda.get_device_name()})"
    earlier = read_run_record(path)
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        **data,
        "resumed_from": resumed_from,
        "commit": find_commit(),
        "versions": list_versions(),
        "device": device,
        "processes": comm.get_world_size(),
        "seed": seed,
        "launch": find_launch(),
    }
    _write_run_record(path, [*earlier, start])

    def add_duration(seconds: float) -> None:
        starts = read_run_record(path) or [*earlier, start]  # the folder may have been deleted
        starts[len(earlier)]["seconds"] = round(seconds, 1)
        _write_run_record(path, starts)

    return add_duration


def _write_run_record(path: Path, starts: Sequence[Mapping[str, Any]]) -> None:
    write_atomically(path, (json.dumps(starts, indent=2) + "\n").encode())


def find_duration(folder: Path) -> float | None:
    """Returns the total seconds of a run and its first stage; None if a start was killed."""
    files = (folder / FIRST_STAGE_FOLDER / RUN_FILE, folder / RUN_FILE)
    starts = [start for file in files for start in read_run_record(file)]
    if not all("seconds" in start for start in starts):
        return None
    return sum(start["seconds"] for start in starts)


def find_shared_images(folder: Path) -> list[str]:
    """Returns how many validation images of a run were trained on, one sentence per kind."""
    starts = read_run_record(folder / RUN_FILE)
    return list(starts[-1].get("shared_images", ())) if starts else []


def find_broken_images(folder: Path) -> list[str]:
    """Returns the paths of the images that a run has left out at its start."""
    starts = read_run_record(folder / RUN_FILE)
    return list(starts[0].get("broken_images", ())) if starts else []


def find_launch() -> str:
    """Returns the ``--rdzv-id`` of the torchrun that started this process; "" if there is none."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if launch == "none" else launch  # torchrun's default, equal for all runs


def read_run_record(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the starts in a ``run.json``, oldest first; empty if there is no file.

    Raises:
        UserError: the file is not a list of starts.
    """
    if not Path(path).is_file():
        return []
    try:
        starts = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        starts = None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise UserError(f"'{path}' is not a list of starts: move it")
    return starts


def name_last_checkpoint(folder: Path) -> str:
    """Returns the name in the file ``last_checkpoint``, else the newest checkpoint, else ""."""
    try:
        return (folder / "last_checkpoint").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return max((path.name for path in folder.glob("model_*.pth")), default="")
