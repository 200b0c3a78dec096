# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a comparison of objectives runs: for each seed and objective pre-training, then probes."""

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
from qbheat_det.data import MAPPERS_OF_IMAGES, fingerprint_records, load_class_folders

RANDOM = "random"
WEIGHTS = "model_final.safetensors"
# Beginnings of keys that change where and how a run computes and what it logs, not its result.
_FREE_KEYS = (
    *("CUDNN_BENCHMARK", "DATALOADER.NUM_WORKERS", "DATASETS.", "VIS", "MODEL.DEVICE"),
    *("MODEL.WEIGHTS", "OUTPUT_DIR", "SEED", "SOLVER.CHECKPOINT", "SOLVER.LOG_PERIOD"),
    "SOLVER.WANDB_PROJECT",
)


@dataclass(frozen=True)
class Objective:
    """One row of a comparison; ``cfg`` is of ``config_file``, with the overrides of all."""

    name: str
    config_file: str
    cfg: CfgNode


@dataclass(frozen=True)
class Comparison:
    """What is compared on images of class folders.

    ``epochs`` are those of pre-training, over ``train_folder``, which probes are trained on too;
    ``tools`` is the folder of the scripts, ``opts`` overrides the config of all objectives.
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
    def images(self) -> dict[str, list[dict[str, Any]]]:
        """The records of "train" and "val"; a ``UserError`` if there are none."""
        train, val = load_class_folders(self.train_folder, self.val_folder)
        return {"train": train, "val": val}

    @cached_property
    def contents(self) -> dict[str, int]:
        """A checksum of the images of each of ``images``."""
        return {name: fingerprint_records(records) for name, records in self.images.items()}


@dataclass(frozen=True)
class Job:
    """One command of a comparison, which continues where it was stopped when it is repeated.

    ``folder`` gets ``<stage>.json`` when the command ended well. A result of other ``settings``, or
    of ``inputs`` that changed, is refused; if parts that are ``wanted`` are missing, it is
    repeated.
    """

    title: str
    stage: str
    folder: Path
    command: list[str]
    settings: Mapping[str, Any]
    inputs: tuple[Path, ...] = ()
    wanted: tuple[str, ...] = ()

    @property
    def record_file(self) -> Path:
        return self.folder / f"{self.stage}.json"

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.stage}.log"


@dataclass(frozen=True)
class Row:
    """The jobs of one objective and seed, in the order in which they run."""

    objective: Objective
    seed: int
    folder: Path
    jobs: list[Job]

    @property
    def weights(self) -> Path:
        """Of the pre-trained or initialized model."""
        return self.folder / "pretraining" / WEIGHTS


def load_objectives(wanted: Sequence[str], opts: Sequence[str] = ()) -> list[Objective]:
    """Returns objectives by name or config file; all of the package, random first, by default.

    Raises a ``UserError`` if one is unknown or named twice, a config is not valid, or two have
    different encoders or image sizes.
    """
    folder = Path(get_config_path("objectives/Base-Objective.yaml")).parent
    files = {path.stem: str(path) for path in sorted(folder.glob("*.yaml"))}
    known = {RANDOM: files.pop("Base-Objective"), **files}
    objectives = [_load_objective(word, known, opts) for word in wanted or known]
    names = [objective.name for objective in objectives]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--objectives names {', '.join(twice)} twice")
    first = _describe_encoder(objectives[0].cfg)
    for objective in objectives:
        other = _describe_encoder(objective.cfg)
        if changed := [key for key, value in first.items() if other.get(key) != value]:
            key = changed[0]
            raise UserError(
                f"'{objectives[0].name}' and '{objective.name}' differ in {key} ({first[key]} and "
                f"{other.get(key)}): set it on the command line, for all"
            )
    return objectives


def list_rows(comparison: Comparison) -> list[Row]:
    """Returns all rows with their jobs, the first seed of every objective first."""
    rows = []
    for seed in comparison.seeds:
        for objective in comparison.objectives:
            row = Row(objective, seed, comparison.output_dir / objective.name / f"seed{seed}", [])
            if objective.name != RANDOM:
                row.jobs.append(_plan_pretraining(comparison, row))
            row.jobs.append(_plan_probes(comparison, row))
            rows.append(row)
    return rows


def _load_objective(word: str, known: Mapping[str, str], opts: Sequence[str]) -> Objective:
    own = word.endswith((".yaml", ".yml"))
    name, path = (Path(word).stem, word) if own else (word, known.get(word, ""))
    if not path or (own and name == RANDOM):  # which is the initialized encoder
        raise UserError(f"no objective '{word}': {', '.join(known)}, or a config file (.yaml)")
    cfg = load_config(path, opts)
    mapper = cfg.INPUT.DATASET_MAPPER_NAME
    if mapper not in (*MAPPERS_OF_IMAGES, "classify"):
        raise UserError(f"'{path}' does not pre-train: INPUT.DATASET_MAPPER_NAME is '{mapper}'")
    return Objective(name, path, cfg)


def _describe_encoder(cfg: CfgNode) -> dict[str, Any]:
    """Returns the keys that decide what the encoder is and which images it gets."""
    wanted = ("INPUT.PRETRAIN.SIZE", "MODEL.BACKBONE.", "MODEL.MOBILE_FORMER.")
    free = ("DROP_PATH", "FREEZE_AT")
    return {key: value for key, value in list_leaves(cfg)
            if key.startswith(wanted) and not key.endswith(free)}  # fmt: skip


def _plan_pretraining(comparison: Comparison, row: Row) -> Job:
    objective = row.objective
    labelled = objective.cfg.INPUT.DATASET_MAPPER_NAME == "classify"
    opts = ["SOLVER.EPOCHS", str(float(comparison.epochs)), *comparison.opts]
    command = [
        *(sys.executable, str(comparison.tools / "train_net.py")),
        *("--config-file", objective.config_file),
        *("--data" if labelled else "--images", comparison.train_folder),
        *("--output", str(row.weights.parent), "--resume", "SEED", str(row.seed), *opts),
        *(("DATASETS.VAL_FRACTION", "0") if labelled else ()),  # probes have images of their own
    ]
    config = list_leaves(yaml.safe_load(load_config(objective.config_file, opts).dump()))
    settings = {key: value for key, value in config if not key.startswith(_FREE_KEYS)}
    settings["contents"] = comparison.contents["train"]
    title = f"{objective.name} seed {row.seed} pretraining"
    return Job(title, "pretraining", row.folder, command, settings)


def _plan_probes(comparison: Comparison, row: Row) -> Job:
    number = str(comparison.num_recalibrated)
    command = [
        *(sys.executable, str(comparison.tools / "probe_backbone.py")),
        *("--weights", str(row.weights), "--recalibrate-bn", number),
        *("--data", comparison.train_folder, "--val", comparison.val_folder),
        *("--probes", *comparison.probes),
        *("--json", str(row.folder / "probes/rows.json")),  # ends the list of probes
        *("SEED", str(row.seed)),  # the same parts of the training images for every objective
    ]
    contents = [comparison.contents[name] for name in ("train", "val")]
    settings = {"contents": contents, "recalibrate_bn": number}
    title = f"{row.objective.name} seed {row.seed} probes"
    inputs, wanted = (row.weights,), tuple(comparison.probes)
    return Job(title, "probes", row.folder, command, settings, inputs, wanted)
