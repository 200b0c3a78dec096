# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tests and measures everything on a CUDA GPU, within eight minutes: `make gpu`.

Writes ``output/gpu/report.json`` and the tables ``report.md`` after each job, so a stop loses
nothing. Each job has its own process and time limit. If a job fails, the next one still runs. A
repeated call skips the jobs that are done.

  a  the tests that are marked "gpu"
  b  training, evaluation, resuming, prediction, export and compiling of each model, against the CPU
  c  images per second and memory of training and prediction, beside other models
  d  reading JPEG files, beside the steps that need them
  e  an exported file in onnxruntime-gpu

python -m benchmarks.gpu_report [--only b c] [--fresh] [--rehearse] [--minutes 8]
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_rows import FAILED, OK, SKIPPED, format_value
from benchmarks.timing import ROOT, environment, write_json
from qbheat_det.core.environment import find_commit
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.files import write_atomically

OUTPUT = ROOT / "output" / "gpu"
PARTS = "abcde"
DONE = "done"
_ERROR_LENGTH = 4000  # characters of output that the report keeps


@dataclass(frozen=True)
class Job:
    """A process that writes rows.

    Attributes:
        name: name in the report.
        part: the part that it belongs to; "" if it always runs.
        command: arguments of Python, before ``--rows FILE`` or ``--gpu-rows FILE``.
        seconds: time limit.
        is_timed: whether it measures time, and therefore runs alone.
    """

    name: str
    part: str
    command: Sequence[str]
    seconds: float
    is_timed: bool = True


def list_jobs(rehearse: bool) -> list[Job]:
    """Returns all jobs. A rehearsal runs a few tests of each job, on the CPU."""
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.parent.name != "gpu" and "mark.gpu" in path.read_text("utf-8")
    ]
    # Names of tests in tests/gpu for each job, and those of the rehearsal.
    models = {
        "retinanet, fcos, rcnn": (
            "training and (retinanet or fcos or rcnn)",
            "training and retinanet and cached",
        ),
        "mf_detr": ("training and mf_detr", "training and mf_detr and cached"),
        "pre-training, classifiers": (
            "training and not retinanet and not fcos and not rcnn and not mf_detr",
            "training and qb_heat and float16",
        ),
        "prediction, export": (
            "not training and not compiled and not test_export_of",
            "test_features or (test_prediction and retinanet and plain)",
        ),
        "export": ("test_export_of", "test_features"),
        "torch.compile": ("compiled and not training", "gradients"),
    }
    pytest = ["-m", "pytest", "-q", "-p", "benchmarks.gpu_rows"]
    jobs = [measurement(["machine"], "", 60)]
    jobs.append(Job("tests", "a", [*pytest, "-m", "gpu", *marked], 120, is_timed=False))
    if rehearse:  # few processes, as each one takes seconds to start
        names = " or ".join(f"({rehearsed})" for _, rehearsed in models.values())
        models = {"models": (names, names)}
    for name, (names, _) in models.items():
        jobs.append(Job(name, "b", [*pytest, "-k", names, "tests/gpu"], 180, is_timed=False))
    speeds = {"pretraining": 90, "detector_training": 120, "inference": 90}
    if rehearse:
        jobs.append(measurement(list(speeds), "c", sum(speeds.values())))
    else:
        jobs += [measurement([name], "c", seconds) for name, seconds in speeds.items()]
    jobs.append(measurement(["data_path"], "d", 110))
    jobs.append(measurement(["exported"], "e", 90))
    return jobs


def measurement(names: Sequence[str], part: str, seconds: float) -> Job:
    """Returns a process that runs jobs of ``gpu_jobs.py``."""
    return Job(", ".join(names), part, ["-m", "benchmarks.gpu_jobs", *names], seconds)


