# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parts of images without annotations, as pre-training of the YAML configs reads them."""

from detectron2.config import LazyCall as L
from detectron2.data import build_detection_train_loader, get_detection_dataset_dicts
from omegaconf import OmegaConf

from qbheat_det.data import PretrainingMapper

from .constants import constants

dataloader = OmegaConf.create()
dataloader.train = L(build_detection_train_loader)(
    dataset=L(get_detection_dataset_dicts)(names="imagenet_train", filter_empty=False),
    # No memory for decoded images here: this loader does not show the mapper all records at once.
    mapper=L(PretrainingMapper)(size=256, pixel_format=constants.pixel_format),
    total_batch_size=1024,
    num_workers=8,
    aspect_ratio_grouping=False,  # all parts have one size
)
