# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The table of formats of data sets with boxes.

A new format is one file with a ``Format``, and one row in ``FORMATS``. If a folder has labels in
several formats, the first of them in this table is read.
"""

from .base import Format, Labels, LabelSet
from .coco import COCO
from .createml import CREATEML
from .cvat import CVAT
from .dota import DOTA
from .hugging_face import HUGGING_FACE
from .kitti import KITTI
from .label_studio import LABEL_STUDIO
from .labelme import LABELME
from .supervisely import SUPERVISELY
from .table import TABLE
from .via import VIA
from .voc import VOC
from .vott import VOTT
from .yolo import YOLO

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        COCO,
        YOLO,
        VOC,
        CREATEML,
        LABEL_STUDIO,
        CVAT,
        VIA,
        LABELME,
        SUPERVISELY,
        VOTT,
        DOTA,
        KITTI,
        HUGGING_FACE,
        TABLE,
    )
}

__all__ = ["FORMATS", "Format", "LabelSet", "Labels"]