class Report:
    """Results by job, in a JSON file and in Markdown."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        """Reads the report of an earlier call, unless ``fresh``.

        Raises:
            UserError: the file of an earlier call cannot be read.
        """
        self.folder = folder
        self.path = folder / "report.json"
        self.jobs: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if self.path.is_file() and not fresh:
            try:
                self.jobs = dict(json.loads(self.path.read_text("utf-8"))["jobs"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path} is not a report: start over with --fresh") from error

    def is_done(self, job: Job) -> bool:
        """Whether an earlier call finished a job without a failure."""
        return self.jobs.get(job.name, {}).get("state") == DONE

    def add(self, job: Job, result: Mapping[str, Any]) -> None:
        """Adds the result of a job, and writes both files."""
        with self._lock:
            self.jobs[job.name] = {"part": job.part, **result}
            content = {"commit": find_commit(), "machine": environment(), "jobs": self.jobs}
            write_json(self.path, content)
            write_atomically(self.folder / "report.md", format_report(content).encode())


def format_report(content: Mapping[str, Any]) -> str:
    """Returns the tables of all jobs in Markdown."""
    lines = [f"Commit {content['commit']}; {content['machine']}.", ""]
    for name, job in content["jobs"].items():
        title = f"{job['part']}: {name}".removeprefix(": ")
        lines += [f"## {title}", "", f"{job['state']}, {job['seconds']:.0f} s", ""]
        if job["error"]:
            lines += ["```", job["error"][-800:].strip(), "```", ""]
        columns: dict[str, None] = {}
        for row in job["rows"]:
            columns.update(dict.fromkeys(row["values"]))
        rows = [row for row in job["rows"] if row["outcome"] != SKIPPED]
        reasons = Counter(row["error"] for row in job["rows"] if row["outcome"] == SKIPPED)
        for reason, number in reasons.items():
            lines += [f"{number} skipped: {reason}", ""]
        if not rows:
            continue
        lines.append(f"| | outcome | {' | '.join(columns)} |".replace("|  |", "|"))
        lines.append("| --- " * (2 + len(columns)) + "|")
        for row in rows:
            cells = [row["name"].replace("|", " "), describe_outcome(row)]
            for column in columns:
                value = row["values"].get(column, "")
                cells.append(format_value(value))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def describe_outcome(row: Mapping[str, Any]) -> str:
    """Returns the outcome, and the last line of an error."""
    if not row["error"]:
        return str(row["outcome"])
    last = row["error"].strip().splitlines()[-1][:120].replace("|", " ")
    return f"{row['outcome']}: {last}"


def run_job(job: Job, *, rehearse: bool, seconds: float) -> dict[str, Any]:
    """Runs a job in a process of its own, for at most ``seconds``; returns its result."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not job.is_timed:  # several run at once
        env.setdefault("OMP_NUM_THREADS", "2")
    if rehearse:
        env["GPU_REHEARSAL"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        is_test = "pytest" in job.command
        command = [sys.executable, *job.command, "--gpu-rows" if is_test else "--rows", str(rows)]
        if rehearse and not is_test:
            command.append("--rehearse")
        output = Path(folder) / "output.txt"
        start = time.perf_counter()
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers can be ended with it
            )
            state = DONE
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                state = f"stopped after {seconds:.0f} s"
                code = 0
            finally:
                end_group(process)
        found = []
        if rows.is_file():
            found = json.loads(rows.read_text("utf-8"))
        error = ""
        if state == DONE and (code or any(row["outcome"] == FAILED for row in found)):
            state = FAILED
        if state != DONE:
            error = output.read_text("utf-8", errors="replace")[-_ERROR_LENGTH:]
        taken = time.perf_counter() - start
        return {"state": state, "seconds": taken, "rows": found, "error": error}


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and its workers, which ignore gentler signals."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_jobs(
    jobs: Sequence[Job],
    report: Report,
    *,
    rehearse: bool,
    minutes: float,
    at_once: int,
    run: Callable[..., dict[str, Any]] = run_job,
) -> None:
    """Runs the jobs that are not done: first tests, several at once, then measurements."""
    end = time.perf_counter() + 60 * minutes
    patience = 1
    if rehearse:  # CPUs are slow, and nothing is measured
        patience = 3
        jobs = [replace(job, is_timed=False) for job in reversed(jobs)]  # the longest first

    def run_one(job: Job) -> None:
        seconds = min(job.seconds * patience, end - time.perf_counter())
        if seconds < 1:
            result = {"state": "not started: no time was left", "seconds": 0.0, "rows": []}
            report.add(job, {**result, "error": ""})
        else:
            report.add(job, run(job, rehearse=rehearse, seconds=seconds))
        done = report.jobs[job.name]
        counts = [row["outcome"] for row in done["rows"]]
        summary = f"{counts.count(OK)} of {len(counts)} ok"
        print(
            f"{job.part:1} {job.name}: {done['state']}, {done['seconds']:.0f} s, {summary}",
            flush=True,
        )

    left = []
    for job in jobs:
        if report.is_done(job):
            print(f"{job.part:1} {job.name}: done before")
        else:
            left.append(job)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run_one, [job for job in left if not job.is_timed]))
    for job in left:
        if job.is_timed:
            run_one(job)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the flags and runs the jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(PARTS), metavar="PART", help="a to e")
    parser.add_argument("--fresh", action="store_true", help="run again what is done")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny images")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit (default: 8)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args(argv)
    parts = [part for word in args.only for part in word.split(",")]
    for part in parts:
        if part not in tuple(PARTS):
            raise UserError(f"--only {part}: there are the parts {', '.join(PARTS)}")
    if not args.rehearse and not torch.cuda.is_available():
        raise UserError("PyTorch sees no CUDA GPU: --rehearse runs tiny sizes on the CPU")
    folder = args.output
    if args.rehearse:
        folder /= "rehearsal"
    report = Report(folder, fresh=args.fresh)
    jobs = [job for job in list_jobs(args.rehearse) if job.part in ("", *parts)]
    at_once = min(8, max(1, (os.cpu_count() or 1) // 2))
    if args.rehearse:
        at_once = os.cpu_count() or 1
    run_jobs(jobs, report, rehearse=args.rehearse, minutes=args.minutes, at_once=at_once)
    print(f"written to {folder}")
    failed = [job.name for job in jobs if not report.is_done(job)]
    if failed:
        raise UserError(f"not done: {', '.join(failed)}; see {folder / 'report.md'}")


if __name__ == "__main__":
    main()
