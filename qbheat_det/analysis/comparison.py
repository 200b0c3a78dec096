# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the planned commands of a comparison of objectives and writes its tables.

Each command resumes its own work, so a repeated comparison continues where it stopped.
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

import torch
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import WeightsInfo, info_of, save_weights
from qbheat_det.config import load_config
from qbheat_det.core.environment import find_commit, list_versions
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import to_json
from qbheat_det.core.files import file_lock, write_atomically
from qbheat_det.core.seeding import preserved_randomness
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

from .comparison_plan import RANDOM, Comparison, Job, Row, list_rows
from .run import read_metrics

_LOG_LINES = 12  # shown of a failed job
_COSTS = ("images seen", "ms an image", "minutes")

Summary = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By objective and measure: "mean", "deviation" (n - 1; nan for one seed), "values" by seed."""


def is_done(job: Job) -> bool:
    """Checks whether a job's command has succeeded.

    Raises:
        UserError: if it succeeded with other settings.
    """
    if not job.record_file.is_file():
        return False
    try:
        record = json.loads(job.record_file.read_text(encoding="utf-8"))
        command, old = list(record["command"]), dict(record["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{job.record_file}' is not a result of a comparison") from error
    # A key that the record lacks is of a newer version of the package and has its default.
    changed = [f"{key} {old[key]} -> {value}" for key, value in to_json(job.settings).items()
               if old.get(key, value) != value]  # fmt: skip
    if changed:
        raise UserError(
            f"'{job.record_file}' has other settings: {'; '.join(changed)}. Undo the change, use "
            f"another --output, or remove the file and '{job.stage}' beside it"
        )
    return command == job.command


def compare(comparison: Comparison, *, jobs: int = 1) -> tuple[str, dict[str, str]]:
    """Runs the missing jobs, up to ``jobs`` at once.

    Returns the tables, and the reason of each failed job by title.

    Raises:
        UserError: if data or a config is invalid, or the folder has results of other settings.
    """
    rows = list_rows(comparison)
    for row in rows:
        for job in row.jobs:
            is_done(job)  # raises before anything runs
    waiting = f"waiting for another comparison in '{comparison.output_dir}'"
    with file_lock(comparison.output_dir / ".lock", waiting):
        for row in rows:
            if row.objective.name == RANDOM and not row.weights.is_file():
                _save_initialized(row)
        failed = _run_rows(comparison, rows, jobs)
        return write_report(comparison, rows, failed), failed


def _run_rows(comparison: Comparison, rows: Sequence[Row], jobs: int) -> dict[str, str]:
    """Runs rows in threads and the jobs of a row one after another; returns failures by title."""
    failed: dict[str, str] = {}
    lock = threading.Lock()
    threads = os.environ.get("OMP_NUM_THREADS", str((os.cpu_count() or 1) // jobs or 1))

    def run_row(row: Row) -> None:
        reason, has_run = "", False
        for job in row.jobs:
            if reason:
                reason = "needs the job before it, which failed"
            elif has_run or not is_done(job):  # a new result makes later ones of the row stale
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
        except BaseException:  # Ctrl-C reaches the running commands too
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _run_job(job: Job, threads: str) -> str:
    """Runs a command and writes its record; returns the reason if it fails."""
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


def _save_initialized(row: Row) -> None:
    """Saves the objective's backbone as initialized under the row's seed."""
    cfg = row.objective.cfg
    with preserved_randomness():
        torch.manual_seed(row.seed)
        backbone = build_bare_backbone(cfg)
    state = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    info = WeightsInfo.from_config(cfg, iteration=-1, commit=find_commit())  # has seen no image
    row.weights.parent.mkdir(parents=True, exist_ok=True)
    save_weights(str(row.weights), state, info)


def write_report(comparison: Comparison, rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """Writes ``comparison.json`` and ``comparison.md``; returns the tables."""
    probes = [(row, json.loads(path.read_bytes())) for row in rows
              if (path := row.folder / "probes" / "rows.json").is_file()]  # fmt: skip
    summary = summarize([(row, measure_row(comparison, row)) for row in rows])
    content = {
        "objectives": {one.name: one.config_file for one in comparison.objectives},
        "images": {name: len(records) for name, records in comparison.images.items()},
        "seeds": comparison.seeds,
        "epochs": comparison.epochs,
        "opts": comparison.opts,
        "commit": find_commit(),
        # In the format of tools/probe_backbone.py, for the figure "probes".
        "setting": probes[0][1]["setting"] if probes else None,
        "rows": [{**entry, "series": row.objective.name}
                 for row, own in probes for entry in own["rows"]],
        "summary": summary,
        "failed": failed,
    }  # fmt: skip
    text = render_tables(comparison, summary, failed)
    files = {"json": json.dumps(to_json(content), indent=1), "md": text}
    for suffix, written in files.items():
        write_atomically(comparison.output_dir / f"comparison.{suffix}", written.encode())
    return text


def measure_row(comparison: Comparison, row: Row) -> dict[str, float]:
    """Returns the top-1 of each probe in percent and the costs of a row's finished jobs."""
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
    """Returns the mean and spread over seeds of each measure of each objective."""
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
    return "\n\n".join([
        "# Pre-training objectives, compared by probes of the frozen encoder",
        f"Pre-training: {comparison.epochs:g} epochs of {images['train']:,} images, seeds "
        f"{', '.join(map(str, comparison.seeds))}. Probes: the same training images, "
        f"{images['val']:,} validation images."
        + (f" Failed: {', '.join(failed)}." if failed else ""),
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
