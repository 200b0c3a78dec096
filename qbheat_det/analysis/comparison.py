# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs a comparison of objectives, which a repeated call continues, and writes its tables."""

import ctypes
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import WeightsInfo, info_of, save_weights
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import to_json
from qbheat_det.core.files import file_lock, hash_file, write_atomically
from qbheat_det.core.seeding import preserved_randomness
from qbheat_det.core.versions import find_commit, list_versions
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .comparison_plan import RANDOM, Comparison, Job, Row, list_rows
from .run import read_metrics

_LOG_LINES = 12  # of a job that failed
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_COSTS = ("images seen", "ms an image", "minutes")

Summary = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By objective and measure: "mean", "deviation" (n - 1; nan of one) and "values" by seed."""


def compare(comparison: Comparison, *, jobs: int = 1) -> tuple[str, dict[str, str]]:
    """Runs the jobs that are not done, several at once, and rewrites the report after each.

    Returns the tables, and the reason of each job that failed, by title. Raises a ``UserError`` if
    data or a config is not valid, or the folder has results of other settings.
    """
    rows = list_rows(comparison)
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
    """Whether the job has a complete result; a ``UserError`` if it is of other settings."""
    if not job.record_file.is_file():
        return False
    try:
        record = json.loads(job.record_file.read_text(encoding="utf-8"))
        old, missing = dict(record["settings"]), set(job.wanted) - set(record["wanted"])
        inputs = dict(record["inputs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{job.record_file}' is not a result of a comparison") from error
    # Keys that only one of them has come from another version, and have their defaults.
    changed = [f"{key} {old[key]} -> {value}" for key, value in to_json(job.settings).items()
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
            reason = f"needs '{missing[0]}', whose job failed" if missing else ""
            if not missing and not is_done(job):
                reason = self._run_job(job)
            with self._lock:
                if self._stopped:
                    return
                if reason:
                    self.failed[job.title] = reason
                print(f"{job.title}: {f'FAILED, {reason}' if reason else 'done'}", flush=True)
                write_report(self._comparison, self._rows, self.failed)

    def _run_job(self, job: Job) -> str:
        """Runs a command and writes its record; returns the reason if it fails."""
        job.folder.mkdir(parents=True, exist_ok=True)
        began = time.time()
        threads = os.environ.get("OMP_NUM_THREADS", str((os.cpu_count() or 1) // self._jobs or 1))
        with open(job.log_file, "ab") as log:
            log.write(f"\n$ {shlex.join(job.command)}\n".encode())
            log.flush()
            start = log.tell()
            with self._lock:
                if self._stopped:
                    return "stopped"
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
        if code:
            text = job.log_file.read_bytes()[start:].decode(errors="replace")
            lines = [line.rpartition("\r")[2] for line in text.splitlines()[-_LOG_LINES:]]
            return f"exit code {code}; the end of {job.log_file}:\n    " + "\n    ".join(lines)
        record = {
            "command": job.command,
            "settings": job.settings,
            "wanted": job.wanted,
            "inputs": {path.name: hash_file(path) for path in job.inputs},
            "seconds": time.time() - began,
            "versions": list_versions(),
        }
        write_atomically(job.record_file, json.dumps(to_json(record), indent=1).encode())
        return ""


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


def write_report(comparison: Comparison, rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """Writes ``comparison.json`` and ``comparison.md``; returns the tables."""
    probes = [(row, json.loads(path.read_bytes())) for row in rows
              if (path := row.folder / "probes" / "rows.json").is_file()]  # fmt: skip
    summary = summarize([(row, measure_row(comparison, row)) for row in rows])
    content = {
        "objectives": {one.name: one.config_file for one in comparison.objectives},
        "images": {name: len(records) for name, records in comparison.images.items()},
        **{key: getattr(comparison, key) for key in ("seeds", "epochs", "opts")},
        "commit": find_commit(),
        "versions": list_versions(),
        "setting": probes[0][1]["setting"] if probes else None,
        # As tools/probe_backbone.py writes them, for the figure "probes".
        "rows": [{**entry, "series": row.objective.name}
                 for row, own in probes for entry in own["rows"]],
        "summary": summary,
        "failed": failed,
    }  # fmt: skip
    text = render_tables(comparison, summary, failed)
    files = {"json": json.dumps(to_json(content), indent=1).encode(), "md": text.encode()}
    for suffix, data in files.items():
        path = comparison.output_dir / f"comparison.{suffix}"
        write_atomically(path, data)
    return text


def measure_row(comparison: Comparison, row: Row) -> dict[str, float]:
    """Returns top-1 of each probe in percent and the costs of a row, those that were measured."""
    done = {job.stage for job in row.jobs if job.record_file.is_file()}
    found: dict[str, float] = {}
    if "probes" in done:
        for entry in json.loads((row.folder / "probes" / "rows.json").read_bytes())["rows"]:
            if entry["probe"] in comparison.probes and entry["top1"] is not None:
                suffix = "" if entry["recalibrated"] else ", BN as trained"
                found[{"knn": "kNN"}.get(entry["probe"], entry["probe"]) + suffix] = entry["top1"]
    if "pretraining" in done:
        folder, info = row.weights.parent, info_of(str(row.weights))
        batch = load_config(folder / "config.yaml").SOLVER.IMS_PER_BATCH
        found["images seen"] = float((info.iteration + 1 if info else 0) * batch)
        log = folder / "metrics.json"
        records = [one for one in read_metrics(log) if "time" in one] if log.is_file() else []
        if records:
            ends = [record["iteration"] + 1 for record in records]
            steps = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            times = [float(record["time"]) for record in records]
            found["ms an image"] = 1000 * statistics.median(times) / batch
            found["minutes"] = sum(t * n for t, n in zip(times, steps, strict=True)) / 60
    return found


def summarize(measured: Sequence[tuple[Row, Mapping[str, float]]]) -> Summary:
    """Returns mean and spread over seeds of each measure of each objective."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for row, own in measured:
        for title, value in own.items():
            values.setdefault(row.objective.name, {}).setdefault(title, {})[row.seed] = value
    return {
        name: {
            title: {
                "mean": statistics.fmean(by_seed.values()),
                "deviation": statistics.stdev(by_seed.values()) if len(by_seed) > 1 else math.nan,
                "values": by_seed,
            }
            for title, by_seed in own.items()
        }
        for name, own in values.items()
    }


