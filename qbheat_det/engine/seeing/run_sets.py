# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The data that a finished run was trained and judged on, found again.

A config names sets, and those made by flags such as ``--val-json`` are gone with the process that
made them. The command in ``run.json`` says what they were. They are registered anew under names of
the run's own: of two runs that are compared, each may have its ``--val-json``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    MAPPERS_OF_IMAGES,
    check_image_folder,
    register_coco_images,
    register_image_folders,
)
from qbheat_det.engine.data_flags import (
    CUSTOM_SETS,
    add_data_flags,
    add_image_flags,
    register_coco_file,
)
from qbheat_det.engine.run_record import RUN_FILE, read_run_record

from .refusal import NothingToSee

Split = Literal["test", "train"]


def find_run_set(cfg: CfgNode, folder: Path | None, split: Split) -> str:
    """Returns the name under which the first set of a split is registered here.

    Args:
        cfg: of the run.
        folder: of the run, where ``run.json`` may be; None if there is none.
        split: "test" for what the run was judged on.

    Raises:
        NothingToSee: the run had none, or it is not here.
    """
    names = cfg.DATASETS.TEST if split == "test" else cfg.DATASETS.TRAIN
    if not names:
        raise NothingToSee(f"the config names no {split} set")
    name = str(names[0])
    try:
        if name in CUSTOM_SETS:
            name = _register_anew(cfg, folder, name, split)
        if name not in DatasetCatalog:
            raise NothingToSee(f"the {split} set '{name}' is not registered here")
        DatasetCatalog.get(name)  # is read once more by whoever wants it: sets are small
    except (UserError, OSError) as error:
        raise NothingToSee(f"the {split} set cannot be read here: {error}") from error
    return name


def _register_anew(cfg: CfgNode, folder: Path | None, name: str, split: Split) -> str:
    flags = read_data_flags(folder)
    if flags is None:
        raise NothingToSee(
            f"the {split} set was named by flags, and there is no {RUN_FILE} that tells them"
        )
    own = f"{name} of {folder}"
    if own in DatasetCatalog:
        return own
    prefix = "val" if split == "test" else "train"
    json_file = getattr(flags, f"{prefix}_json")
    images = getattr(flags, f"{prefix}_images")
    class_folder = getattr(flags, f"{prefix}_folder")
    folders = flags.val_image_folder if split == "test" else flags.image_folder
    mapper = cfg.INPUT.DATASET_MAPPER_NAME
    if json_file and images and mapper in MAPPERS_OF_IMAGES:
        register_coco_images(own, json_file, images)
    elif json_file and images:
        register_coco_file(own, json_file, images)
    elif class_folder or folders:
        chosen: Sequence[str] = [class_folder] if class_folder else folders
        for path in chosen:
            check_image_folder(path)
        register_image_folders(
            own, chosen, labelled=bool(class_folder) and mapper in MAPPERS_OF_CLASSES
        )
    else:
        raise NothingToSee(f"{RUN_FILE} does not tell what the {split} set was")
    return own


def read_data_flags(folder: Path | None) -> argparse.Namespace | None:
    """Returns the flags that named a run's data; None where no record of its command is there.

    Raises:
        NothingToSee: the record is not one of this version.
    """
    starts = read_run_record(folder / RUN_FILE) if folder is not None else []
    if not starts or not isinstance(starts[-1].get("command"), list):
        return None
    parser = _SilentParser(add_help=False)
    add_data_flags(parser)
    add_image_flags(parser)
    return parser.parse_known_args([str(part) for part in starts[-1]["command"][1:]])[0]


class _SilentParser(argparse.ArgumentParser):
    """What it cannot read is a record of another version, not a mistake on the command line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise NothingToSee(f"the command in {RUN_FILE} cannot be read: {message}")
