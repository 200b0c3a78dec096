# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's boxes with DETR's augmentation, as MF-DETR of the YAML configs reads them."""

from detectron2.config import LazyCall as L
from detectron2.data import transforms as T

from qbheat_det.data import build_detr_crop

from .coco import dataloader

dataloader.train.dataset.filter_empty = False  # DETR trains on images without boxes too
dataloader.train.mapper.augmentations = [
    L(build_detr_crop)(resize_to=[400, 500, 600], crop_range=[384, 600]),
    L(T.ResizeShortestEdge)(
        short_edge_length=[480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800],
        sample_style="choice",
        max_size=1333,
    ),
    L(T.RandomFlip)(horizontal=True),
]
