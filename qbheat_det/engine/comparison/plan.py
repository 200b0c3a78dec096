# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a comparison runs, in which order, by which commands.

For each seed and objective: pre-training; the backbone as trained and with BatchNorm's statistics
estimated anew on whole images; probes of both; detectors on it, frozen.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import fingerprint_records, load_image_folders, unite_labels
from qbheat_det.engine.resume import contains_run

from ..writers import METRICS_FILE
from .figures import (
    WEIGHTS,
    fingerprint,
    read_backbone,
    read_detection,
    read_pretraining,
    read_probes,
)
from .objectives import Objective
from .stage import Stage, flat_config

PRETRAINING, BACKBONE, PROBES, PROBES_AS_STORED = (
    "pretraining",
    "backbone",
    "probes",
    "probes_as_stored",
)
AS_STORED, RECALIBRATED = "as_stored.safetensors", "recalibrated.safetensors"
DETECTORS = {
    "retinanet": "custom/retinanet_285M_probe.yaml",
    "mf-dec-211": "custom/mf_detr_211_285M_probe.yaml",
}
"""Frozen detectors by the name that the command line has for them."""
# A stopped detector goes on from here; what it learns does not depend on it.
_DETECTOR_OPTS = ("SOLVER.CHECKPOINT_EPOCHS", "2.0", "SOLVER.CHECKPOINTS_KEPT", "1")


