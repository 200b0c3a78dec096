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
from qbheat_det.tasks import DETECTION, find_task

from .figures import to_json
from .run import read_metrics

RANDOM = "random"
"""Name of the untrained encoder, which has no pre-training."""
DISTILL = "distill"
"""Name of the objective that needs a teacher's weights. A comparison has it only if it is named."""
WEIGHTS = "model_final.safetensors"
PRETRAINING = "pretraining"
PROBES = "probes"
_COSTS = ("images seen", "minutes")

Summary = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""``summary[objective][measure]`` has "mean" and "deviation" over seeds, and "values" by seed."""


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
        """The checksums of the training images and of the validation images."""
        return [fingerprint_records(records) for records in self.images]


@dataclass(frozen=True)
class Row:
    """One objective with one seed, and the folder of its results.

    A row has the stages ``PRETRAINING``, a run in ``folder/pretraining``, and ``PROBES``, whose
    results are in ``folder/probes/rows.json``. A stage is finished if its ``record_file`` exists.
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
    """Loads objectives by name or config file.

    If ``wanted`` is empty, loads all built-in ones except ``DISTILL``, "random" first. ``opts``
    overrides keys of each config.

    Raises:
        UserError: an objective is unknown, repeated or has an invalid config, or two objectives
            have different encoders or image sizes.
    """
    folder = Path(get_config_path("objectives/Base-Objective.yaml")).parent
    files = {path.stem: str(path) for path in sorted(folder.glob("*.yaml"))}
    base_file = files.pop("Base-Objective")
    known = {RANDOM: base_file, **files}
    chosen = wanted or [name for name in known if name != DISTILL]
    objectives = [load_objective(word, known, opts) for word in chosen]
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
    """Returns the keys that define the encoder and its image size, with their values."""
    prefixes = ("INPUT.PRETRAIN.SIZE", "MODEL.BACKBONE.", "MODEL.MOBILE_FORMER.")
    training_suffixes = ("DROP_PATH", "FREEZE_AT")  # do not change the trained encoder's structure
    keys = {}
    for key, value in list_leaves(cfg):
        if key.startswith(prefixes) and not key.endswith(training_suffixes):
            keys[key] = value
    return keys


def list_rows(comparison: Comparison) -> list[Row]:
    """Returns all rows: for each seed, one row per objective."""
    rows = []
    for seed in comparison.seeds:
        for objective in comparison.objectives:
            folder = comparison.output_dir / objective.name / f"seed{seed}"
            rows.append(Row(objective, seed, folder))
    return rows


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
        info = info_of(str(row.weights))
        measures["images seen"] = float((info and info.images_seen) or 0)
        seconds = 0.0
        num_steps = 0  # until the record before
        for record in read_metrics(row.folder / PRETRAINING / "metrics.json"):
            if "time" not in record:
                continue
            new_steps = record["iteration"] + 1 - num_steps
            seconds += float(record["time"]) * new_steps  # "time" is the mean of the new steps
            num_steps += new_steps
        measures["minutes"] = seconds / 60
    return measures


def summarize(measured: Sequence[tuple[Row, Mapping[str, float]]]) -> Summary:
    """Computes mean and standard deviation over seeds, by objective and measure.

    The standard deviation is the unbiased one. It is nan if there is only one seed.
    """
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for row, measures in measured:
        by_title = summary.setdefault(row.objective.name, {})
        for title, value in measures.items():
            entry = by_title.setdefault(title, {"values": {}})
            entry["values"][row.seed] = value
    for by_title in summary.values():
        for entry in by_title.values():
            values = list(entry["values"].values())
            entry["mean"] = statistics.fmean(values)
            entry["deviation"] = statistics.stdev(values) if len(values) > 1 else math.nan
    return summary


def render_tables(comparison: Comparison, summary: Summary, failed: Mapping[str, str]) -> str:
    """Returns the table of results and costs in Markdown."""
    train_images, val_images = comparison.images
    probes: list[str] = []  # the titles of the probes of all objectives, each once
    for measures in summary.values():
        for title in measures:
            if title not in _COSTS and title not in probes:
                probes.append(title)
    rows = []
    for name, measures in summary.items():
        cells = [format_spread(measures.get(title)) for title in (*probes, *_COSTS)]
        rows.append([name, *cells])
    headers = ["objective", *(f"{title}, %" for title in probes), *_COSTS]
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    settings = (
        f"Pre-training: {comparison.epochs:g} epochs of {len(train_images):,} images, seeds "
        f"{seeds}. Probes: the same training images, {len(val_images):,} validation images."
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
    """Formats an entry of a summary as mean ± deviation (seeds), such as "12.00 ± 2.83 (2)"."""
    if spread is None:
        return "-"
    if math.isnan(spread["deviation"]):
        return f"{spread['mean']:,.2f} (one seed)"
    return f"{spread['mean']:,.2f} ± {spread['deviation']:.2f} ({len(spread['values'])})"
