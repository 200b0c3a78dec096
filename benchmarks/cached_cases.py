# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Cases for the benchmark of cached features: recipes, synthetic images, theoretical speedups."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from PIL import Image
from torch import nn

from qbheat_det.config import get_config_path, load_config
from qbheat_det.data import register_coco_json, register_image_folders

# Images of one size only, because the theoretical speedup is computed for one size.
_COCO_SIZE: dict[str, Any] = {
    "INPUT.MIN_SIZE_TRAIN": (800,),
    "INPUT.MAX_SIZE_TRAIN": 1333,
    "INPUT.DETR_CROP_RESIZE": [],
}
# Without CPU support, bfloat16 is not faster.
_IMAGENET: dict[str, Any] = {
    "SOLVER.AMP.ENABLED": False,
    "MODEL.CHANNELS_LAST": True,
}
_NUM_CLASSES = 16
_NUM_BOXES = 7  # per image, as in COCO
_numbers = itertools.count()  # makes the names of data sets unique


@dataclass(frozen=True)
class Case:
    """A head on a frozen encoder.

    Attributes:
        title: name for the printed output.
        config: path of the recipe below ``configs``.
        size: height and width in pixels of the model's input.
        batch: images per step.
        steps: steps per turn, so that a turn is long enough to time.
        file_size: height and width in pixels of the image files.
        opts: config overrides.
    """

    title: str
    config: str
    size: tuple[int, int]
    batch: int
    steps: int = 1
    file_size: tuple[int, int] = (384, 640)
    opts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_boxes(self) -> bool:
        """Whether the images have boxes; otherwise, they are in class folders."""
        return not any(word in self.config for word in ("linear", "tran1", "qb_heat"))


_DETECTION: dict[str, Any] = {"size": (192, 320), "batch": 8, "steps": 2}
_SMALL: dict[str, Any] = {"size": (128, 128), "batch": 64, "steps": 4, "file_size": (240, 320)}
_LARGE: dict[str, Any] = {
    "size": (224, 224),
    "batch": 16,
    "file_size": (375, 500),
    "opts": _IMAGENET,
}
_PAPER: dict[str, Any] = {"size": (800, 1333), "batch": 2, "opts": _COCO_SIZE}
CASES = {
    "3.7g_211": Case("MF-3.7G + MF-Dec-211", "coco/mf_detr_211_3.7G_probe.yaml", **_PAPER),
    "285m_211": Case("MF-285M + MF-Dec-211", "custom/mf_detr_211_285M_probe.yaml", **_DETECTION),
    "285m_retinanet": Case(
        "MF-285M + RetinaNet, 64 channels", "custom/retinanet_285M_probe.yaml", **_DETECTION
    ),
    "285m_linear": Case("MF-285M + linear", "custom/linear_285M_probe.yaml", **_SMALL),
    "285m_tran1": Case("MF-285M + tran-1", "custom/tran1_285M_probe.yaml", **_SMALL),
    "3.7g_linear": Case("MF-3.7G + linear", "ImageNet-probing/linear_3.7G.yaml", **_LARGE),
    "3.7g_tran1": Case("MF-3.7G + tran-1", "ImageNet-probing/tran1_3.7G.yaml", **_LARGE),
}


def shrunk(case: Case) -> Case:
    """Returns the case with two images of 64 pixels per step."""
    opts: dict[str, Any]
    if case.has_boxes:
        size = (64, 107)
        opts = {"INPUT.MIN_SIZE_TRAIN": (64,), "INPUT.MAX_SIZE_TRAIN": 107}
    else:
        size = (64, 64)
        opts = {"INPUT.PRETRAIN.SIZE": 64}
    return replace(case, size=size, batch=2, steps=1, opts={**case.opts, **opts})


@dataclass(frozen=True)
class Bound:
    """Multiply-adds of a forward pass for one image.

    Attributes:
        encoder: multiply-adds of the frozen part.
        head: multiply-adds of the rest.
    """

    encoder: int
    head: int

    @property
    def speedup(self) -> float:
        """Speedup over online if time were proportional to multiply-adds.

        Forward and backward pass of the head count as three forward passes.
        """
        return (self.encoder + 3 * self.head) / (3 * self.head)

    @classmethod
    def of(cls, model: nn.Module, size: tuple[int, int]) -> "Bound":
        """Counts the multiply-adds of a model that contains its encoder."""
        from qbheat_det.evaluation.complexity import CountingRule, count_detector_madds

        counts = count_detector_madds(model, *size)
        name = "backbone"
        if hasattr(model.backbone, "bottom_up"):  # in a feature pyramid, only this is frozen
            name = "backbone.bottom_up"
        encoder = counts.total(CountingRule.CORE, name)
        return cls(encoder, counts.total(CountingRule.CORE) - encoder)


