# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the planned commands of a comparison of objectives and writes its tables.

Each command can resume, so a repeated comparison continues where it stopped.
"""

import json
import math
import os
import shlex
import statistics
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import info_of
from qbheat_det.config import load_config
from qbheat_det.core.environment import find_commit, list_versions
from qbheat_det.core.figures import to_json
from qbheat_det.core.files import file_lock, write_atomically

from .comparison_plan import WEIGHTS, Comparison, Job, Row, list_rows
from .run import read_metrics

_LOG_LINES = 12  # number of log lines that are shown for a failed job
_COSTS = ("images seen", "minutes")

Summary = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By objective and measure: "mean", "deviation" (unbiased; nan for one seed), "values" by seed."""


def compare(comparison: Comparison, *, jobs: int = 1) -> tuple[str, dict[str, str]]:
    """Runs the missing jobs, up to ``jobs`` of them in parallel.

    Returns the tables, and the error messages of failed jobs by title.

    Raises:
        UserError: data or a config is invalid, or the folder has results of different settings.
    """
    rows = list_rows(comparison)
    for row in rows:
        for job in row.jobs:
            job.is_done()  # raises errors before the first job runs
    waiting = f"waiting for another comparison in '{comparison.output_dir}'"
    with file_lock(comparison.output_dir / ".lock", waiting):
        failed = _run_rows(comparison, rows, jobs)
        return write_report(comparison, rows, failed), failed


def _run_rows(comparison: Comparison, rows: Sequence[Row], jobs: int) -> dict[str, str]:
    """Runs rows in parallel, and the jobs of a row in sequence. Returns failures by title."""
    failed: dict[str, str] = {}
    lock = threading.Lock()
    threads = os.environ.get("OMP_NUM_THREADS", str((os.cpu_count() or 1) // jobs or 1))

    def run_row(row: Row) -> None:
        reason, has_run = "", False
        for job in row.jobs:
            if reason:
                reason = "needs the job before it, which failed"
            elif has_run or not job.is_done():  # after a job ran, later jobs of the row are stale
                has_run = True
                print(f"{job.title}: started", flush=True)
                reason = _run_job(job, threads)
            with lock:
                if reason:
                    failed[job.title] = reason
                print(f"{job.title}: {f'FAILED, {reason}' if reason else 'done'}", flush=True)
                write_report(comparison, rows, failed)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(run_row, row) for row in rows]):
                future.result()
        except BaseException:  # Ctrl-C also stops the running commands
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _run_job(job: Job, threads: str) -> str:
    """Runs a command and writes its record. Returns an error message, or "" on success."""
    job.folder.mkdir(parents=True, exist_ok=True)
    log_file = job.folder / f"{job.stage}.log"
    env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with open(log_file, "ab") as log:
        log.write(f"\n$ {shlex.join(job.command)}\n".encode())
        log.flush()
        start = log.tell()
        code = subprocess.run(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, check=False
        ).returncode
    if code:
        text = log_file.read_bytes()[start:].decode(errors="replace")
        lines = [line.rpartition("\r")[2] for line in text.splitlines()[-_LOG_LINES:]]
        return f"exit code {code}; the end of {log_file}:\n    " + "\n    ".join(lines)
    record = {"command": job.command, "settings": job.settings, "versions": list_versions()}
    write_atomically(job.record_file, json.dumps(to_json(record), indent=1).encode())
    return ""


