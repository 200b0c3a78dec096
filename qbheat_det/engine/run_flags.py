# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The flags of a training or evaluation, from the command line or Python."""

import argparse
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from detectron2.config import CfgNode

from qbheat_det.checkpoint import find_weights, load_run_config
from qbheat_det.config import get_cfg, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_CLASSES, MAPPERS_OF_IMAGES, find_format

_DEFAULTS = {
    "boxes": "custom/retinanet_lite0_finetune.yaml",
    "classes": "custom/tran1_285M_probe.yaml",
    "images": "custom/distill_285M_cpu.yaml",
}
_KEYS = {
    "weights": "MODEL.WEIGHTS",
    "output": "OUTPUT_DIR",
    "device": "MODEL.DEVICE",
    "epochs": "SOLVER.EPOCHS",
    "batch": "SOLVER.IMS_PER_BATCH",
    "tile": "INPUT.TILE",
    "freeze": "MODEL.BACKBONE.FREEZE_AT",
    "max_left_out": "DATASETS.MAX_LEFT_OUT",
}
SIZES = ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST", "DETR_CROP_RESIZE",
          "DETR_CROP_RANGE")  # fmt: skip
_SMALLEST = 32  # smallest --image-size in pixels
FIRST_STAGE_WEIGHTS = Path("first_stage", "model_final.safetensors")
"""The result of ``SOLVER.FIRST_STAGE`` in ``OUTPUT_DIR``, from which the second stage starts."""
FREEZE_ALL = 9
"""Value of ``MODEL.BACKBONE.FREEZE_AT`` that freezes every backbone."""


