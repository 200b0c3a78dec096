# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Plans the commands of a comparison: pre-training and probes for each seed and objective."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode

from qbheat_det.config import get_config_path, load_config
from qbheat_det.config.loading import list_leaves
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import to_json
from qbheat_det.data import MAPPERS_OF_IMAGES, fingerprint_records, load_class_folders

RANDOM = "random"
WEIGHTS = "model_final.safetensors"
# Prefixes of keys that do not change the result of a run.
_FREE_KEYS = (
    *("CUDNN_BENCHMARK", "DATALOADER.NUM_WORKERS", "DATASETS.", "VIS", "MODEL.DEVICE"),
    *("MODEL.WEIGHTS", "OUTPUT_DIR", "SEED", "SOLVER.CHECKPOINT", "SOLVER.LOG_PERIOD"),
)


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
        """Checksums of the training and validation images."""
        return [fingerprint_records(records) for records in self.images]


@dataclass(frozen=True)
class Job:
    """A command that can resume. ``settings`` are the settings that affect its result.

    ``folder/<stage>.json`` is written when the command has succeeded.
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
        """Checks whether the command has succeeded.

        Raises:
            UserError: if it succeeded with other settings.
        """
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
    mapper = cfg.INPUT.DATASET_MAPPER_NAME
    if mapper not in (*MAPPERS_OF_IMAGES, "classify"):
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
        *(
            ("DATASETS.VAL_FRACTION", "0") if is_labelled else ()
        ),  # the probes have a validation set
    ]
    leaves = list_leaves(yaml.safe_load(load_config(file, opts).dump()))
    settings = {key: value for key, value in leaves if not key.startswith(_FREE_KEYS)}
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
