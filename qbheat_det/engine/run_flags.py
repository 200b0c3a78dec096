# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The flags of a training or evaluation, from the command line or Python."""

import argparse
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from qbheat_det.checkpoint import find_weights
from qbheat_det.core.errors import UserError
from qbheat_det.data import read_class_map

FREEZE_ALL = 9
"""Value of ``MODEL.BACKBONE.FREEZE_AT`` that freezes every backbone."""
# Flags that set the value of one config key.
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
# Fields by the type of their values.
_PATHS = ("data", "images", "val", "val_images", "unlabelled")
_TEXTS = ("config_file", "size", "weights", "output", "device")
_SWITCHES = ("resume", "eval_only", "freeze", "allow_partial", "keep_classes")
_POSITIVE = ("epochs", "minutes", "batch", "image_size")
_WHOLE = ("batch", "image_size", "tile")
SIZES = ("s", "m", "l")
"""Values of ``--size``."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags of ``tools/train_net.py`` as attributes of the same names.

    ``RunFlags(data="data.yaml", output="output/mine", opts=["SOLVER.EPOCHS", 20])`` corresponds to
    ``qbheat train --data data.yaml --output output/mine SOLVER.EPOCHS 20``. Paths may be relative
    to the working directory.

    Attributes:
        config_file: path of a config, or name of a shipped one. If empty, the config inside
            ``weights``, or a default for boxes, class folders or images without labels. On a GPU,
            the default for boxes is ``size`` "s".
        size: instead of ``config_file``, a detector's recipe for a GPU: "s", "m" or "l".
        data: training data, or test data with ``eval_only``. Any format that ``--data`` accepts,
            such as a COCO json, a YOLO ``data.yaml``, a Pascal VOC folder or class folders. A
            detector can learn from a list of data sets, whose classes are joined by name. In an
            image of one of them, only the classes of this data set are annotated.
        images: image folder of the COCO json in ``data``, if the images are not next to the json.
            For several data sets, a list with the folder of each, or "" if it needs none. Without
            ``data``, one or several folders of images without labels, for pre-training.
        val: validation data, in the formats of ``data``, also several. Without ``val``, the
            validation part of ``data`` is used. If a data set has none, ``DATASETS.VAL_FRACTION``
            of its images is held out and listed in ``split.json``.
        val_images: the same as ``images``, for ``val``.
        class_map: path of a YAML file, or a dict, that maps class names in ``data`` and ``val`` to
            class names of the detector.
        unlabelled: one or several folders of images without labels, from which a detector learns
            in addition to ``data``.
        weights: ``MODEL.WEIGHTS``; any name that ``find_weights`` accepts.
        output, device, epochs: ``OUTPUT_DIR``, ``MODEL.DEVICE`` and ``SOLVER.EPOCHS``.
        resume: continue the run in ``output``.
        eval_only: evaluate ``weights`` without training.
        minutes: duration for which ``fit_minutes`` chooses epochs, image size and stages.
        batch: ``SOLVER.IMS_PER_BATCH``, images per step over all processes.
        image_size: size in pixels. For detectors, it replaces the largest of
            ``INPUT.MIN_SIZE_TRAIN``, or ``INPUT.MIN_SIZE_TEST`` with ``eval_only``. All other sizes
            are scaled by the same factor. For other models, it is the side of the square images.
        tile: ``INPUT.TILE``, side of overlapping tiles in pixels; 0 uses whole images only.
        freeze: freeze the whole backbone (``MODEL.BACKBONE.FREEZE_AT 9``). Of a recipe with
            ``SOLVER.FIRST_STAGE``, only this stage is trained, on cached features.
        max_left_out: ``DATASETS.MAX_LEFT_OUT``, share of images or boxes that may have faults.
        allow_partial: start from ``weights`` even if they lack tensors of the model, or have extra
            ones.
        keep_classes: keep the classes of ``weights``, which must be a detector, beside those of
            ``data``. Where they are not annotated, they are learned from this detector.
        opts: config overrides, as alternating keys and values.

    Raises:
        UserError: a value has a wrong type, a number is not above 0, ``size`` is unknown, or two
            flags, or a flag and an override, set the same value.
    """

    config_file: str = ""
    size: str = ""
    data: Paths | None = None
    images: Paths = ()
    val: Paths | None = None
    val_images: Paths = ()
    class_map: str | os.PathLike[str] | Mapping[str, str] = ""
    unlabelled: Paths = ()
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
    allow_partial: bool = False
    keep_classes: bool = False
    opts: Sequence[object] = ()

    def __post_init__(self) -> None:
        self._check_types()
        if self.size and self.size not in SIZES:
            raise UserError(f"--size must be {', '.join(SIZES)}, not {self.size!r}")
        if self.size and self.config_file:
            raise UserError("--size and --config-file both name the recipe: leave one out")
        for name, key in _KEYS.items():
            if self._is_given(name) and key in self.opts[::2]:
                raise UserError(f"{spell(name)} and {key} set the same value: leave one out")

    def _check_types(self) -> None:
        """Refuses values of wrong types, such as strings for numbers, and numbers out of range."""
        for name in _PATHS:
            value = getattr(self, name)
            if value is not None and not _are_paths(value):
                raise UserError(f"{spell(name)} must be a path or a list of paths, not {value!r}")
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike):
                raise UserError(f"{spell(name)} must be a string, not {value!r}")
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UserError(f"{spell(name)} must be True or False, not {value!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise UserError(f"{spell(name)} must be a number above 0, not {value!r}")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and not isinstance(value, numbers.Integral):
                raise UserError(f"{spell(name)} must be a whole number, not {value!r}")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "RunFlags":
        """Takes the flags from parsed arguments, which may lack some of them."""
        given = {field.name: getattr(args, field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def data_sets(self) -> list[str]:
        """``data`` as a list."""
        return _list_paths(self.data or ())

    @property
    def val_sets(self) -> list[str]:
        """``val`` as a list."""
        return _list_paths(self.val or ())

    @property
    def image_folders(self) -> list[str]:
        """``images`` as a list."""
        return _list_paths(self.images)

    @property
    def val_image_folders(self) -> list[str]:
        """``val_images`` as a list."""
        return _list_paths(self.val_images)

    @property
    def unlabelled_folders(self) -> list[str]:
        """``unlabelled`` as a list."""
        return _list_paths(self.unlabelled)

    def read_class_map(self) -> dict[str, str]:
        """Returns ``class_map`` as a dict. Raises a ``UserError`` if it is invalid."""
        if isinstance(self.class_map, str | os.PathLike):
            return read_class_map(os.fspath(self.class_map)) if self.class_map else {}
        if not isinstance(self.class_map, Mapping):
            raise UserError(f"class_map must be a file or a dict, not {self.class_map!r}")
        for name in (*self.class_map, *self.class_map.values()):
            if not isinstance(name, str):
                raise UserError(f"class_map maps class names, which are strings, not {name!r}")
        return dict(self.class_map)

    @property
    def overrides(self) -> dict[str, str]:
        """Config overrides by key, from flags and ``opts``.

        Raises:
            UserError: ``opts`` has a key without a value, or ``weights`` is an unknown name.
        """
        if len(self.opts) % 2:
            raise UserError(f"overrides are KEY VALUE pairs, but '{self.opts[-1]}' has no partner")
        overrides: dict[str, str] = {}
        for name, key in _KEYS.items():
            if self._is_given(name):
                overrides[key] = str(getattr(self, name))
        if self.weights:
            overrides["MODEL.WEIGHTS"] = find_weights(self.weights)
        if self.freeze:
            overrides["MODEL.BACKBONE.FREEZE_AT"] = str(FREEZE_ALL)
        for word, value in zip(self.opts[::2], self.opts[1::2], strict=True):
            overrides[str(word)] = str(value)
        if "SOLVER.EPOCHS" in overrides:  # exactly the given number of epochs
            overrides.setdefault("SOLVER.MIN_ITER", "0")
        return overrides

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False and value != ""


def spell(flag: str) -> str:
    """Returns an attribute of ``RunFlags`` as it is written on the command line."""
    return f"--{flag.replace('_', '-')}"


def _are_paths(given: object) -> bool:
    """Whether a value is a path, or a list of paths."""
    if isinstance(given, str | os.PathLike):
        return True
    if not isinstance(given, Sequence):
        return False
    return all(isinstance(path, str | os.PathLike) for path in given)


def _list_paths(given: Paths) -> list[str]:
    if isinstance(given, str | os.PathLike):
        return [os.fspath(given)]
    return [os.fspath(folder) for folder in given]