def make_config(case: Case, folder: Path, *, num_images: int) -> CfgNode:
    """Draws images for a case; returns its recipe for them, with one fixed view and no cache."""
    cfg = load_config(get_config_path(case.config))
    cfg.merge_from_list([word for pair in case.opts.items() for word in pair])
    if case.has_boxes:
        dataset = draw_boxes(folder, case.file_size, num_images)
    else:
        dataset = draw_classes(folder, case.file_size, num_images)
    cfg.DATASETS.TRAIN = (dataset,)
    cfg.DATASETS.TEST = ()
    cfg.DATASETS.CHECK_IMAGES = False
    cfg.DATALOADER.NUM_WORKERS = 0  # loading is part of the step
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.INPUT.FIXED_VIEWS.COUNT = 1
    cfg.SOLVER.IMS_PER_BATCH = case.batch
    cfg.SOLVER.REFERENCE_BATCH_SIZE = case.batch
    # The schedule is in steps, so the keys in epochs are 0, which means that they are not used.
    cfg.SOLVER.EPOCHS = 0.0
    cfg.SOLVER.WARMUP_EPOCHS = 0.0
    cfg.SOLVER.STEP_EPOCHS = []
    cfg.SOLVER.CHECKPOINT_EPOCHS = 0.0
    cfg.TEST.EVAL_EPOCHS = 0.0
    cfg.SOLVER.MAX_ITER = 1_000_000  # more than will be run
    cfg.SOLVER.CHECKPOINT_PERIOD = 1_000_000
    cfg.SOLVER.STEPS = ()
    cfg.SOLVER.BASE_LR = 1e-6  # keeps the loss finite in many epochs
    cfg.TEST.EVAL_PERIOD = 0
    cfg.SEED = 1
    cfg.OUTPUT_DIR = str(folder / "output")
    return cfg


def draw_boxes(folder: Path, size: tuple[int, int], num_images: int) -> str:
    """Draws JPEG files with boxes of 80 classes; returns the name of the registered set."""
    generator = np.random.default_rng(0)
    height, width = size
    images = []
    annotations = []
    for number in range(1, num_images + 1):
        name = f"{number:04}.jpg"
        draw_image(generator, folder / "images" / name, size)
        images.append({"id": number, "file_name": name, "height": height, "width": width})
        for _ in range(_NUM_BOXES):
            left = generator.uniform(0, width / 2)
            top = generator.uniform(0, height / 2)
            sides = generator.uniform(height / 16, height / 2, 2)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": int(generator.integers(1, 81)),
                    "bbox": [left, top, *(float(side) for side in sides)],
                    "area": float(sides.prod()),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": f"class {number}"} for number in range(1, 81)]
    contents = {"images": images, "annotations": annotations, "categories": categories}
    json_file = folder / "annotations.json"
    json_file.write_text(json.dumps(contents), encoding="utf-8")
    name = f"cached_training_{next(_numbers)}"
    register_coco_json(name, json_file, folder / "images")
    return name


def draw_classes(folder: Path, size: tuple[int, int], num_images: int) -> str:
    """Draws JPEG files in class folders; returns the name of the registered set."""
    generator = np.random.default_rng(0)
    for number in range(num_images):
        label = number % _NUM_CLASSES
        draw_image(generator, folder / "classes" / f"{label:02}" / f"{number:04}.jpg", size)
    name = f"cached_training_{next(_numbers)}"
    register_image_folders(name, [folder / "classes"], labelled=True)
    return name


def draw_image(generator: np.random.Generator, path: Path, size: tuple[int, int]) -> None:
    """Writes a JPEG with details at several scales, and a file size similar to a photograph."""
    height, width = size
    pixels = np.zeros((height, width, 3), dtype=np.float32)
    for scale in (64, 16, 4, 1):
        shape = (-(-height // scale), -(-width // scale), 3)
        coarse = generator.uniform(0, 255, shape).astype(np.uint8)
        resized = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        pixels += np.asarray(resized, dtype=np.float32) * scale**0.5
    pixels *= 255 / pixels.max()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