def render_tables(comparison: Comparison, summary: Summary, failed: Mapping[str, str]) -> str:
    """Returns the table of results and costs in Markdown."""
    images = {name: len(records) for name, records in comparison.images.items()}
    titles = [k for k in dict.fromkeys(k for own in summary.values() for k in own)
              if k not in _COSTS]  # fmt: skip
    rows = [[name, *(_format(own.get(title)) for title in (*titles, *_COSTS))]
            for name, own in summary.items()]  # fmt: skip
    headers = ["objective", *(f"{title}, %" for title in titles), *_COSTS]
    shares = [own[title]["mean"] / 100 for own in summary.values() for title in titles
              if title in own]  # fmt: skip
    errors = [100 * math.sqrt(p * (1 - p) / images["val"]) for p in shares] or [0.0]
    return "\n\n".join([
        "# Objectives of pre-training, one frozen encoder each",
        f"{comparison.epochs:g} epochs of {images['train']:,} images; seeds "
        f"{', '.join(map(str, comparison.seeds))}. Probes are trained on the same images and "
        f"classify {images['val']:,}."
        + (f" Failed: {', '.join(failed)}." if failed else ""),
        tabulate(rows, headers, tablefmt="github", disable_numparse=True),
        "Mean ± standard deviation over seeds (their number). BatchNorm's statistics are estimated "
        f"on {comparison.num_recalibrated:,} whole training images, unless a column says "
        f"otherwise. The binomial standard error of an accuracy over the {images['val']:,} images "
        f"is {min(errors):.2f} to {max(errors):.2f} points. Minutes are those of all steps.",
    ]) + "\n"  # fmt: skip


def _format(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "-"
    if math.isnan(spread["deviation"]):
        return f"{spread['mean']:,.2f} (one seed)"
    return f"{spread['mean']:,.2f} ± {spread['deviation']:.2f} ({len(spread['values'])})"
