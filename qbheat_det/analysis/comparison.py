# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compares pre-training objectives by probes of the frozen encoder.

A comparison consists of commands: for each seed and objective, one pre-trains and one probes. Each
command can resume, so a repeated comparison continues where it stopped.
"""

import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import info_of
from qbheat_det.config import get_config_path, load_config
from qbheat_det.config.loading import list_leaves
from qbheat_det.core.environment import find_commit, list_versions
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import fingerprint_records, load_class_folders
from qbheat_det.probing.features import count_images_seen
from qbheat_det.tasks import DETECTION, find_task

from .figures import to_json
from .run import read_metrics

RANDOM = "random"
WEIGHTS = "model_final.safetensors"
_LOG_LINES = 12  # number of log lines that are shown for a failed job
_COSTS = ("images seen", "minutes")

Summary = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Summary[objective][measure] has "mean" and "deviation" over seeds, and "values" by seed."""


@dataclass(frozen=True)
class Objective:
    """A pre-training objective: its name, its config file, and the config with overrides."""

    name: str
    config_file: str
    cfg: CfgNode


@dataclass(frozen=True)
class Comparison:
    """Settings of a comparison on class folders.

    Pre-training runs for ``epochs`` on ``train_folder``, and the probes are trained on the same
    images. ``tools`` is the folder of the scripts. ``opts`` overrides the config of each objective.
    """

    objectives: Sequence[Objective]
    seeds: Sequence[int]
    epochs: float
    train_folder: str
    val_folder: str
    output_dir: Path
    tools: Path
    probes: Sequence[str] = ()
    num_recalibrated: int = 1024
    opts: Sequence[str] = ()

    @cached_property
    def images(self) -> list[list[dict[str, Any]]]:
        """The training and validation records. Raises a ``UserError`` if a folder has none."""
        return list(load_class_folders(self.train_folder, self.val_folder))

    @cached_property
    def contents(self) -> list[int]:
        """A checksum of the training images, and one of the validation images."""
        return [fingerprint_records(records) for records in self.images]


