# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compares the results of an exported file and of the PyTorch model on images.

The PyTorch model processes images one by one. Detectors use Detectron2's ``DefaultPredictor``, and
classifiers use the crop of their mapper. Both resize with Pillow.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.engine import DefaultPredictor
from detectron2.structures import ImageList
from PIL.Image import Resampling
from PIL.Image import fromarray as to_pillow
from scipy.optimize import linear_sum_assignment

from qbheat_det.core.errors import UserError
from qbheat_det.inference.exported import ExportedModel, Images, Outputs, Task, to_instances

logger = logging.getLogger(__name__)
BATCH_SIZES = (1, 2, 8)
Reference = Callable[[Images], Outputs]
"""Takes one image (H, W, 3) in the file's pixel format, and returns its outputs with N = 1."""


@dataclass
class Agreement:
    """Largest differences between a file and PyTorch, over all images at one batch size."""

    batch_size: int
    num_images: int = 0
    num_values: int = 0  # compared pairs of detections, class scores or feature values
    # Largest difference of scores, or of features relative to the largest value of their map.
    # Infinite if either result is not finite.
    score: float = 0.0
    box: float = 0.0  # largest difference of box coordinates, in pixels of the image
    relative_box: float = 0.0  # ``box`` divided by the longer side of the image
    unmatched: int = 0  # detections above the threshold that only one of the two results has

    @property
    def is_empty(self) -> bool:
        """Whether neither the file nor PyTorch detects anything, so nothing can be compared."""
        return not (self.num_values or self.unmatched or self.score)

    def holds(self, tolerance: float) -> bool:
        """Returns whether there are results and all differences are at most ``tolerance``."""
        is_close = max(self.score, self.relative_box) <= tolerance
        return is_close and not self.unmatched and self.num_values > 0


@dataclass
class ExportReport:
    """Differences of an exported file from PyTorch, one row per batch size. ``str`` gives a table.

    If ``is_held``, the tolerance is a limit, and the table marks rows that exceed it.
    """

    rows: list[Agreement]
    task: Task
    tolerance: float
    source: str
    is_held: bool = True

    def __str__(self) -> str:
        boxes = self.task == "detection"
        lines = ["batch  images  compared  difference" + "  box (px)  unmatched" * boxes]
        for row in self.rows:
            line = f"{row.batch_size:>5}  {row.num_images:>6}  {row.num_values:>8}"
            line += f"  {row.score:>10.1e}" + f"  {row.box:>8.1e}  {row.unmatched:>9}" * boxes
            if self.is_held and not row.holds(self.tolerance):
                line += "  no detections" if row.is_empty else "  differs"
            lines.append(line)
        sides = ", of boxes relative to the image's longer side" * boxes
        held = f"tolerance {self.tolerance:g}{sides}" if self.is_held else "for information"
        return "\n".join([*lines, f"{held}; {self.source}"])

    def check(self) -> None:
        """Raises a ``UserError`` unless ``Agreement.holds`` for every row."""
        if all(row.is_empty for row in self.rows):
            raise UserError(
                "nothing is written: the model detects nothing on these images, so there is "
                f"nothing to compare: name images of its classes with --images\n{self}"
            )
        if not all(row.holds(self.tolerance) for row in self.rows):
            raise UserError(
                "nothing is written: the file differs from PyTorch by more than --tolerance\n"
                f"{self}"
            )


def measure_agreement(
    model: ExportedModel,
    reference: Reference,
    images: Sequence[Images],
    *,
    tolerance: float,
    source: str = "",
) -> ExportReport:
    """Compares a file with PyTorch on all images, for each of ``BATCH_SIZES``.

    Args:
        model: the exported file.
        reference: computes the outputs of one image in PyTorch.
        images: (H, W, 3), uint8, in the file's pixel format. The images of a batch are cropped or
            tiled to the file's image size, or else to the median height and width of the batch.
        tolerance: see ``Agreement.holds``.
        source: description of the images, for the report.
    """
    rows = []
    for size in BATCH_SIZES:
        logger.info("Comparing with PyTorch on %d images, in batches of %d …", len(images), size)
        row = Agreement(size)
        for batch in _make_batches(images, size, model.info.image_size):
            outputs = model.run(batch)
            for index, image in enumerate(batch):
                results = {name: value[index : index + 1] for name, value in outputs.items()}
                expected = reference(image)
                row.num_images += 1
                if model.info.task == "detection":
                    threshold = model.info.score_threshold
                    size = image.shape[:2]
                    compare_detections(row, results, expected, threshold, size, tolerance)
                else:
                    is_relative = model.info.task == "features"
                    compare_values(row, results, expected, is_relative=is_relative)
        rows.append(row)
    return ExportReport(rows, model.info.task, tolerance, source)


