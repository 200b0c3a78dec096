# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the jobs of a comparison in a pool of processes; a repeated call continues it."""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from qbheat_det.analysis.training_log import flatten
from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import file_lock, hash_file, write_atomically
from qbheat_det.core.text import format_duration
from qbheat_det.data import preserved_randomness
from qbheat_det.engine.run_record import find_commit, list_versions
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .objectives import RANDOM
from .plan import Comparison, Job, Row, list_jobs
from .results import write_report

_LOG_LINES = 12  # of a job that failed
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def compare(comparison: Comparison, *, jobs: int = 1) -> tuple[str, dict[str, str]]:
    """Runs the jobs that are not done, several at once, and rewrites the report after each.

    Returns:
        The tables, and the reason of each job that failed, by title.

    Raises:
        UserError: data or a config is not valid, or the folder has results of other settings.
    """
    rows = list_jobs(comparison)
    for row in rows:
        for job in row.jobs:
            is_done(job)  # refuses other settings before anything runs
    waiting = f"waiting for another comparison in '{comparison.output_dir}'"
    with file_lock(comparison.output_dir / ".lock", waiting):
        for row in rows:
            if row.objective.name == RANDOM and not row.weights.is_file():
                _save_initialized(row)
        pool = _Pool(comparison, rows, jobs)
        pool.run()
        return write_report(comparison, rows, pool.failed), pool.failed


def is_done(job: Job) -> bool:
    """Whether the job has a complete result.

    Raises:
        UserError: it was made with other settings or inputs, or is not a result.
    """
    if not job.record_file.is_file():
        return False
    try:
        record = json.loads(job.record_file.read_text(encoding="utf-8"))
        old, missing = flatten(record["settings"]), set(job.wanted) - set(record["wanted"])
        inputs = dict(record["inputs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{job.record_file}' is not a result of a comparison") from error
    new = flatten(json.loads(json.dumps(job.settings)))
    # Keys that only one of them has come from another version, and have their defaults.
    changed = [f"{key} {old[key]} -> {value}" for key, value in new.items()
               if old.get(key, value) != value]  # fmt: skip
    changed += [str(path) for path in job.inputs
                if path.is_file() and inputs.get(path.name) != hash_file(path)]  # fmt: skip
    if changed:
        raise UserError(
            f"'{job.record_file}' was made with other settings: {'; '.join(changed)}. Undo that, "
            f"use another --output-dir, or remove the file and '{job.stage}' beside it"
        )
    return not missing


class _Pool:
    """Runs the rows side by side, and the jobs of a row one after another."""

    def __init__(self, comparison: Comparison, rows: list[Row], jobs: int) -> None:
        self.failed: dict[str, str] = {}
        self._comparison, self._rows, self._jobs = comparison, rows, jobs
        self._total = sum(len(row.jobs) for row in rows)
        self._done = 0
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopped = threading.RLock(), False

    def run(self) -> None:
        """Runs everything that is not done; no process is left behind, whatever happens."""
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                for future in as_completed([pool.submit(self._run_row, row) for row in self._rows]):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                with self._lock:
                    self._stopped = True
                    for process in self._running:
                        process.terminate()
                raise

    def _run_row(self, row: Row) -> None:
        for job in row.jobs:
            missing = [path for path in job.inputs if not path.is_file()]
            if self._stopped:
                return
            if missing:
                self._report(job, f"needs '{missing[0]}', whose job failed")
            elif is_done(job):
                self._report(job)
            else:
                self._run_job(job)

    def _run_job(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        began = time.time()
        threads = os.environ.get("OMP_NUM_THREADS", str((os.cpu_count() or 1) // self._jobs or 1))
        with open(job.log_file, "ab") as log:
            log.write(f"\n$ {shlex.join(job.command)}\n".encode())
            log.flush()
            start = log.tell()
            with self._lock:
                if self._stopped:
                    return
                print(f"{job.title}: started", flush=True)
                process = subprocess.Popen(
                    job.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | dict.fromkeys(_THREADS, threads),
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                )
                self._running.add(process)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
            if self._stopped:
                return
        if code:
            text = job.log_file.read_bytes()[start:].decode(errors="replace")
            lines = [line.rpartition("\r")[2] for line in text.splitlines()[-_LOG_LINES:]]
            reason = f"exit code {code}; the end of {job.log_file}:\n    " + "\n    ".join(lines)
            self._report(job, reason)
            return
        record = {
            "command": job.command,
            "settings": job.settings,
            "wanted": job.wanted,
            "inputs": {path.name: hash_file(path) for path in job.inputs},
            "seconds": time.time() - began,
            "versions": list_versions(),
        }
        content = json.dumps(record, indent=1).encode()
        write_atomically(job.record_file, lambda stream: stream.write(content))
        self._report(job)

    def _report(self, job: Job, reason: str = "") -> None:
        with self._lock:
            self._done += not reason
            if reason:
                self.failed[job.title] = reason
            state = f"FAILED, {reason}" if reason else "done"
            if job.record_file.is_file() and not reason:
                seconds = json.loads(job.record_file.read_bytes())["seconds"]
                state = f"done in {format_duration(seconds)}"
            print(f"[{self._done}/{self._total}] {job.title}: {state}", flush=True)
            write_report(self._comparison, self._rows, self.failed)


def _save_initialized(row: Row) -> None:
    """Saves the objective's backbone as initialized under the seed of the row."""
    cfg = row.objective.cfg
    with preserved_randomness():
        torch.manual_seed(row.seed)
        backbone = build_bare_backbone(cfg)
    state = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    # The iteration before the first one: no image was seen.
    info = WeightsInfo.from_config(cfg, iteration=-1, commit=find_commit())
    row.weights.parent.mkdir(parents=True, exist_ok=True)
    save_weights(str(row.weights), state, info)


def _end_with_parent() -> None:
    """Has the kernel end this process with its parent, even if that is killed."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
