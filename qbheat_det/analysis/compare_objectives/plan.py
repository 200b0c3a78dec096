# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The commands of a comparison: for each seed and objective pre-training, probes and detectors."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode

from qbheat_det.analysis.training_log import flatten
from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_file
from qbheat_det.data import fingerprint_records, load_class_folders, load_image_folders

from .objectives import RANDOM, Objective

WEIGHTS = "model_final.safetensors"
DETECTORS = {
    "retinanet": "custom/retinanet_285M_probe.yaml",
    "mf-dec-211": "custom/mf_detr_211_285M_probe.yaml",
}
"""Frozen detectors by their names on the command line."""
# Beginnings of keys that change where and how a run computes and what it logs, not its result.
_FREE_KEYS = (
    *("CUDNN_BENCHMARK", "DATALOADER.NUM_WORKERS", "DATASETS.", "VIS", "MODEL.DEVICE"),
    *("MODEL.WEIGHTS", "OUTPUT_DIR", "SEED", "SOLVER.CHECKPOINT", "SOLVER.LOG_PERIOD"),
    "SOLVER.WANDB_PROJECT",
)
# A stopped detector continues from its checkpoint; its result does not depend on them.
_DETECTOR_OPTS = ("SOLVER.CHECKPOINT_EPOCHS", "2.0", "SOLVER.CHECKPOINTS_KEPT", "1")


@dataclass(frozen=True)
class Comparison:
    """What is compared; probes are trained on ``train_folder`` and classify ``val_folder``.

    Attributes:
        epochs: over the images of pre-training.
        tools: folder of the scripts.
        image_folders: images for pre-training without labels, instead of ``train_folder``.
        num_recalibrated: whole training images for BatchNorm's statistics.
        detectors: keys of ``DETECTORS``.
        annotations: train-json, train-images, val-json, val-images of the detectors; may be empty.
        opts: config overrides of all objectives.
        detector_opts: config overrides of all detectors.
    """

    objectives: Sequence[Objective]
    seeds: Sequence[int]
    epochs: float
    train_folder: str
    val_folder: str
    output_dir: Path
    tools: Path
    image_folders: Sequence[str] = ()
    probes: Sequence[str] = ()
    num_recalibrated: int = 1024
    detectors: Sequence[str] = ()
    annotations: Sequence[str] = ()
    opts: Sequence[str] = ()
    detector_opts: Sequence[str] = ()

    @cached_property
    def images(self) -> dict[str, list[dict[str, Any]]]:
        """The records of "pretraining", "train" and "val".

        Raises:
            UserError: a folder has no images, or ``val_folder`` other classes.
        """
        train, val = load_class_folders(self.train_folder, self.val_folder)
        extra = self.image_folders
        pretraining = load_image_folders(extra)[0] if extra else train
        return {"pretraining": pretraining, "train": train, "val": val}

    @cached_property
    def contents(self) -> dict[str, int]:
        """A checksum of the images of each of ``images``."""
        return {name: fingerprint_records(records) for name, records in self.images.items()}


