# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The commands of ``qbheat compare``, which pre-train or probe. Each runs in its own process.

A repeated comparison skips finished commands, and an interrupted command resumes.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbheat_det.analysis.comparison import (
    PRETRAINING,
    PROBES,
    RANDOM,
    Comparison,
    Row,
    list_rows,
    write_report,
)
from qbheat_det.analysis.figures import to_json
from qbheat_det.config import load_config
from qbheat_det.config.loading import list_leaves
from qbheat_det.core.environment import list_versions
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

TOOLS = Path(__file__).resolve().parent
NUM_LOG_LINES = 12  # number of log lines that are shown for a failed job


@dataclass(frozen=True)
class Job:
    """The command of one stage (pre-training or probes) of a row of the comparison.

    ``settings`` are the values that determine its result. When the command has succeeded, it is
    written to ``record_file`` with its settings.
    """

    row: Row
    stage: str
    command: list[str]
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.row.objective.name} seed {self.row.seed} {self.stage}"

    @property
    def record_file(self) -> Path:
        return self.row.record_file(self.stage)

    def is_done(self) -> bool:
        """Returns whether the stage has succeeded with this command.

        Raises a ``UserError`` if it has succeeded with other settings.
        """
        if not self.row.is_finished(self.stage):
            return False
        try:
            record = json.loads(self.record_file.read_text(encoding="utf-8"))
            command = list(record["command"])
            old_settings = dict(record["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"'{self.record_file}' is not a result of a comparison") from error
        changed = []
        for key, value in to_json(self.settings).items():
            # A key that the record does not have was added in a newer version. It is ignored.
            if key in old_settings and old_settings[key] != value:
                changed.append(f"{key} {old_settings[key]} -> {value}")
        if changed:
            raise UserError(
                f"'{self.record_file}' has other settings: {'; '.join(changed)}. Undo the change, "
                f"use another --output, or remove the file and '{self.stage}' beside it"
            )
        return command == self.command

    def run(self) -> str:
        """Runs the command, and writes the record if it succeeds.

        Returns an error message, or "" on success.
        """
        self.row.folder.mkdir(parents=True, exist_ok=True)
        log_file = self.row.folder / f"{self.stage}.log"
        with open(log_file, "ab") as log:
            log.write(f"\n$ {shlex.join(self.command)}\n".encode())
            log.flush()
            process = subprocess.run(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
            )
        if process.returncode:
            lines = log_file.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
            end = "\n    ".join(lines)
            return f"exit code {process.returncode}; the end of {log_file}:\n    {end}"
        record = {"command": self.command, "settings": self.settings, "versions": list_versions()}
        write_atomically(self.record_file, json.dumps(to_json(record), indent=1).encode())
        return ""


def plan_row(comparison: Comparison, row: Row) -> list[Job]:
    """Returns the jobs of a row, in order of execution."""
    jobs = [plan_probes(comparison, row)]
    if PRETRAINING in row.stages:
        jobs.insert(0, plan_pretraining(comparison, row))
    return jobs


def plan_pretraining(comparison: Comparison, row: Row) -> Job:
    """Returns the job that runs ``tools/train_net.py``."""
    config_file = row.objective.config_file
    is_labelled = row.objective.cfg.INPUT.DATASET_MAPPER_NAME == "classify"
    opts = ["SOLVER.EPOCHS", str(float(comparison.epochs)), *comparison.opts]
    command = [sys.executable, str(TOOLS / "train_net.py"), "--config-file", config_file]
    command += ["--data" if is_labelled else "--images", comparison.train_folder]
    command += ["--output", str(row.folder / PRETRAINING), "--resume"]
    command += ["SEED", str(row.seed), *opts]
    if is_labelled:  # the probes have a validation set
        command += ["DATASETS.VAL_FRACTION", "0"]
    settings = dict(list_leaves(yaml.safe_load(load_config(config_file, opts).dump())))
    settings["contents"] = comparison.contents[0]
    return Job(row, PRETRAINING, command, settings)


def plan_probes(comparison: Comparison, row: Row) -> Job:
    """Returns the job that runs ``tools/probe_backbone.py``."""
    num_recalibrated = str(comparison.num_recalibrated)
    # The seed also determines the held-out training images, which are the same for all objectives.
    opts = ["SEED", str(row.seed)]
    if row.objective.name == RANDOM:
        encoder = ["--random", "--config-file", row.objective.config_file]
        opts += comparison.opts
    else:  # the config is in the weights
        encoder = ["--weights", str(row.weights)]
    command = [sys.executable, str(TOOLS / "probe_backbone.py"), *encoder]
    command += ["--recalibrate-bn", num_recalibrated, "--probes", *comparison.probes]
    command += ["--data", comparison.train_folder, "--val", comparison.val_folder]
    command += ["--json", str(row.probes_file), *opts]
    settings = {"contents": comparison.contents, "recalibrate_bn": num_recalibrated}
    return Job(row, PROBES, command, settings)


def compare(comparison: Comparison) -> tuple[str, dict[str, str]]:
    """Runs the jobs that are not done. If pre-training fails, its probes are skipped.

    Returns:
        The tables in Markdown, and the error messages of failed or skipped jobs by title.

    Raises:
        UserError: data or a config is invalid, or the folder has results of different settings.
    """
    rows = list_rows(comparison)
    jobs_by_row = [plan_row(comparison, row) for row in rows]
    for jobs in jobs_by_row:
        for job in jobs:
            job.is_done()  # raises an error before the first job runs
    failed: dict[str, str] = {}
    for jobs in jobs_by_row:
        reason = ""  # why the last job of the row failed or was skipped
        has_run = False
        for job in jobs:
            if reason:
                reason = "needs the job before it, which failed"
            elif has_run or not job.is_done():
                # If pre-training ran again, earlier results of its probes are outdated.
                has_run = True
                print(f"{job.title}: started", flush=True)
                reason = job.run()
            if reason:
                failed[job.title] = reason
                print(f"{job.title}: FAILED, {reason}", flush=True)
            else:
                print(f"{job.title}: done", flush=True)
            tables = write_report(comparison, rows, failed)
    return tables, failed
