# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's boxes as RetinaNet, FCOS and Faster R-CNN of the YAML configs read them."""

from detectron2.config import LazyCall as L
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data import transforms as T
from omegaconf import OmegaConf

from qbheat_det.evaluation import CocoEvaluator

from .constants import constants

dataloader = OmegaConf.create()
dataloader.train = L(build_detection_train_loader)(
    dataset=L(get_detection_dataset_dicts)(names="coco_2017_train"),
    mapper=L(DatasetMapper)(
        is_train=True,
        augmentations=[
            L(T.ResizeShortestEdge)(
                short_edge_length=[640, 672, 704, 736, 768, 800],
                sample_style="choice",
                max_size=1333,
            ),
            L(T.RandomFlip)(horizontal=True),
        ],
        image_format=constants.pixel_format,
        use_instance_mask=False,
    ),
    total_batch_size=16,
    num_workers=4,
)
dataloader.test = L(build_detection_test_loader)(
    dataset=L(get_detection_dataset_dicts)(names="coco_2017_val", filter_empty=False),
    mapper=L(DatasetMapper)(
        is_train=False,
        augmentations=[L(T.ResizeShortestEdge)(short_edge_length=800, max_size=1333)],
        image_format="${...train.mapper.image_format}",
    ),
    num_workers=4,
)
dataloader.evaluator = L(CocoEvaluator)(dataset_name="${..test.dataset.names}")