@dataclass(frozen=True)
class Job:
    """One command of a comparison, which continues where it was stopped when it is repeated.

    Attributes:
        title: objective, seed and stage.
        stage: "pretraining", "probes", "export" or a detector.
        folder: of the row; gets ``<stage>.json`` when the command ended well, and ``<stage>.log``.
        command: the arguments.
        settings: that decide the result; a result of other settings is refused.
        inputs: files that must exist, and not change afterwards.
        wanted: parts of the result; if some are missing, the command is repeated.
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
    jobs: list[Job] = field(default_factory=list)

    def add(self, stage: str, command: list[str], settings: Mapping[str, Any],
            inputs: tuple[Path, ...] = (), wanted: Sequence[str] = ()) -> None:  # fmt: skip
        """Adds a job."""
        title = f"{self.objective.name} seed {self.seed} {stage}"
        self.jobs.append(Job(title, stage, self.folder, command, settings, inputs, tuple(wanted)))

    @property
    def weights(self) -> Path:
        """Of the pre-trained or initialized model."""
        return self.folder / "pretraining" / WEIGHTS

    @property
    def backbone(self) -> Path:
        """With recalibrated BatchNorm statistics, for detectors."""
        return self.folder / "backbone.safetensors"


def list_jobs(comparison: Comparison) -> list[Row]:
    """Returns all rows with their jobs, the first seed of every objective first.

    Raises:
        UserError: a folder of images or the config of a detector is not valid.
    """
    rows = []
    for seed in comparison.seeds:
        for objective in comparison.objectives:
            folder = comparison.output_dir / objective.name / f"seed{seed}"
            row = Row(objective, seed, folder)
            if objective.name != RANDOM:
                _add_pretraining(comparison, row)
            _add_probes(comparison, row)
            for name in comparison.detectors:
                _add_detector(comparison, row, name)
            rows.append(row)
    return rows


def _add_pretraining(comparison: Comparison, row: Row) -> None:
    objective, epochs = row.objective, comparison.epochs
    flag, folders, source = "--image-folder", list(comparison.image_folders), "pretraining"
    if objective.labelled:
        # As many images seen as for the others.
        epochs *= len(comparison.images["pretraining"]) / len(comparison.images["train"])
        flag, folders, source = "--train-folder", [comparison.train_folder], "train"
    folders = folders or [comparison.train_folder]
    opts = ["SOLVER.EPOCHS", str(float(epochs)), *comparison.opts]
    command = [
        *_tool(comparison, "train_net.py", "--config-file", objective.config_file),
        *(word for folder in folders for word in (flag, folder)),
        *("--resume", "SEED", str(row.seed), "OUTPUT_DIR", str(row.weights.parent), *opts),
    ]
    settings = {
        "contents": comparison.contents[source],
        "config": _list_settings(load_config(objective.config_file, opts)),
    }
    row.add("pretraining", command, settings)


def _add_probes(comparison: Comparison, row: Row) -> None:
    """Adds the probes and, for detectors, the export of the backbone."""
    number, train = str(comparison.num_recalibrated), comparison.train_folder
    weights = ("--weights", str(row.weights), "--recalibrate-bn", number)
    command = [
        *_tool(comparison, "probe_backbone.py", *weights, "--train-folder", train),
        *("--val-folder", comparison.val_folder, "--probes", *comparison.probes),
        *("--json", str(row.folder / "probes/rows.json")),  # ends the list of probes
        *("SEED", str(row.seed)),  # the same parts of the training images for every objective
    ]
    contents = [comparison.contents[name] for name in ("train", "val")]
    settings: dict[str, Any] = {"contents": contents, "recalibrate_bn": number}
    row.add("probes", command, settings, (row.weights,), comparison.probes)
    if comparison.detectors:
        command = [
            *_tool(comparison, "export_backbone.py", *weights, "--image-folder", train),
            *("--output", str(row.backbone), "--overwrite"),
            *("INPUT.DATASET_MAPPER_NAME", "pretrain"),  # whole images for every objective
        ]
        settings = {"contents": contents[0], "recalibrate_bn": number}
        row.add("export", command, settings, (row.weights,))


def _add_detector(comparison: Comparison, row: Row, detector: str) -> None:
    name = row.objective.cfg.MODEL.BACKBONE.NAME
    if name != "MobileFormer":
        raise UserError(f"--detectors need MobileFormer, but MODEL.BACKBONE.NAME is '{name}'")
    config = get_config_path(DETECTORS[detector])
    variant = [
        word
        for key, value in zip(comparison.opts[::2], comparison.opts[1::2], strict=True)
        if key.startswith("MODEL.MOBILE_FORMER.") and not key.endswith("OUT_FEATURES")
        for word in (key, value)
    ]
    opts = [*_DETECTOR_OPTS, *variant, *comparison.detector_opts]
    flags = ("--train-json", "--train-images", "--val-json", "--val-images")
    data = [word for pair in zip(flags, comparison.annotations, strict=True) for word in pair]
    command = [
        *_tool(comparison, "train_net.py", "--config-file", config, *data),
        *("--resume", "MODEL.WEIGHTS", str(row.backbone), "SEED", str(row.seed)),
        *("OUTPUT_DIR", str(row.folder / detector), *opts),
    ]
    settings = {
        "contents": [hash_file(path) for path in comparison.annotations if os.path.isfile(path)],
        "config": _list_settings(load_config(config, opts)),
    }
    row.add(detector, command, settings, (row.backbone,))


def _tool(comparison: Comparison, name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(comparison.tools / name), *arguments]


def _list_settings(cfg: CfgNode) -> dict[str, Any]:
    """Returns the keys of a config that decide the result of a run."""
    leaves = flatten(yaml.safe_load(cfg.dump()))
    return {key: value for key, value in leaves.items() if not key.startswith(_FREE_KEYS)}