@dataclass(frozen=True)
class Job:
    """A command that can resume. ``settings`` are the values that determine its result.

    When the command has succeeded, ``folder/<stage>.json`` is written.
    """

    title: str
    stage: str
    folder: Path
    command: list[str]
    settings: Mapping[str, Any]

    @property
    def record_file(self) -> Path:
        return self.folder / f"{self.stage}.json"

    def is_done(self) -> bool:
        """Whether the command has succeeded. Raises a ``UserError`` if it had other settings."""
        if not self.record_file.is_file():
            return False
        try:
            record = json.loads(self.record_file.read_text(encoding="utf-8"))
            command, old = list(record["command"]), dict(record["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"'{self.record_file}' is not a result of a comparison") from error
        # Keys that are missing in the record were added in a newer version. They are ignored.
        changed = [f"{key} {old[key]} -> {value}" for key, value in to_json(self.settings).items()
                   if old.get(key, value) != value]  # fmt: skip
        if changed:
            raise UserError(
                f"'{self.record_file}' has other settings: {'; '.join(changed)}. Undo the change, "
                f"use another --output, or remove the file and '{self.stage}' beside it"
            )
        return command == self.command


@dataclass(frozen=True)
class Row:
    """The jobs of one objective and seed, in order of execution."""

    objective: Objective
    seed: int
    folder: Path
    jobs: list[Job]


def load_objectives(wanted: Sequence[str], opts: Sequence[str] = ()) -> list[Objective]:
    """Loads objectives by name or config file. By default, loads all built-in ones, "random" first.

    Raises:
        UserError: an objective is unknown, repeated or has an invalid config, or two objectives
            have different encoders or image sizes.
    """
    folder = Path(get_config_path("objectives/Base-Objective.yaml")).parent
    files = {path.stem: str(path) for path in sorted(folder.glob("*.yaml"))}
    known = {RANDOM: files.pop("Base-Objective"), **files}
    objectives = [_load_objective(word, known, opts) for word in wanted or known]
    names = [objective.name for objective in objectives]
    if len(set(names)) < len(names):
        raise UserError(f"--objectives repeats a name: {', '.join(names)}")
    first = _list_encoder_keys(objectives[0].cfg)
    for objective in objectives:
        other = _list_encoder_keys(objective.cfg)
        for key, value in first.items():
            if other.get(key) != value:
                raise UserError(
                    f"'{objectives[0].name}' and '{objective.name}' differ in {key} ({value} and "
                    f"{other.get(key)}): set it on the command line for all objectives"
                )
    return objectives


def _load_objective(word: str, known: Mapping[str, str], opts: Sequence[str]) -> Objective:
    own = word.endswith((".yaml", ".yml"))
    name, path = (Path(word).stem, word) if own else (word, known.get(word, ""))
    if not path or (own and name == RANDOM):  # this name is reserved for the untrained encoder
        raise UserError(f"no objective '{word}': use {', '.join(known)}, or a config file (.yaml)")
    cfg = load_config(path, opts)
    if find_task(cfg) is DETECTION:
        mapper = cfg.INPUT.DATASET_MAPPER_NAME
        raise UserError(f"'{path}' does not pre-train: INPUT.DATASET_MAPPER_NAME is '{mapper}'")
    return Objective(name, path, cfg)


def _list_encoder_keys(cfg: CfgNode) -> dict[str, Any]:
    """Returns the keys that define the encoder and its image size."""
    wanted = ("INPUT.PRETRAIN.SIZE", "MODEL.BACKBONE.", "MODEL.MOBILE_FORMER.")
    return {key: value for key, value in list_leaves(cfg)
            if key.startswith(wanted) and not key.endswith(("DROP_PATH", "FREEZE_AT"))}  # fmt: skip


def list_rows(comparison: Comparison) -> list[Row]:
    """Returns all rows with their jobs: for each seed, one row per objective."""
    rows = []
    for seed in comparison.seeds:
        for objective in comparison.objectives:
            row = Row(objective, seed, comparison.output_dir / objective.name / f"seed{seed}", [])
            if objective.name != RANDOM:
                row.jobs.append(_plan_pretraining(comparison, row))
            row.jobs.append(_plan_probes(comparison, row))
            rows.append(row)
    return rows


def _plan_pretraining(comparison: Comparison, row: Row) -> Job:
    file, cfg = row.objective.config_file, row.objective.cfg
    is_labelled = cfg.INPUT.DATASET_MAPPER_NAME == "classify"
    opts = ["SOLVER.EPOCHS", str(float(comparison.epochs)), *comparison.opts]
    command = [
        *(sys.executable, str(comparison.tools / "train_net.py"), "--config-file", file),
        *("--data" if is_labelled else "--images", comparison.train_folder),
        *("--output", str(row.folder / "pretraining"), "--resume", "SEED", str(row.seed), *opts),
    ]
    if is_labelled:  # the probes have a validation set
        command += ["DATASETS.VAL_FRACTION", "0"]
    settings = dict(list_leaves(yaml.safe_load(load_config(file, opts).dump())))
    settings["contents"] = comparison.contents[0]
    title = f"{row.objective.name} seed {row.seed} pretraining"
    return Job(title, "pretraining", row.folder, command, settings)


def _plan_probes(comparison: Comparison, row: Row) -> Job:
    number = str(comparison.num_recalibrated)
    encoder = ["--weights", str(row.folder / "pretraining" / WEIGHTS)]
    opts = ["SEED", str(row.seed)]  # the same split of the training images for each objective
    if row.objective.name == RANDOM:
        encoder = ["--random", "--config-file", row.objective.config_file]
        opts += comparison.opts
    command = [
        *(sys.executable, str(comparison.tools / "probe_backbone.py"), *encoder),
        *("--recalibrate-bn", number, "--probes", *comparison.probes),
        *("--data", comparison.train_folder, "--val", comparison.val_folder),
        *("--json", str(row.folder / "probes/rows.json"), *opts),
    ]
    settings = {"contents": comparison.contents, "recalibrate_bn": number}
    title = f"{row.objective.name} seed {row.seed} probes"
    return Job(title, "probes", row.folder, command, settings)


def compare(comparison: Comparison) -> tuple[str, dict[str, str]]:
    """Runs the jobs that are not done. If pre-training fails, its probes are skipped.

    Returns the tables in Markdown, and error messages by the titles of failed or skipped jobs.

    Raises:
        UserError: data or a config is invalid, or the folder has results of different settings.
    """
    rows = list_rows(comparison)
    for row in rows:
        for job in row.jobs:
            job.is_done()  # raises errors before the first job runs
    failed: dict[str, str] = {}
    for row in rows:
        reason, has_run = "", False
        for job in row.jobs:
            if reason:
                reason = "needs the job before it, which failed"
            elif has_run or not job.is_done():  # after a job ran, later jobs of the row are stale
                has_run = True
                print(f"{job.title}: started", flush=True)
                reason = _run_job(job)
            if reason:
                failed[job.title] = reason
            print(f"{job.title}: {f'FAILED, {reason}' if reason else 'done'}", flush=True)
            tables = write_report(comparison, rows, failed)
    return tables, failed


def _run_job(job: Job) -> str:
    """Runs a command and writes its record. Returns an error message, or "" on success."""
    job.folder.mkdir(parents=True, exist_ok=True)
    log_file = job.folder / f"{job.stage}.log"
    with open(log_file, "ab") as log:
        log.write(f"\n$ {shlex.join(job.command)}\n".encode())
        log.flush()
        ended = subprocess.run(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    if ended.returncode:
        lines = log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"exit code {ended.returncode}; the end of {log_file}:\n    " + "\n    ".join(lines)
    record = {"command": job.command, "settings": job.settings, "versions": list_versions()}
    write_atomically(job.record_file, json.dumps(to_json(record), indent=1).encode())
    return ""


def write_report(comparison: Comparison, rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """Writes ``comparison.json`` and ``comparison.md``. Returns the tables in Markdown."""
    summary = summarize([(row, measure_row(comparison, row)) for row in rows])
    content = {
        "objectives": {one.name: one.config_file for one in comparison.objectives},
        "images": list(map(len, comparison.images)),
        "seeds": comparison.seeds,
        "epochs": comparison.epochs,
        "opts": comparison.opts,
        "commit": find_commit(),
        "summary": summary,
        "failed": failed,
    }
    text = render_tables(comparison, summary, failed)
    for suffix, written in {"json": json.dumps(to_json(content), indent=1), "md": text}.items():
        write_atomically(comparison.output_dir / f"comparison.{suffix}", written.encode())
    return text


def measure_row(comparison: Comparison, row: Row) -> dict[str, float]:
    """Returns the top-1 (%) of each probe, and "images seen" and "minutes" of pre-training."""
    done = {job.stage for job in row.jobs if job.record_file.is_file()}
    found: dict[str, float] = {}
    if "probes" in done:
        for entry in json.loads((row.folder / "probes" / "rows.json").read_bytes())["rows"]:
            if entry["probe"] in comparison.probes and entry["top1"] is not None:
                suffix = "" if entry["recalibrated"] else ", BN as trained"
                found[{"knn": "kNN"}.get(entry["probe"], entry["probe"]) + suffix] = entry["top1"]
    if "pretraining" in done:
        folder = row.folder / "pretraining"
        found["images seen"] = float(count_images_seen(info_of(str(folder / WEIGHTS))) or 0)
        seconds, end = 0.0, 0
        for record in read_metrics(folder / "metrics.json"):
            if "time" in record:
                seconds += float(record["time"]) * (record["iteration"] + 1 - end)
                end = record["iteration"] + 1
        found["minutes"] = seconds / 60
    return found


def summarize(measured: Sequence[tuple[Row, Mapping[str, float]]]) -> Summary:
    """Returns mean and unbiased standard deviation (nan for one seed) by objective and measure."""
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
