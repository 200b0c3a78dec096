# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fits the number of detections that a detector keeps per image to the objects in the data.

Detectron2 keeps 100 detections per image, and COCO's AP counts as many. On images with more
objects, even perfect predictions would have a low AP.
"""

import logging
from collections.abc import Mapping

from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.logger import log_first_n

from qbheat_det.config import get_value
from qbheat_det.evaluation import MAX_DETECTIONS, STANDARD_DETECTIONS, choose_max_detections

_DETECTIONS = "TEST.DETECTIONS_PER_IMAGE"
_QUERIES = "MODEL.MF_DETR.NUM_OBJECT_QUERIES"
# Candidates before NMS on each level (in all, for POST_NMS_TOPK_TEST), per detection that is kept.
_CANDIDATES = {
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": 5,
    "MODEL.FCOS.TOPK_CANDIDATES_TEST": 5,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 5,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 2,
}


def fit_detection_limits(
    cfg: CfgNode,
    overrides: Mapping[str, str],
    *,
    max_objects_train: int,
    max_objects_test: int,
) -> dict[str, int]:
    """Returns higher limits of detections per image, if an image has more than 100 objects.

    The limits are ``TEST.DETECTIONS_PER_IMAGE`` and the numbers of candidates of RetinaNet, FCOS
    and Detectron2's RPN. In training, they also include the queries of an MF-DETR with query
    selection. (The weights of other MF-DETRs depend on the number of queries.) Crowds do not count
    as objects. A limit that is already higher, or that the user has set, does not change; if it is
    too low, a warning says so.

    Args:
        cfg: config of the run.
        overrides: the values that the user has set, by config key.
        max_objects_train: largest number of objects in a training image; 0 in evaluation, where
            the number of queries is that of the weights.
        max_objects_test: largest number of objects in a test image.

    Returns:
        The values that change, by config key.
    """
    most = max(max_objects_train, max_objects_test)
    if most <= STANDARD_DETECTIONS:
        return {}
    limit = choose_max_detections(most)
    wanted = {_DETECTIONS: limit}
    if _DETECTIONS not in overrides:
        wanted |= {key: factor * limit for key, factor in _CANDIDATES.items()}
    # The validation data may change in a resumed run, but the number of queries may not.
    if max_objects_train > STANDARD_DETECTIONS and cfg.MODEL.MF_DETR.QUERY_SELECTION.ENABLED:
        wanted[_QUERIES] = choose_max_detections(max_objects_train)
    raised = {}
    for key, value in wanted.items():
        if key not in overrides and get_value(cfg, key) < value:
            raised[key] = value

    shown = _QUERIES if cfg.MODEL.META_ARCHITECTURE == "MFDETR" else _DETECTIONS
    before = get_value(cfg, shown)
    after = raised.get(shown, before)
    crowded = f"an image has {most:,} objects"
    if after < most:
        advice = ""
        if shown in raised:
            advice = f"; the largest automatic value is {MAX_DETECTIONS:,}"
        _warn(f"{crowded}, but {shown} is {after:,}: the others are missed{advice}")
    elif shown in raised:
        _warn(f"{crowded}, so {shown} is {after:,} instead of {before:,}")
    return raised


def _warn(text: str) -> None:
    if comm.is_main_process():
        log_first_n(logging.WARNING, text, key="message", name=__name__)