def build_reference(predictor: DefaultPredictor, cfg: CfgNode, task: Task) -> Reference:
    """Builds the ``Reference`` of a PyTorch model."""
    model = predictor.model

    def detect(image: Images) -> Outputs:
        bgr = image[:, :, ::-1] if cfg.INPUT.FORMAT == "RGB" else image
        detections = predictor(bgr)["instances"].to("cpu")
        detections = detections[detections.scores.argsort(descending=True)]
        return {
            "boxes": detections.pred_boxes.tensor[None].numpy(),
            "scores": detections.scores[None].numpy(),
            "labels": detections.pred_classes[None].numpy(),
            "counts": np.array([len(detections)]),
        }

    def classify(image: Images) -> Outputs:
        # The same crop as ClassificationMapper, but without its faster JPEG decoding.
        height, width = image.shape[:2]
        side = max(1, round(cfg.INPUT.CLASSIFY.TEST_CROP * min(height, width)))
        top = (height - side) // 2
        left = (width - side) // 2
        square = to_pillow(image[top : top + side, left : left + side])
        resized = square.resize((model.image_size, model.image_size), Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
        return {"scores": model([{"image": pixels}])[0]["scores"][None].cpu().numpy()}

    def encode(image: Images) -> Outputs:
        lengths = [cfg.INPUT.MIN_SIZE_TEST] * 2
        resized = ResizeShortestEdge(lengths, cfg.INPUT.MAX_SIZE_TEST).get_transform(image)
        pixels = torch.from_numpy(resized.apply_image(image).copy()).permute(2, 0, 1)
        normalised = (pixels.to(model.device) - model.pixel_mean) / model.pixel_std
        padded = ImageList.from_tensors([normalised], model.backbone.size_divisibility)
        return {k: v.cpu().numpy() for k, v in model.backbone(padded.tensor).items()}

    compute = {"detection": detect, "classification": classify, "features": encode}[task]
    return torch.no_grad()(lambda image: compute(np.ascontiguousarray(image)))


def _make_batches(
    images: Sequence[Images], size: int, image_size: tuple[int, ...] = ()
) -> list[Images]:
    """Returns batches (N, H, W, 3) of all images; darker copies of images fill the last batch."""
    batches = []
    for start in range(0, len(images), size):
        numbers = range(start, start + size)
        batch = [images[n % len(images)] // (1 + n // len(images)) for n in numbers]
        median = (int(np.median([image.shape[axis] for image in batch])) for axis in (0, 1))
        common = image_size or tuple(median)
        batches.append(np.stack([fit_image(image, common) for image in batch]))
    return batches


def fit_image(image: Images, size: tuple[int, ...]) -> Images:
    """Crops or tiles an image (H, W, 3) to ``size`` (H', W'); an empty size changes nothing."""
    for axis, length in enumerate(size):
        image = image.take(range(length), axis, mode="wrap")
    return image


def compare_values(row: Agreement, got: Outputs, expected: Outputs, *, is_relative: bool) -> None:
    """Updates ``row`` with the differences of scores or features of an image.

    If ``is_relative``, differences are divided by the largest expected value of an output.
    """
    for name, value in expected.items():
        scale = 1.0
        if is_relative:
            scale = float(np.abs(value).max()) or 1.0
        difference = np.inf
        if got[name].shape == value.shape and np.isfinite(scale):
            difference = _largest(got[name] - value) / scale
        row.score = max(row.score, difference)
        row.num_values += value.size


def compare_detections(
    row: Agreement,
    got: Outputs,
    expected: Outputs,
    threshold: float,
    size: Sequence[int],
    tolerance: float,
) -> None:
    """Matches the detections in an image of ``size`` (H, W) one-to-one, and updates ``row``.

    A detection may stay unmatched if its score is at most ``tolerance`` above ``threshold``. If the
    table of the other result is full, its lowest score replaces a lower ``threshold``.
    """
    height, width = size
    ours = to_instances(got, (height, width))[0]
    theirs = to_instances(expected, (height, width))[0]
    boxes = [detections.pred_boxes.tensor.double().numpy() for detections in (ours, theirs)]
    scores = [detections.scores.double().numpy() for detections in (ours, theirs)]
    if not all(np.isfinite(values).all() for values in (*boxes, *scores)):
        row.score = np.inf
        return
    side = max(size)
    box_gap = np.abs(boxes[0][:, None] - boxes[1][None]).max(axis=2, initial=0.0)  # (A, B)
    score_gap = np.abs(scores[0][:, None] - scores[1][None])
    differs = ours.pred_classes.numpy()[:, None] != theirs.pred_classes.numpy()[None]
    differs |= np.maximum(score_gap, box_gap / side) > max(10 * tolerance, 0.01)
    first, second = linear_sum_assignment(score_gap + box_gap / side + 10 * differs)
    matched = ~differs[first, second]
    first, second = first[matched], second[matched]
    row.num_values += len(first)
    rises = np.diff(scores[0]).clip(min=0)  # scores must be in descending order
    row.score = max(row.score, _largest(score_gap[first, second]), _largest(rises))
    row.box = max(row.box, _largest(box_gap[first, second]))
    row.relative_box = max(row.relative_box, _largest(box_gap[first, second]) / side)
    # Rounding decides whether detections at the threshold, or at the end of a full table, are
    # listed. So a detection counts as unmatched only if its score clearly exceeds the lowest score
    # that the other result can contain.
    num_rows = got["boxes"].shape[1]
    ends = [max(threshold, s.min()) if len(s) >= num_rows else threshold for s in scores]
    row.unmatched += int((np.delete(scores[0], first) > ends[1] + tolerance).sum())
    row.unmatched += int((np.delete(scores[1], second) > ends[0] + tolerance).sum())


def _largest(values: npt.NDArray[Any]) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    return largest if np.isfinite(largest) else np.inf
