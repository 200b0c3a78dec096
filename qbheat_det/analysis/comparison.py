# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compares pre-training objectives by probes of the frozen encoder.

A comparison has a row for each seed and objective: a pre-training, and probes of its encoder.
``tools/comparison_jobs.py`` runs them. This file has their settings and the folders of their
results, and makes tables of the results.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.checkpoint import info_of
from qbheat_det.config import get_config_path, load_config
from qbheat_det.config.loading import list_leaves
from qbheat_det.core.environment import find_commit
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import fingerprint_records, load_class_folders
from qbheat_det.probing.features import count_images_seen
from qbheat_det.tasks import DETECTION, find_task

from .figures import to_json
from .run import read_metrics

RANDOM = "random"
"""Name of the untrained encoder, which has no pre-training."""
WEIGHTS = "model_final.safetensors"
PRETRAINING = "pretraining"
PROBES = "probes"
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
    images. ``opts`` overrides the config of each objective.
    """

    objectives: Sequence[Objective]
    seeds: Sequence[int]
    epochs: float
    train_folder: str
    val_folder: str
    output_dir: Path
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
class Row:
    """One objective with one seed, and the folder of its results.

    A row has the stages ``PRETRAINING`` (a run in ``folder/pretraining``) and ``PROBES``
    (``folder/probes/rows.json``). A stage is finished if ``record_file`` exists.
    """

    objective: Objective
    seed: int
    folder: Path

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages, in order of execution."""
        if self.objective.name == RANDOM:
            return (PROBES,)
        return (PRETRAINING, PROBES)

    @property
    def weights(self) -> Path:
        """The file of the pre-trained weights."""
        return self.folder / PRETRAINING / WEIGHTS

    @property
    def probes_file(self) -> Path:
        """The file of the probes' results."""
        return self.folder / PROBES / "rows.json"

    def record_file(self, stage: str) -> Path:
        """Returns the file that is written when a stage has succeeded."""
        return self.folder / f"{stage}.json"

    def is_finished(self, stage: str) -> bool:
        """Whether a stage has succeeded."""
        return self.record_file(stage).is_file()


def load_objectives(wanted: Sequence[str], opts: Sequence[str] = ()) -> list[Objective]:
    """Loads objectives by name or config file. By default, loads all built-in ones, "random" first.

    Raises:
        UserError: an objective is unknown, repeated or has an invalid config, or two objectives
            have different encoders or image sizes.
    """
    folder = Path(get_config_path("objectives/Base-Objective.yaml")).parent
    files = {path.stem: str(path) for path in sorted(folder.glob("*.yaml"))}
    known = {RANDOM: files.pop("Base-Objective"), **files}
    objectives = [load_objective(word, known, opts) for word in wanted or known]
    names = [objective.name for objective in objectives]
    if len(set(names)) < len(names):
        raise UserError(f"--objectives repeats a name: {', '.join(names)}")
    first_keys = list_encoder_keys(objectives[0].cfg)
    for objective in objectives:
        keys = list_encoder_keys(objective.cfg)
        for key, value in first_keys.items():
            if keys.get(key) != value:
                raise UserError(
                    f"'{objectives[0].name}' and '{objective.name}' differ in {key} ({value} and "
                    f"{keys.get(key)}): set it on the command line for all objectives"
                )
    return objectives


def load_objective(word: str, known: Mapping[str, str], opts: Sequence[str]) -> Objective:
    """Loads an objective by its name in ``known``, or by the path of its config file.

    Raises a ``UserError`` if it is unknown, or if its config does not pre-train.
    """
    if word.endswith((".yaml", ".yml")):
        name = Path(word).stem
        path = word
        is_known = name != RANDOM  # this name is reserved for the untrained encoder
    else:
        name = word
        path = known.get(word, "")
        is_known = word in known
    if not is_known:
        raise UserError(f"no objective '{word}': use {', '.join(known)}, or a config file (.yaml)")
    cfg = load_config(path, opts)
    if find_task(cfg) is DETECTION:
        mapper = cfg.INPUT.DATASET_MAPPER_NAME
        raise UserError(f"'{path}' does not pre-train: INPUT.DATASET_MAPPER_NAME is '{mapper}'")
    return Objective(name, path, cfg)


def list_encoder_keys(cfg: CfgNode) -> dict[str, Any]:
    """Returns the keys that define the encoder and its image size."""
    nodes = ("INPUT.PRETRAIN.SIZE", "MODEL.BACKBONE.", "MODEL.MOBILE_FORMER.")
    of_training = ("DROP_PATH", "FREEZE_AT")
    return {
        key: value
        for key, value in list_leaves(cfg)
        if key.startswith(nodes) and not key.endswith(of_training)
    }