@dataclass(frozen=True)
class Comparison:
    """What a comparison is asked for.

    Attributes:
        objectives: rows, in order.
        seeds: of each.
        epochs: passes over the images of pre-training.
        train_folder: class folders; probes learn from them and, without ``image_folders``, all
            objectives.
        val_folder: class folders that probes are judged on.
        image_folders: images to pre-train on instead, without labels.
        probes: of the backbone with statistics estimated anew.
        probes_as_stored: of the backbone as it was trained, those of ``probes`` that are to be
            reported for it too.
        num_recalibrated: whole training images for BatchNorm's statistics.
        detectors: names in ``DETECTORS``.
        annotations: train-json, train-images, val-json, val-images of the detectors; may be empty.
        opts: overrides of all objectives.
        detector_opts: overrides of all detectors.
        output_dir: folder of everything.
        tools: folder of the scripts.
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
    probes_as_stored: Sequence[str] = ()
    num_recalibrated: int = 1024
    detectors: Sequence[str] = ()
    annotations: Sequence[str] = ()
    opts: Sequence[str] = ()
    detector_opts: Sequence[str] = ()


@dataclass(frozen=True)
class ImageSets:
    """How many images there are to learn from, to be judged on, and of how many classes.

    ``contents`` tells which images they are: a checksum of "pretraining", "train" and "val".
    """

    pretraining: int
    train: int
    val: int
    classes: int
    contents: Mapping[str, int] = field(default_factory=dict, compare=False)

    def of(self, *names: str) -> dict[str, int]:
        """Returns the checksums of some of them that are known."""
        return {name: self.contents[name] for name in names if name in self.contents}


def count_images(comparison: Comparison) -> ImageSets:
    """Lists the folders of a comparison.

    Raises:
        UserError: a folder holds no images, or those to be judged on are of other classes.
    """
    folders = comparison.train_folder, comparison.val_folder
    train, val = (load_image_folders([folder], labelled=True) for folder in folders)
    unite_labels([train], [val], names=folders)
    extra = comparison.image_folders
    pretraining = load_image_folders(extra)[0] if extra else train[0]
    records = {"pretraining": pretraining, "train": train[0], "val": val[0]}
    return ImageSets(
        **{name: len(found) for name, found in records.items()},
        classes=len(train[1]),
        contents={name: fingerprint_records(found) for name, found in records.items()},
    )


def plan_stages(comparison: Comparison, sets: ImageSets) -> list[Stage]:
    """Returns all stages, those of the first seed first, so that a table is soon complete.

    Raises:
        UserError: a config of a detector is not sound.
    """
    return [
        stage
        for seed in comparison.seeds
        for objective in comparison.objectives
        for stage in _Row(comparison, sets, objective, seed).list_stages()
    ]


class _Row:
    """The stages of one objective and seed."""

    def __init__(
        self, comparison: Comparison, sets: ImageSets, objective: Objective, seed: int
    ) -> None:
        self.comparison = comparison
        self.sets = sets
        self.objective = objective
        self.seed = seed
        self.folder = comparison.output_dir / objective.name / f"seed{seed}"
        self.weights = {name: self.folder / BACKBONE / name for name in (AS_STORED, RECALIBRATED)}

    def list_stages(self) -> list[Stage]:
        stages = [self._pretraining()] if self.objective.trained else []
        stages.append(self._backbone())
        for name, weights, probes in (
            (PROBES, RECALIBRATED, self.comparison.probes),
            (PROBES_AS_STORED, AS_STORED, self.comparison.probes_as_stored),
        ):
            if probes:
                stages.append(self._probing(name, self.weights[weights], probes))
        return [*stages, *map(self._detection, self.comparison.detectors)]

    def _pretraining(self) -> Stage:
        asked, folder = self.comparison, self.folder / PRETRAINING
        flag, folders, epochs = "--image-folder", [asked.train_folder], asked.epochs
        if self.objective.labelled:
            flag = "--train-folder"
            # As many images seen as the others, of the labelled ones.
            epochs *= self.sets.pretraining / self.sets.train
        elif asked.image_folders:
            folders = list(asked.image_folders)
        opts = ["SOLVER.EPOCHS", str(float(epochs)), *asked.opts]
        cfg = load_config(self.objective.config_file, opts)
        images = self.sets.train if self.objective.labelled else self.sets.pretraining
        command = [
            *self._tool("train_net.py", "--config-file", self.objective.config_file),
            *(word for name in folders for word in (flag, name)),
            *("--resume", "SEED", str(self.seed), "OUTPUT_DIR", str(folder), *opts),
        ]
        return self._stage(
            PRETRAINING,
            command,
            read=lambda: read_pretraining(folder),
            settings={
                "images": [os.path.abspath(name) for name in folders],
                "contents": self.sets.of("train" if self.objective.labelled else "pretraining"),
                "config": flat_config(cfg),
            },
            progress=folder / METRICS_FILE,
            steps=math.ceil(cfg.SOLVER.EPOCHS * images / cfg.SOLVER.IMS_PER_BATCH),
        )

    def _backbone(self) -> Stage:
        asked = self.comparison
        command = [
            *(sys.executable, "-m", "qbheat_det.engine.comparison.backbone"),
            *("--config-file", self.objective.config_file, "--seed", str(self.seed)),
            *("--train-folder", asked.train_folder, "--output", str(self.folder / BACKBONE)),
            *("--recalibrate-bn", str(asked.num_recalibrated)),
        ]
        if self.objective.trained:
            command += ["--weights", str(self.folder / PRETRAINING / WEIGHTS)]
        settings: dict[str, Any] = {
            "train_folder": os.path.abspath(asked.train_folder),
            "contents": self.sets.of("train"),
            "recalibrate_bn": asked.num_recalibrated,
        }
        if not self.objective.trained:
            settings["config"] = flat_config(self.objective.cfg)
        return self._stage(
            BACKBONE,
            [*command, *asked.opts],
            read=lambda: read_backbone(self.folder / BACKBONE),
            settings=settings,
            needs=(PRETRAINING,) if self.objective.trained else (),
        )

    def _probing(self, name: str, weights: Path, probes: Sequence[str]) -> Stage:
        asked, output = self.comparison, self.folder / f"{name}_rows.json"
        command = [
            *self._tool("probe_backbone.py", "--weights", str(weights)),
            *("--train-folder", asked.train_folder, "--val-folder", asked.val_folder),
            *("--probes", *probes, "--json", str(output)),
            *("SEED", str(self.seed)),  # the same parts of the training images for every objective
        ]
        return self._stage(
            name,
            command,
            read=lambda: read_probes(output, weights, probes),
            settings={
                "train_folder": os.path.abspath(asked.train_folder),
                "val_folder": os.path.abspath(asked.val_folder),
                "contents": self.sets.of("train", "val"),
            },
            needs=(BACKBONE,),
            wanted=tuple(probes),
        )

    def _detection(self, detector: str) -> Stage:
        asked, folder = self.comparison, self.folder / detector
        config = get_config_path(DETECTORS[detector])
        encoder = self.objective.cfg.MODEL
        given = dict(zip(asked.opts[::2], asked.opts[1::2], strict=True))
        if encoder.BACKBONE.NAME != "MobileFormer":
            raise UserError(
                f"--detectors stand on MobileFormer, but MODEL.BACKBONE.NAME of "
                f"'{self.objective.name}' is '{encoder.BACKBONE.NAME}': leave --detectors out"
            )
        variant = [
            word
            for key, value in given.items()
            if key.startswith("MODEL.MOBILE_FORMER.") and not key.endswith("OUT_FEATURES")
            for word in (key, value)
        ]
        opts = [*_DETECTOR_OPTS, *variant, *asked.detector_opts]
        flags = ("--train-json", "--train-images", "--val-json", "--val-images")
        data = [word for pair in zip(flags, asked.annotations, strict=True) for word in pair]

        def command() -> list[str]:
            return [
                *self._tool("train_net.py", "--config-file", config, *data),
                *(["--resume"] if contains_run(str(folder)) else []),
                *("MODEL.WEIGHTS", str(self.weights[RECALIBRATED]), "SEED", str(self.seed)),
                *("OUTPUT_DIR", str(folder), *opts),
            ]

        return Stage(
            *(self.objective.name, self.seed, detector, self.folder, command),
            read=lambda: read_detection(folder),
            settings={
                "annotations": [os.path.abspath(name) for name in asked.annotations],
                "contents": [
                    fingerprint(Path(name)) for name in asked.annotations if os.path.isfile(name)
                ],
                "config": flat_config(load_config(config, opts)),
            },
            needs=(BACKBONE,),
            progress=folder / METRICS_FILE,
        )

    def _tool(self, name: str, *words: str) -> list[str]:
        return [sys.executable, str(self.comparison.tools / name), *words]

    def _stage(self, name: str, command: list[str], **rest: Any) -> Stage:
        return Stage(
            self.objective.name, self.seed, name, self.folder, lambda: list(command), **rest
        )
