# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The paths of a run's custom data sets: recorded in ``run.json``, and registered from there.

A source has ``json_file`` and ``image_root``, or ``image_folders``; and ``labelled``, whether boxes
or the names of folders are read.
"""

from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.data import register_coco_images, register_image_folders

from .data_flags import CUSTOM_SETS, register_coco_file

Source = dict[str, Any]


def find_sources(cfg: CfgNode) -> dict[str, Source]:
    """Returns the sources of the sets that flags named, by the set's name.

    Args:
        cfg: ``DATASETS.TRAIN``, ``DATASETS.TEST`` and ``TEST.KNN`` are read.
    """
    knn = cfg.TEST.KNN
    used = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST, *knn.TRAIN, *knn.VAL)
    return {name: _find_source(name) for name in used if name in CUSTOM_SETS}


def _find_source(name: str) -> Source:
    metadata = MetadataCatalog.get(name)
    if metadata.get("image_folders"):
        folders = list(metadata.image_folders)
        return {"image_folders": folders, "labelled": bool(metadata.get("labelled"))}
    return {
        "json_file": metadata.json_file,
        "image_root": metadata.image_root,
        "labelled": not metadata.get("unlabelled"),
    }


def register_source(name: str, source: Source) -> None:
    """Registers a set under a name, unless it is registered already.

    Args:
        name: free to choose.
        source: as ``find_source`` returns it.

    Raises:
        UserError: a file or folder is missing or broken.
    """
    if name in DatasetCatalog:
        return
    if "image_folders" in source:
        register_image_folders(name, source["image_folders"], labelled=source["labelled"])
    elif source["labelled"]:
        register_coco_file(name, source["json_file"], source["image_root"])
    else:
        register_coco_images(name, source["json_file"], source["image_root"])