def list_rows(comparison: Comparison) -> list[Row]:
    """Returns all rows: for each seed, one row per objective."""
    return [
        Row(objective, seed, comparison.output_dir / objective.name / f"seed{seed}")
        for seed in comparison.seeds
        for objective in comparison.objectives
    ]


def write_report(comparison: Comparison, rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """Writes ``comparison.json`` and ``comparison.md``. Returns the tables in Markdown.

    ``failed`` maps the title of each failed stage to the reason.
    """
    summary = summarize([(row, measure_row(comparison, row)) for row in rows])
    content = {
        "objectives": {entry.name: entry.config_file for entry in comparison.objectives},
        "images": [len(records) for records in comparison.images],
        "seeds": comparison.seeds,
        "epochs": comparison.epochs,
        "opts": comparison.opts,
        "commit": find_commit(),
        "summary": summary,
        "failed": failed,
    }
    tables = render_tables(comparison, summary, failed)
    encoded = json.dumps(to_json(content), indent=1).encode()
    write_atomically(comparison.output_dir / "comparison.json", encoded)
    write_atomically(comparison.output_dir / "comparison.md", tables.encode())
    return tables


def measure_row(comparison: Comparison, row: Row) -> dict[str, float]:
    """Returns the top-1 (%) of each probe, and "images seen" and "minutes" of pre-training.

    Measures of stages that are not finished are missing.
    """
    measures: dict[str, float] = {}
    if row.is_finished(PROBES):
        for entry in json.loads(row.probes_file.read_bytes())["rows"]:
            if entry["probe"] in comparison.probes and entry["top1"] is not None:
                title = entry["probe"].replace("knn", "kNN")
                if not entry["recalibrated"]:
                    title += ", BN as trained"
                measures[title] = entry["top1"]
    if PRETRAINING in row.stages and row.is_finished(PRETRAINING):
        measures["images seen"] = float(count_images_seen(info_of(str(row.weights))) or 0)
        seconds = 0.0
        num_steps = 0
        for record in read_metrics(row.folder / PRETRAINING / "metrics.json"):
            if "time" in record:  # the mean of the steps since the last record
                seconds += float(record["time"]) * (record["iteration"] + 1 - num_steps)
                num_steps = record["iteration"] + 1
        measures["minutes"] = seconds / 60
    return measures


def summarize(measured: Sequence[tuple[Row, Mapping[str, float]]]) -> Summary:
    """Returns mean and unbiased standard deviation (nan for one seed) by objective and measure."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for row, measures in measured:
        for title, value in measures.items():
            entry = summary.setdefault(row.objective.name, {}).setdefault(title, {"values": {}})
            entry["values"][row.seed] = value
            values = list(entry["values"].values())
            entry["mean"] = statistics.fmean(values)
            entry["deviation"] = math.nan
            if len(values) > 1:
                entry["deviation"] = statistics.stdev(values)
    return summary


def render_tables(comparison: Comparison, summary: Summary, failed: Mapping[str, str]) -> str:
    """Returns the table of results and costs in Markdown."""
    num_train, num_val = (len(records) for records in comparison.images)
    every_title = dict.fromkeys(title for measures in summary.values() for title in measures)
    titles = [title for title in every_title if title not in _COSTS]
    rows = [
        [name, *(format_spread(measures.get(title)) for title in (*titles, *_COSTS))]
        for name, measures in summary.items()
    ]
    headers = ["objective", *(f"{title}, %" for title in titles), *_COSTS]
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    settings = (
        f"Pre-training: {comparison.epochs:g} epochs of {num_train:,} images, seeds {seeds}. "
        f"Probes: the same training images, {num_val:,} validation images."
    )
    if failed:
        settings += f" Failed: {', '.join(failed)}."
    parts = [
        "# Pre-training objectives, compared by probes of the frozen encoder",
        settings,
        tabulate(rows, headers, tablefmt="github", disable_numparse=True),
        "Mean ± standard deviation over seeds (number of seeds). BatchNorm's statistics are "
        f"estimated on {comparison.num_recalibrated:,} whole training images, except in columns "
        "'BN as trained'. Minutes are the time of all steps.",
    ]
    return "\n\n".join(parts) + "\n"


def format_spread(spread: Mapping[str, Any] | None) -> str:
    """Returns the cell of an entry of a summary, such as "12.00 ± 2.83 (2)"."""
    if spread is None:
        return "-"
    if math.isnan(spread["deviation"]):
        return f"{spread['mean']:,.2f} (one seed)"
    return f"{spread['mean']:,.2f} ± {spread['deviation']:.2f} ({len(spread['values'])})"
