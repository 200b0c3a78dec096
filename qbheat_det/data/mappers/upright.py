# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's mapper, with the EXIF orientation of TIFF files applied only once."""

import copy
from typing import Any

import numpy as np
import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.detection_utils import check_image_size, transform_proposals

from qbheat_det.data.images import read_image


class UprightMapper(DatasetMapper):
    """Detectron2's mapper, with our ``read_image`` in place of Detectron2's.

    Detectron2's function rotates a TIFF with an EXIF orientation twice: Pillow rotates it when it
    decodes the file, and Detectron2 rotates it again. Otherwise, the results are equal.
    """

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        record = copy.deepcopy(dataset_dict)
        image = read_image(record["file_name"], self.image_format)
        check_image_size(record, image)
        sem_seg = None
        if "sem_seg_file_name" in record:
            sem_seg = read_image(record.pop("sem_seg_file_name"), "L").squeeze(2)
        view = T.AugInput(image, sem_seg=sem_seg)
        transforms = self.augmentations(view)
        record["image"] = torch.as_tensor(np.ascontiguousarray(view.image.transpose(2, 0, 1)))
        if view.sem_seg is not None:
            record["sem_seg"] = torch.as_tensor(view.sem_seg.astype("long"))
        size = view.image.shape[:2]
        if self.proposal_topk is not None:
            transform_proposals(record, size, transforms, proposal_topk=self.proposal_topk)
        if not self.is_train:
            record.pop("annotations", None)
        elif "annotations" in record:
            self._transform_annotations(record, transforms, size)
        return record
