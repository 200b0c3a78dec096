# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fits the number of detections that a detector keeps per image to the objects in the data.

Detectron2 keeps 100 detections per image, and COCO's AP counts as many. On images with more
objects, even perfect predictions would have a low AP.
"""

import logging
from collections.abc import Iterable, Mapping

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils import comm
from detectron2.utils.logger import log_first_n

from qbheat_det.config import get_value
from qbheat_det.data import MAPPERS_OF_IMAGES
from qbheat_det.evaluation import (
    MAX_DETECTIONS,
    STANDARD_DETECTIONS,
    choose_max_detections,
    count_most_objects,
)

_DETECTIONS = "TEST.DETECTIONS_PER_IMAGE"
_QUERIES = "MODEL.MF_DETR.NUM_OBJECT_QUERIES"
# Candidates before NMS on each level (in all, for POST_NMS_TOPK_TEST), per detection that is kept.
_CANDIDATES = {
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": 5,
    "MODEL.FCOS.TOPK_CANDIDATES_TEST": 5,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 5,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 2,
}


def fit_detection_limits(cfg: CfgNode, given: Mapping[str, str], *, eval_only: bool) -> None:
    """Raises the limits of detections per image, in place, if an image has more than 100 objects.

    The limits are ``TEST.DETECTIONS_PER_IMAGE`` and the numbers of candidates of RetinaNet, FCOS
    and Detectron2's RPN. In training, they also include the queries of an MF-DETR with query
    selection. (The weights of other MF-DETRs depend on the number of queries.) Crowds do not count
    as objects. A limit that is already higher, or that the user has set, does not change; if it is
    too low, a warning says so.

    All processes of a run must call this function, after the data sets are registered.

    Args:
        cfg: config of the run, with the names of the data sets.
        given: the values that the user has set, by config key.
        eval_only: only the test sets are used, and the number of queries is that of the weights.
    """
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        return
    trained_on = 0 if eval_only else _share_most_objects(cfg.DATASETS.TRAIN)
    most = max(trained_on, _share_most_objects(cfg.DATASETS.TEST))
    if most <= STANDARD_DETECTIONS:
        return
    limit = choose_max_detections(most)
    wanted = {_DETECTIONS: limit}
    if _DETECTIONS not in given:
        wanted |= {key: factor * limit for key, factor in _CANDIDATES.items()}
    # The validation data may change in a resumed run, but the number of queries may not.
    if trained_on > STANDARD_DETECTIONS and cfg.MODEL.MF_DETR.QUERY_SELECTION.ENABLED:
        wanted[_QUERIES] = choose_max_detections(trained_on)
    shown = _QUERIES if cfg.MODEL.META_ARCHITECTURE == "MFDETR" else _DETECTIONS
    before = get_value(cfg, shown)
    raised = {
        key: value
        for key, value in wanted.items()
        if key not in given and get_value(cfg, key) < value
    }
    cfg.merge_from_list([word for pair in raised.items() for word in pair])
    kept = get_value(cfg, shown)
    found = f"an image has {most:,} objects"
    if kept < most:
        advice = f"; the largest automatic value is {MAX_DETECTIONS:,}" * (shown in raised)
        _warn(f"{found}, but {shown} is {kept:,}: the others are missed{advice}")
    elif shown in raised:
        _warn(f"{found}, so {shown} is {kept:,} instead of {before:,}")


def _share_most_objects(names: Iterable[str]) -> int:
    """Returns the largest number of objects in an image; equal on all processes."""
    most = 0
    if comm.is_main_process():
        most = max(map(_count_most_objects, names), default=0)
    return comm.all_gather(most)[0]


def _count_most_objects(name: str) -> int:
    """Returns the largest number of objects in an image of a registered data set."""
    known: int | None = MetadataCatalog.get(name).get("most_objects")
    if known is not None:  # the flags have given this data set
        return known
    return count_most_objects(
        {**annotation, "image_id": index}
        for index, record in enumerate(DatasetCatalog.get(name))
        for annotation in record.get("annotations", ())
    )


def _warn(text: str) -> None:
    if comm.is_main_process():
        log_first_n(logging.WARNING, text, key="message", name=__name__)