@dataclass(kw_only=True)
class RunFlags:
    """The flags of ``tools/train_net.py`` as attributes of the same names, for ``build_config``.

    ``RunFlags(data="data.yaml", output="output/mine", opts=["SOLVER.EPOCHS", 20])`` corresponds to
    ``qbheat train --data data.yaml --output output/mine SOLVER.EPOCHS 20``. Paths may be relative
    to the working directory.

    Attributes:
        config_file: path of a config, or name of a shipped one. If empty, the config inside
            ``weights``, or a default for boxes, class folders or images without labels.
        data: training data, or test data with ``eval_only``. Any format that ``--data`` accepts,
            such as a COCO json, a YOLO ``data.yaml``, a Pascal VOC folder or class folders.
        images: image folder of the COCO json in ``data``, if the images are not next to the json.
            Without ``data``, one or several folders of images without labels, for pre-training.
        val: validation data, in the formats of ``data``. Without ``val``, the validation part of
            ``data`` is used. If there is none, ``DATASETS.VAL_FRACTION`` of the images is held out
            and listed in ``split.json``.
        val_images: the same as ``images``, for ``val``.
        unlabelled: one or several folders of images without labels, from which a detector learns
            in addition to ``data``.
        weights: ``MODEL.WEIGHTS``; any name that ``find_weights`` accepts.
        output, device, epochs: ``OUTPUT_DIR``, ``MODEL.DEVICE`` and ``SOLVER.EPOCHS``.
        resume: continue the run in ``output``.
        eval_only: evaluate ``weights`` without training.
        minutes: duration for which ``plan_run`` chooses ``epochs``, ``image_size`` and stages.
        batch: ``SOLVER.IMS_PER_BATCH``, images per step over all processes.
        image_size: size in pixels. For detectors, it replaces the largest of
            ``INPUT.MIN_SIZE_TRAIN``, or ``INPUT.MIN_SIZE_TEST`` with ``eval_only``. All other sizes
            are scaled by the same factor. For other models, it is the side of the square images.
        tile: ``INPUT.TILE``, side of overlapping tiles in pixels; 0 uses whole images only.
        freeze: freeze the whole backbone (``MODEL.BACKBONE.FREEZE_AT 9``).
        max_left_out: ``DATASETS.MAX_LEFT_OUT``, share of images or boxes that may have faults.
        opts: config overrides, as alternating keys and values.
    """

    config_file: str = ""
    data: str | None = None
    images: str | Sequence[str] = ()
    val: str | None = None
    val_images: str | Sequence[str] = ()
    unlabelled: str | Sequence[str] = ()
    weights: str = ""
    output: str = ""
    resume: bool = False
    eval_only: bool = False
    device: str = ""
    epochs: float | None = None
    minutes: float | None = None
    batch: int | None = None
    image_size: int | None = None
    tile: int | None = None
    freeze: bool = False
    max_left_out: float | None = None
    opts: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Converts single folders to lists and paths to strings; checks numbers."""
        for name in ("epochs", "minutes", "batch"):
            if (number := vars(self)[name]) is not None and not 0 < number < math.inf:
                raise UserError(f"--{name} must be a number above 0, not {number}")
        self.images, self.val_images = _list_folders(self.images), _list_folders(self.val_images)
        self.unlabelled = _list_folders(self.unlabelled)
        self.val = None if self.val is None else str(self.val)

    @classmethod
    def read(cls, args: "argparse.Namespace | RunFlags") -> "RunFlags":
        """Builds an object from parsed arguments, or copies another ``RunFlags``."""
        given = {field.name: vars(args).get(field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def overrides(self) -> dict[str, str]:
        """Config overrides by key, from flags and ``opts``.

        Raises:
            UserError: a flag and an override set the same key.
        """
        opts = self._list_overrides()
        return dict(zip(opts[::2], opts[1::2], strict=False))

    def _list_overrides(self) -> list[str]:
        pairs = []
        for name, key in _KEYS.items():
            value = vars(self)[name]
            if value is not None and value is not False and value != "":
                if key in self.opts[::2]:
                    raise UserError(f"--{name} and {key} set the same value: leave one out")
                text = {"weights": find_weights, "freeze": lambda _: str(FREEZE_ALL)}
                pairs += [key, text.get(name, str)(value)]
        given = [*pairs, *map(str, self.opts)]
        if "SOLVER.EPOCHS" in given[::2] and "SOLVER.MIN_ITER" not in given[::2]:
            given += ["SOLVER.MIN_ITER", "0"]  # exactly the given number of epochs
        return given

    def load_config(self) -> CfgNode:
        """Builds the config from the flags, without the keys that depend on the data sets.

        Raises:
            UserError: the config is invalid, or the weights are for another task (boxes, classes,
                images) than the data.
        """
        cfg = self._load_config()
        if self.image_size is not None:
            _set_image_size(cfg, self.image_size, self.overrides, eval_only=self.eval_only)
        return cfg

    def _load_config(self) -> CfgNode:
        opts, weights = self._list_overrides(), self.overrides.get("MODEL.WEIGHTS", "")
        if self.config_file or (self.eval_only and not weights):
            return load_config(self.config_file or None, opts)
        if self.eval_only:
            return load_run_config(weights, opts=opts)
        if not weights:
            return load_config(self.name_default_config(), opts)
        wanted = self._find_job()
        cfg = load_run_config(weights, opts=opts)
        if (job := find_job(cfg)) != wanted:
            raise UserError(
                f"'{weights}' are weights of a model for {job}, but the data are {wanted}: name a "
                f"recipe with --config-file, such as {_DEFAULTS[wanted]}"
            )
        if "OUTPUT_DIR" not in self.overrides:  # the folder of the weights' run is in use
            cfg.OUTPUT_DIR = get_cfg().OUTPUT_DIR
        return cfg

    def name_default_config(self) -> str:
        """Returns the shipped config for the kind of data, for commands that name no config."""
        return _DEFAULTS[self._find_job()]

    def _find_job(self) -> str:
        if self.data:
            return "classes" if find_format(self.data) == "classes" else "boxes"
        if not self.images:
            raise UserError("name what to train on: --data SRC, or --images DIR for pre-training")
        return "images"


def _set_image_size(
    cfg: CfgNode, size: int, overrides: Mapping[str, str], *, eval_only: bool
) -> None:
    """Sets the image size in place, see ``RunFlags``.

    Raises:
        UserError: the size is below 32, or an override also sets an image size.
    """
    node, is_detector = cfg.INPUT, find_job(cfg) == "boxes"
    keys = SIZES if is_detector else ("PRETRAIN.SIZE",)
    if same := next((key for key in keys if f"INPUT.{key}" in overrides), None):
        raise UserError(f"--image-size and INPUT.{same} both set the image size: leave one out")
    if size < _SMALLEST:
        raise UserError(f"--image-size is {size}, but must be at least {_SMALLEST}")
    if not is_detector:
        node.PRETRAIN.SIZE = size
        return
    share = size / max(1, node.MIN_SIZE_TEST if eval_only else max(node.MIN_SIZE_TRAIN))
    for key in SIZES:
        old = node[key]
        node[key] = round(share * old) if isinstance(old, int) else [round(share * o) for o in old]
    node.MIN_SIZE_TRAIN = tuple(node.MIN_SIZE_TRAIN)


def _list_folders(given: str | os.PathLike[str] | Iterable[str]) -> list[str]:
    folders = [given] if isinstance(given, str | os.PathLike) else given
    return [str(folder) for folder in folders]


def find_job(cfg: CfgNode) -> str:
    """Returns the kind of data that a config trains on: "boxes", "classes" or "images"."""
    mapper = cfg.INPUT.DATASET_MAPPER_NAME
    if mapper in MAPPERS_OF_CLASSES:
        return "classes"
    return "images" if mapper in MAPPERS_OF_IMAGES else "boxes"
