# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads and writes the record of a run in its folder.

``run.json`` lists the starts of the run, with command, data, code version, library versions and
device. ``last_checkpoint`` names the newest checkpoint.
"""

import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from qbheat_det.core.environment import find_code_version, list_versions
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import Source

RUN_FILE = "run.json"


def write_run_record(
    cfg: CfgNode,
    *,
    command: Sequence[str],
    resumed_from: str | None = None,
    processes: int = 1,
    seed: int | None = None,
) -> None:
    """Appends this start to ``OUTPUT_DIR/run.json``; call it on the main process.

    Args:
        cfg: resolved config.
        command: program and arguments.
        resumed_from: checkpoint that the run was resumed from; None for a new run.
        processes: number of processes.
        seed: seed of the run.

    Raises:
        UserError: the file cannot be written, or is not a list of starts.
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
        "launch": find_launch(),
    }
    write_atomically(path, (json.dumps([*read_run_record(path), start], indent=2) + "\n").encode())


def find_launch() -> str:
    """Returns the ``--rdzv-id`` of the torchrun that started this process; "" without one."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if launch == "none" else launch  # torchrun's default, equal for all runs


def read_run_record(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the starts in a ``run.json``, oldest first; empty without a file.

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


def find_sources(cfg: CfgNode) -> dict[str, Source]:
    """Returns the sources of the data sets that flags registered, by name."""
    knn = cfg.TEST.KNN
    used = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST, *knn.TRAIN, *knn.VAL)
    sources = {name: MetadataCatalog.get(name).get("source") for name in used}
    return {name: source for name, source in sources.items() if source is not None}


def find_last_checkpoint(folder: str) -> str:
    """Returns the path of the newest checkpoint in a folder; empty if there is none."""
    path = Path(folder) / name_last_checkpoint(Path(folder))
    return str(path) if path.is_file() else ""


def name_last_checkpoint(folder: Path) -> str:
    """Returns the name in ``last_checkpoint``, else of the newest file; "" if there is none."""
    try:
        return (folder / "last_checkpoint").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return max((path.name for path in folder.glob("model_*.pth")), default="")