def write_report(comparison: Comparison, rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """Writes ``comparison.json`` and ``comparison.md``. Returns the tables in Markdown."""
    setting, entries = None, []
    for row in rows:
        if (path := row.folder / "probes" / "rows.json").is_file():
            found = json.loads(path.read_bytes())
            setting = found["setting"]
            entries += [{**entry, "series": row.objective.name} for entry in found["rows"]]
    summary = summarize([(row, measure_row(comparison, row)) for row in rows])
    content = {
        "objectives": {one.name: one.config_file for one in comparison.objectives},
        "images": list(map(len, comparison.images)),
        "seeds": comparison.seeds,
        "epochs": comparison.epochs,
        "opts": comparison.opts,
        "commit": find_commit(),
        # The figure "probes" reads these in the format of tools/probe_backbone.py.
        "setting": setting,
        "rows": entries,
        "summary": summary,
        "failed": failed,
    }
    text = render_tables(comparison, summary, failed)
    for suffix, written in {"json": json.dumps(to_json(content), indent=1), "md": text}.items():
        write_atomically(comparison.output_dir / f"comparison.{suffix}", written.encode())
    return text


def measure_row(comparison: Comparison, row: Row) -> dict[str, float]:
    """Returns the top-1 of each probe in percent, and the costs, of the finished jobs of a row."""
    done = {job.stage for job in row.jobs if job.record_file.is_file()}
    found: dict[str, float] = {}
    if "probes" in done:
        for entry in json.loads((row.folder / "probes" / "rows.json").read_bytes())["rows"]:
            if entry["probe"] in comparison.probes and entry["top1"] is not None:
                suffix = "" if entry["recalibrated"] else ", BN as trained"
                found[{"knn": "kNN"}.get(entry["probe"], entry["probe"]) + suffix] = entry["top1"]
    if "pretraining" in done:
        folder = row.folder / "pretraining"
        info = info_of(str(folder / WEIGHTS))
        batch = load_config(folder / "config.yaml").SOLVER.IMS_PER_BATCH
        found["images seen"] = float((info.iteration + 1 if info else 0) * batch)
        seconds, end = 0.0, 0
        for record in read_metrics(folder / "metrics.json"):
            if "time" in record:
                seconds += float(record["time"]) * (record["iteration"] + 1 - end)
                end = record["iteration"] + 1
        found["minutes"] = seconds / 60
    return found


def summarize(measured: Sequence[tuple[Row, Mapping[str, float]]]) -> Summary:
    """Returns mean and standard deviation over seeds, for each objective and measure."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for row, own in measured:
        for title, value in own.items():
            entry = summary.setdefault(row.objective.name, {}).setdefault(title, {"values": {}})
            entry["values"][row.seed] = value
            values = list(entry["values"].values())
            entry["mean"] = statistics.fmean(values)
            entry["deviation"] = statistics.stdev(values) if len(values) > 1 else math.nan
    return summary


def render_tables(comparison: Comparison, summary: Summary, failed: Mapping[str, str]) -> str:
    """Returns the table of results and costs in Markdown."""
    train, val = map(len, comparison.images)
    titles = [k for k in dict.fromkeys(k for own in summary.values() for k in own)
              if k not in _COSTS]  # fmt: skip
    rows = [[name, *(_format(own.get(title)) for title in (*titles, *_COSTS))]
            for name, own in summary.items()]  # fmt: skip
    headers = ["objective", *(f"{title}, %" for title in titles), *_COSTS]
    return "\n\n".join([
        "# Pre-training objectives, compared by probes of the frozen encoder",
        f"Pre-training: {comparison.epochs:g} epochs of {train:,} images, seeds "
        f"{', '.join(map(str, comparison.seeds))}. Probes: the same training images, "
        f"{val:,} validation images." + (f" Failed: {', '.join(failed)}." if failed else ""),
        tabulate(rows, headers, tablefmt="github", disable_numparse=True),
        "Mean ± standard deviation over seeds (number of seeds). BatchNorm's statistics are "
        f"estimated on {comparison.num_recalibrated:,} whole training images, except in columns "
        "'BN as trained'. Minutes are the time of all steps.",
    ]) + "\n"  # fmt: skip


def _format(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "-"
    if math.isnan(spread["deviation"]):
        return f"{spread['mean']:,.2f} (one seed)"
    return f"{spread['mean']:,.2f} ± {spread['deviation']:.2f} ({len(spread['values'])})"
