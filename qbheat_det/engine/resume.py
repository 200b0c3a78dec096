# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How a run stops, and how it continues.

- ``decide_to_resume`` runs first: it detects a restart by torchrun.
- ``check_start`` refuses a second run in the same folder, and new weights for a resumed run.
- ``check_same_config`` and ``check_same_images`` compare a resumed run with its checkpoint.
- ``record_start`` appends command, data, versions and device of each start to ``run.json``.
- ``StopSignals`` saves a checkpoint after Ctrl-C or a scheduler's signal, and
  ``YieldToNewerStart`` ends a run that was restarted elsewhere.
"""

import argparse
import fnmatch
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.config import dump_config, load_config
from qbheat_det.config.loading import read_values
from qbheat_det.core.environment import find_commit, list_versions
from qbheat_det.core.errors import Interrupted, UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import TrainStream, join_accounts

from .hooks import EvalHook, TrainingRun, is_saved
from .run_flags import FIRST_STAGE_WEIGHTS, RunFlags

logger = logging.getLogger(__name__)
RUN_FILE = "run.json"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# Keys that may change in a resumed run: device, speed, length, evaluation and logs.
_FREE = (
    "CUDNN_BENCHMARK", "DATALOADER.NUM_WORKERS", "DATASETS.CHECK_IMAGES", "DATASETS.MAX_LEFT_OUT",
    "DATASETS.TEST",
    "FLOAT32_PRECISION", "MODEL.CACHE_FEATURES.FOLDER", "MODEL.CHANNELS_LAST", "MODEL.DEPLOY.*",
    "MODEL.DEVICE", "OUTPUT_DIR", "SOLVER.ACCUMULATE", "SOLVER.CHECKPOINT*", "SOLVER.KEEP_MEMORY",
    "SOLVER.LOG_*", "TEST.*", "VIS_PERIOD", "MODEL.*.TOPK_CANDIDATES_TEST", "MODEL.RPN.*_TOPK_TEST",
)  # fmt: skip
_END = ("SOLVER.EPOCHS", "SOLVER.MAX_ITER", "SOLVER.MIN_ITER")


def decide_to_resume(args: argparse.Namespace | RunFlags) -> bool:
    """Returns whether to resume the run in ``OUTPUT_DIR``; equal on all processes.

    Returns True with ``--resume``, or after a restart by torchrun or a job queue. A restart is
    detected if the folder has a checkpoint, and the last start in ``run.json`` had the same
    ``--rdzv-id`` of torchrun as this one.

    Raises:
        UserError: the processes find different checkpoints.
    """
    flags = RunFlags.read(args)
    if flags.eval_only:
        return flags.resume
    folder = Path(flags.load_config().OUTPUT_DIR)
    last = name_last_checkpoint(folder)
    is_restart = bool(last) and not flags.resume and _began_in_this_launch(folder)
    views = comm.all_gather((last, flags.resume or is_restart))
    main, resumes = views[0]
    if not resumes:
        return False
    if others := {name for name, _ in views} - {main}:
        raise UserError(
            f"OUTPUT_DIR '{folder}' ends with '{main or 'nothing'}' on the first machine, but with "
            f"'{others.pop() or 'nothing'}' on another: all must see one folder"
        )
    return True


def check_start(cfg: CfgNode, flags: RunFlags) -> None:
    """Refuses a new run in the folder of another run, or a resumed run with other weights.

    Raises:
        UserError: ``--resume`` comes with weights that the run did not start from, or the folder of
            a new run already contains a run.
    """
    given = cfg.MODEL.WEIGHTS if "MODEL.WEIGHTS" in flags.overrides else ""
    folder, last = Path(cfg.OUTPUT_DIR), name_last_checkpoint(Path(cfg.OUTPUT_DIR))
    if flags.eval_only:
        if flags.resume and given:
            raise UserError(f"--resume evaluates a checkpoint, not MODEL.WEIGHTS '{given}'")
    elif last and not flags.resume:
        raise UserError(
            f"OUTPUT_DIR '{folder}' contains a run up to {last}: add --resume to continue it, or "
            "name another --output"
        )
    elif flags.resume and given and not (last and given == _initial_weights(folder)):
        raise UserError(
            f"--resume continues the run in OUTPUT_DIR '{folder}', but MODEL.WEIGHTS '{given}' "
            "starts a new one: leave one of them out"
        )


def _initial_weights(folder: Path) -> str:
    path = folder / "config.yaml"
    return load_config(path).MODEL.WEIGHTS if path.is_file() else ""


def check_same_config(saved: str, cfg: CfgNode) -> dict[str, object]:
    """Compares the config of a resumed run with that in its checkpoint, and logs allowed changes.

    Args:
        saved: the config in the checkpoint, as YAML; may be empty.
        cfg: config of the resumed run.

    Returns:
        The values in the checkpoint, by dotted key.

    Raises:
        UserError: a key that must not change differs.
    """
    before = read_values(saved)
    now = read_values(dump_config(cfg))
    now.pop("MODEL.WEIGHTS")  # a resumed run does not read them
    if cfg.SEED < 0:  # keeps the seed of the run
        now["SEED"] = before.get("SEED", -1)
    changed = {
        key: f"{key} {before[key]} -> {now[key]}"
        for key in sorted(now.keys() & before.keys())
        if before[key] != now[key]
    }
    free = (*_FREE, *_END)
    refused = [changed[key] for key in changed if not any(fnmatch.fnmatch(key, p) for p in free)]
    if refused:
        text = f"--resume continues a run unchanged, but the config differs: {'; '.join(refused)}"
        if cfg.DATASETS.UNLABELLED and "SOLVER." in text:
            text += ". Other --unlabelled images change the number of iterations"
        raise UserError(text)
    for key, change in changed.items():
        level = logging.WARNING if key in _END else logging.INFO
        logger.log(level, f"Changed since the checkpoint: {change}")
    return before


def check_same_images(state: Mapping[str, Any], stream: TrainStream) -> None:
    """Checks that a resumed run has the same training images as its checkpoint.

    Raises:
        UserError: the images differ, or another trainer wrote the checkpoint.
    """
    if "num_images" not in state:
        raise UserError(
            "--resume needs a checkpoint of this package's trainer: start a new run with "
            "MODEL.WEIGHTS"
        )
    before, now = state["num_images"], stream.num_images
    if (before, state["fingerprint"]) == (now, stream.fingerprint):
        return
    found = f"there are {now} now" if before != now else "their order or their boxes have changed"
    also = " (also counting those of --unlabelled)" if stream.unlabelled else ""
    raise UserError(f"--resume continues a run on {before} training images{also}, but {found}")


def record_start(
    cfg: CfgNode, *, resumed_from: str | None = None, seed: int | None = None
) -> Callable[[float], None]:
    """Appends this start to ``OUTPUT_DIR/run.json``; call it on the main process.

    Args:
        cfg: resolved config.
        resumed_from: checkpoint that the run was resumed from; None for a new run.
        seed: seed of the run.

    Returns:
        A function that adds the duration of the training in seconds to the record.

    Raises:
        UserError: the file cannot be written, or is not a list of starts.
    """
    path, device = Path(cfg.OUTPUT_DIR) / RUN_FILE, cfg.MODEL.DEVICE
    if device.startswith("cuda") and torch.cuda.is_available():
        device = f"{device} ({torch.cuda.get_device_name()})"
    names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    sources = {name: MetadataCatalog.get(name).get("source") for name in names}
    accounts = {one.path: MetadataCatalog.get(name).account for name, one in sources.items() if one}
    shared = [MetadataCatalog.get(name).get("shared") for name in names]
    broken = [MetadataCatalog.get(name).get("broken") or () for name in names]
    earlier = read_run_record(path)
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "data": {name: one.to_json() for name, one in sources.items() if one is not None},
        "account": join_accounts(accounts.values()).to_json(),
        "shared_images": [text for text in shared if text],
        "broken_images": sorted({path for paths in broken for path in paths}),
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
    files = (folder / FIRST_STAGE_WEIGHTS.parent / RUN_FILE, folder / RUN_FILE)
    starts = [start for file in files for start in read_run_record(file)]
    return sum(s["seconds"] for s in starts) if all("seconds" in s for s in starts) else None


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


def _began_in_this_launch(folder: Path) -> bool:
    launch, starts = find_launch(), read_run_record(folder / RUN_FILE)
    return bool(launch and starts and starts[-1].get("launch") == launch)


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


class StopSignals(HookBase):
    """Ends a run on SIGINT, SIGTERM or SIGUSR1; must be the last hook.

    Processes share signals in the all-reduce of the losses. So all processes know about a signal
    before the checkpoint hook runs, and stop after the same step. A signal interrupts an evaluation
    immediately: the step is saved, and ``--resume`` starts with the evaluation. A second Ctrl-C
    ends the process immediately, but not under torchrun, which itself sends the first signal again.
    """

    trainer: Any

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def before_train(self) -> None:
        """Installs the signal handlers; Python allows this only in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def after_train(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def after_step(self) -> None:
        """Ends the run if any process received a signal.

        Raises:
            Interrupted: a process received a signal. All raise it after the checkpoint is saved.
        """
        if self.trainer.stops:
            comm.synchronize()  # torchrun ends the others after the first exit
            raise self._interrupt()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second, self._number = bool(self._number), self._number or number
        if is_second and number == signal.SIGINT and not find_launch():
            raise KeyboardInterrupt
        if self.trainer.find_hook(EvalHook).is_evaluating:
            raise self._interrupt()
        self.trainer._trainer.asked_to_stop = True
        if comm.is_main_process() and not is_second:  # print is not safe in a signal handler
            name = signal.Signals(number).name.encode()
            os.write(2, b"\n%s: stopping after this step, with a checkpoint\n" % name)

    def _interrupt(self) -> Interrupted:
        run, number = self.trainer, self._number or signal.SIGTERM
        done = min(run.iter + 1, run.max_iter)
        return Interrupted(
            number,
            f"stopped by {signal.Signals(number).name} after {done} of {run.max_iter} iterations: "
            f"--resume continues from the checkpoint in '{run.cfg.OUTPUT_DIR}'",
        )


class YieldToNewerStart(HookBase):
    """Ends this process before it overwrites the checkpoints of a newer start of the same run.

    If torchrun considers a slow machine dead, it restarts the run without that machine.
    """

    trainer: TrainingRun

    def before_train(self) -> None:
        """Counts the starts in ``run.json``, including this one."""
        self._file = Path(self.trainer.cfg.OUTPUT_DIR) / RUN_FILE
        self._count = len(read_run_record(self._file))

    def after_step(self) -> None:
        """Checks for a later start whenever a checkpoint is due.

        Raises:
            UserError: the run has a later start.
        """
        if not is_saved(self.trainer, self.trainer.cfg.SOLVER.CHECKPOINT_PERIOD):
            return
        if later := read_run_record(self._file)[self._count :]:
            raise UserError(
                f"'{self._file}' has a later start, at {later[0].get('started')}: this process "
                "ends without saving"
            )
