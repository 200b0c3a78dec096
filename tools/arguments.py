# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Flags that several tools share: Detectron2's for training, and those that name data.

Nothing of torch, Detectron2 or the package is imported, so that ``--help`` is fast.
"""

import argparse
import logging
import os
import sys
import warnings

_FOREIGN = (
    "torch|torchvision|torchgen|detectron2|fvcore|iopath|timm|pycocotools|faster_coco_eval|onnx.*|"
    "openvino|matplotlib|PIL|numpy|scipy|sklearn|yaml|tensorboard|pkg_resources|huggingface_hub"
)


def hide_foreign_warnings() -> None:
    """Keeps warnings of other libraries away, as users of a command can do nothing about them.

    Warnings that this package causes are shown, and all of them where ``python -W`` or
    ``PYTHONWARNINGS`` say something else.
    """
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=rf"({_FOREIGN})(\.|$)")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of Detectron2's ``default_argument_parser``."""
    parser.add_argument("--config-file", default="", metavar="FILE", help="path of a config")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in OUTPUT_DIR; start one if there is none",
    )
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate MODEL.WEIGHTS, or with --resume the last checkpoint of OUTPUT_DIR",
    )
    parser.add_argument("--num-gpus", type=int, default=1, help="number of GPUs *per machine*")
    parser.add_argument("--num-machines", type=int, default=1, help="total number of machines")
    parser.add_argument(
        "--machine-rank", type=int, default=0, help="the rank of this machine (unique per machine)"
    )
    # Two runs of one user on a machine get different ports, unless user ids collide.
    port = 2**15 + 2**14 + hash(os.getuid() if hasattr(os, "getuid") else 1) % 2**14
    parser.add_argument(
        "--dist-url",
        default=f"tcp://127.0.0.1:{port}",
        help="initialization URL for pytorch distributed backend",
    )
    parser.add_argument(
        "opts",
        nargs="*",
        default=[],
        metavar="KEY VALUE",
        help="overrides of the config, such as SOLVER.IMS_PER_BATCH 4",
    )


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the four flags that name COCO-format data."""
    group = parser.add_argument_group("custom dataset in COCO format")
    group.add_argument("--train-json", metavar="FILE", help="annotations to train on")
    group.add_argument("--train-images", metavar="DIR", help="folder of their images")
    group.add_argument(
        "--val-json", metavar="FILE", help="annotations to evaluate on; training needs them too"
    )
    group.add_argument("--val-images", metavar="DIR", help="folder of their images")


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name images for pre-training, classifiers and nearest neighbours."""
    group = parser.add_argument_group("custom images for pre-training")
    group.add_argument(
        "--image-folder",
        metavar="DIR",
        action="append",
        help="train on all images in this folder and below it, without labels; can be repeated. "
        "--train-json and --train-images take the images of an annotation file instead",
    )
    group.add_argument(
        "--val-image-folder",
        metavar="DIR",
        action="append",
        help="held-out images, on which the loss is evaluated; can be repeated",
    )
    group.add_argument(
        "--knn-train-folder",
        metavar="DIR",
        help="class folders whose images vote in a nearest-neighbour score of the backbone",
    )
    group.add_argument(
        "--knn-val-folder", metavar="DIR", help="class folders whose images it classifies"
    )
    group = parser.add_argument_group("custom images in class folders, for classifiers")
    group.add_argument(
        "--train-folder",
        metavar="DIR",
        help="train on the images below this folder; its subfolders are the classes",
    )
    group.add_argument(
        "--val-folder", metavar="DIR", help="class folders to evaluate on, of the same classes"
    )
    group.add_argument(
        "--knn",
        action="store_true",
        help="also score the backbone by nearest neighbours: images of --train-folder vote, those "
        "of --val-folder are classified",
    )
