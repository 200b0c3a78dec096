# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How a stage starts, and ``run.json``, the record of all starts of a run."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm

from qbheat_det.config import load_config
from qbheat_det.core.environment import find_commit, list_versions
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import RUN_FILE, file_lock, try_file_lock, write_atomically

LOCK_FILE = ".run.lock"
"""File in ``OUTPUT_DIR`` that exists while a run trains there."""
BEST_RESULTS_FOLDER = "inference_best"
"""Subfolder of ``OUTPUT_DIR`` with the results of the best evaluation, such as detections."""
FIRST_STAGE_FOLDER = "first_stage"
"""Subfolder of ``OUTPUT_DIR`` in which ``SOLVER.FIRST_STAGE`` trains."""


@dataclass(frozen=True)
class Start:
    """How a stage starts.

    Attributes:
        folder: ``OUTPUT_DIR``.
        resume: whether to continue the run in the folder, if there is one.
        checkpoint: name of the last checkpoint in the folder; "" if there is none.
        left_out: paths of the images that a resumed run has left out at its start.
    """

    folder: Path
    resume: bool
    checkpoint: str
    left_out: Sequence[str] = ()

    @property
    def continues(self) -> bool:
        """Whether the stage starts from a checkpoint."""
        return self.resume and bool(self.checkpoint)


def find_start(folder: Path, *, asked: bool) -> Start:
    """Finds out how a stage starts; equal on all processes.

    A stage is resumed if the user has asked for it, or after a restart by torchrun or a job queue.
    A restart is detected if the folder has a checkpoint, and the last start in ``run.json`` had the
    same ``--rdzv-id`` of torchrun as this one.

    Raises:
        UserError: the processes find different checkpoints.
    """
    last = name_last_checkpoint(folder)
    is_restart = bool(last) and not asked and _began_in_this_launch(folder)
    views = comm.all_gather((last, asked or is_restart))
    main, resume = views[0]
    others = {name for name, _ in views} - {main}
    if resume and others:
        raise UserError(
            f"OUTPUT_DIR '{folder}' ends with '{main or 'nothing'}' on the first machine, but with "
            f"'{others.pop() or 'nothing'}' on another: all must see one folder"
        )
    return read_start(folder, resume=resume)


def read_start(folder: Path, *, resume: bool) -> Start:
    """Reads from a folder how a stage starts, if it is known whether the run is resumed."""
    left_out: Sequence[str] = ()
    if resume:
        left_out = find_broken_images(folder)
    return Start(folder, resume, name_last_checkpoint(folder), left_out)


def check_start(start: Start, weights: str) -> None:
    """Refuses a new run in the folder of another run, or a resumed run with other weights.

    Args:
        start: how the stage starts.
        weights: ``MODEL.WEIGHTS`` as the user has set it; "" if not.

    Raises:
        UserError: the run did not start from ``weights``, or the folder of a new run already
            contains a run.
    """
    if start.checkpoint and not start.resume:
        raise UserError(
            f"OUTPUT_DIR '{start.folder}' contains a run up to {start.checkpoint}: add --resume to "
            "continue it, or name another --output"
        )
    if start.resume and weights and weights not in _list_initial_weights(start.folder):
        raise UserError(
            f"--resume continues the run in OUTPUT_DIR '{start.folder}', but MODEL.WEIGHTS "
            f"'{weights}' starts a new one: leave one of them out"
        )


@contextlib.contextmanager
def occupies(folders: Sequence[Path], *, resume: bool) -> Iterator[None]:
    """Context in which no other new run can start in the folders of a run's stages.

    All processes of the run must enter it. A resumed run does not wait for the older process of the
    same run, which may still hold the folders: see ``YieldToNewerStart``.

    Raises:
        UserError: a run that has not ended is in a folder, or has left a checkpoint in it since
            ``check_start``; or a folder cannot be created.
    """
    message = ""
    with contextlib.ExitStack() as locks:
        if comm.is_main_process():
            for folder in folders:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    has_lock = locks.enter_context(try_file_lock(folder / LOCK_FILE))
                except OSError as error:
                    message = f"OUTPUT_DIR '{folder}': {error.strerror}"
                    break
                if resume or _began_in_this_launch(folder):
                    continue
                if not has_lock:
                    message = (
                        f"OUTPUT_DIR '{folder}' is in use by a run that has not ended: wait for "
                        "it, or name another --output"
                    )
                elif name_last_checkpoint(folder):
                    message = f"OUTPUT_DIR '{folder}' has another run by now: name another --output"
                if message:
                    break  # without the next lock, which a run that has this one may need
        message = comm.all_gather(message)[0]
        if message:
            raise UserError(message)
        yield


def _list_initial_weights(folder: Path) -> list[str]:
    """Returns ``MODEL.WEIGHTS`` of the run in a folder and of its first stage."""
    weights = []
    for path in (folder / "config.yaml", folder / FIRST_STAGE_FOLDER / "config.yaml"):
        if path.is_file():
            weights.append(str(load_config(path).MODEL.WEIGHTS))
    return weights


def _began_in_this_launch(folder: Path) -> bool:
    launch = find_launch()
    starts = read_run_record(folder / RUN_FILE)
    return bool(launch and starts and starts[-1].get("launch") == launch)


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
    lock = path.with_name(f".{RUN_FILE}.lock")  # two processes may resume a run at once
    with file_lock(lock):
        earlier = read_run_record(path)
        _write_run_record(path, [*earlier, start])

    def add_duration(seconds: float) -> None:
        with file_lock(lock):
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


def find_first_device(folder: Path) -> str:
    """Returns the device on which the run in a folder has started; "" if there is no run."""
    for file in (folder / FIRST_STAGE_FOLDER / RUN_FILE, folder / RUN_FILE):
        for start in read_run_record(file):
            return str(start.get("device", ""))
    return ""


def find_shared_images(folder: Path) -> list[str]:
    """Returns how many validation images of a run were trained on, one sentence per kind."""
    starts = read_run_record(folder / RUN_FILE)
    if not starts:
        return []
    return list(starts[-1].get("shared_images", ()))


def find_broken_images(folder: Path) -> list[str]:
    """Returns the paths of the images that a run has left out at its start."""
    starts = read_run_record(folder / RUN_FILE)
    if not starts:
        return []
    return list(starts[0].get("broken_images", ()))


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
