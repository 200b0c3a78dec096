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
from qbheat_det.inference.exported import ExportedModel, Images, Outputs, Task, split_detections

logger = logging.getLogger(__name__)
BATCH_SIZES = (1, 2, 8)
Reference = Callable[[Images], Outputs]
"""Takes one image (H, W, 3) in the file's pixel format, and returns its outputs with N = 1."""


@dataclass
class Agreement:
    """Largest differences between a file and PyTorch, over all images at one batch size.

    Attributes:
        batch_size: number of images that the file processes at once.
        num_images: number of compared images.
        num_values: number of compared pairs of detections, class scores or feature values.
        score: largest difference of scores. For features, the largest difference relative to the
            largest value of the feature map. Infinite if either result is not finite.
        box: largest difference of box coordinates, in pixels of the image.
        relative_box: largest difference of box coordinates, divided by the image's longer side.
        unmatched: number of detections above the threshold that only one of the two results has.
    """

    batch_size: int
    num_images: int = 0
    num_values: int = 0
    score: float = 0.0
    box: float = 0.0
    relative_box: float = 0.0
    unmatched: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether neither the file nor PyTorch detects anything, so nothing can be compared."""
        return self.num_values == 0 and self.unmatched == 0 and self.score == 0

    def holds(self, tolerance: float) -> bool:
        """Returns whether there are results and all differences are at most ``tolerance``.

        The differences are ``score`` and ``relative_box``. No detection may be unmatched.
        """
        has_results = self.num_values > 0
        is_close = max(self.score, self.relative_box) <= tolerance
        return has_results and is_close and self.unmatched == 0


@dataclass
class ExportReport:
    """Differences of an exported file from PyTorch, one row per batch size. ``str`` gives a table.

    Attributes:
        rows: differences for each batch size.
        task: task of the model.
        tolerance: largest allowed difference of scores and relative boxes.
        source: description of the images.
        is_held: whether the table marks rows that exceed the tolerance.
    """

    rows: list[Agreement]
    task: Task
    tolerance: float
    source: str
    is_held: bool = True

    def __str__(self) -> str:
        has_boxes = self.task == "detection"
        header = "batch  images  compared  difference"
        if has_boxes:
            header += "  box (px)  unmatched"
        lines = [header]
        for row in self.rows:
            line = f"{row.batch_size:>5}  {row.num_images:>6}  {row.num_values:>8}"
            line += f"  {row.score:>10.1e}"
            if has_boxes:
                line += f"  {row.box:>8.1e}  {row.unmatched:>9}"
            if self.is_held and not row.holds(self.tolerance):
                line += "  no detections" if row.is_empty else "  differs"
            lines.append(line)
        footer = "for information"
        if self.is_held:
            footer = f"tolerance {self.tolerance:g}"
            if has_boxes:
                footer += ", of boxes relative to the image's longer side"
        lines.append(f"{footer}; {self.source}")
        return "\n".join(lines)

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
        tolerance: largest allowed difference of scores, and of boxes relative to the image's side.
        source: description of the images, for the report.
    """
    info = model.info
    rows = []
    for batch_size in BATCH_SIZES:
        logger.info(
            "Comparing with PyTorch on %d images, in batches of %d …", len(images), batch_size
        )
        row = Agreement(batch_size)
        for batch in _make_batches(images, batch_size, info.image_size):
            outputs = model.run(batch)
            for index, image in enumerate(batch):
                # With N = 1, as in the outputs of the reference.
                results = {name: value[index : index + 1] for name, value in outputs.items()}
                expected = reference(image)
                row.num_images += 1
                if info.task == "detection":
                    image_size = image.shape[:2]
                    compare_detections(
                        row, results, expected, info.score_threshold, image_size, tolerance
                    )
                else:
                    is_relative = info.task == "features"
                    compare_values(row, results, expected, is_relative=is_relative)
        rows.append(row)
    return ExportReport(rows, info.task, tolerance, source)


def build_reference(predictor: DefaultPredictor, cfg: CfgNode, task: Task) -> Reference:
    """Returns the function that computes the outputs of one image in PyTorch."""
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
        shortest_edge = [cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MIN_SIZE_TEST]
        resize = ResizeShortestEdge(shortest_edge, cfg.INPUT.MAX_SIZE_TEST).get_transform(image)
        pixels = torch.from_numpy(resize.apply_image(image).copy()).permute(2, 0, 1)  # (3, H, W)
        normalised = (pixels.to(model.device) - model.pixel_mean) / model.pixel_std
        padded = ImageList.from_tensors([normalised], model.backbone.size_divisibility)
        features = model.backbone(padded.tensor)
        return {name: feature_map.cpu().numpy() for name, feature_map in features.items()}

    compute = {"detection": detect, "classification": classify, "features": encode}[task]
    return torch.no_grad()(lambda image: compute(np.ascontiguousarray(image)))


def _make_batches(
    images: Sequence[Images], size: int, image_size: tuple[int, ...] = ()
) -> list[Images]:
    """Returns the images as batches (N, H, W, 3), where N is ``size``.

    The images of a batch are cropped or tiled to ``image_size`` (H, W), or if it is empty, to the
    median height and width of the batch. Darker copies of images fill the last batch.
    """
    batches = []
    for start in range(0, len(images), size):
        batch = []
        for number in range(start, start + size):
            round_number, index = divmod(number, len(images))
            # Copies are darker in each round. In the first round, images are not changed.
            batch.append(images[index] // (round_number + 1))
        common_size = image_size
        if not common_size:
            height = int(np.median([image.shape[0] for image in batch]))
            width = int(np.median([image.shape[1] for image in batch]))
            common_size = (height, width)
        batches.append(np.stack([fit_image(image, common_size) for image in batch]))
    return batches


def fit_image(image: Images, size: tuple[int, ...]) -> Images:
    """Crops or tiles an image (H, W, 3) to ``size`` (H', W'); an empty size changes nothing."""
    for axis, length in enumerate(size):
        # "wrap" repeats the image if it is shorter than ``length``.
        image = image.take(range(length), axis, mode="wrap")
    return image


def compare_values(row: Agreement, got: Outputs, expected: Outputs, *, is_relative: bool) -> None:
    """Updates ``row`` with the differences of the scores or features of an image.

    If ``is_relative``, the differences of an output are divided by its largest expected value.
    """
    for name, value in expected.items():
        scale = 1.0
        if is_relative:
            scale = float(np.abs(value).max()) or 1.0  # no division by 0 if all values are 0
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
    """Matches the detections of file and PyTorch one-to-one, and updates ``row``.

    Matched detections have the same class, and similar scores and boxes. A detection may stay
    unmatched if its score is at most ``tolerance`` above ``threshold``. If one result contains as
    many detections as the file can return, the lowest of its scores replaces a lower ``threshold``
    for the other result.

    Args:
        row: differences of all images so far.
        got: outputs of the file for one image, N = 1.
        expected: outputs of PyTorch for the same image, N = 1.
        threshold: lowest score of a detection.
        size: (H, W) of the image in pixels.
        tolerance: largest allowed difference of scores, and of boxes relative to the longer side.
    """
    height, width = size
    longer_side = max(size)
    ours = split_detections(got, (height, width))[0]  # A detections
    theirs = split_detections(expected, (height, width))[0]  # B detections
    our_boxes = ours.pred_boxes.astype(np.float64)  # (A, 4)
    their_boxes = theirs.pred_boxes.astype(np.float64)  # (B, 4)
    our_scores = ours.scores.astype(np.float64)  # (A,)
    their_scores = theirs.scores.astype(np.float64)  # (B,)
    for values in (our_boxes, their_boxes, our_scores, their_scores):
        if not np.isfinite(values).all():
            row.score = np.inf
            return

    # Differences between all pairs of detections, (A, B) each.
    box_gap = np.abs(our_boxes[:, None] - their_boxes[None]).max(axis=2, initial=0.0)
    score_gap = np.abs(our_scores[:, None] - their_scores[None])
    is_other_class = ours.pred_classes[:, None] != theirs.pred_classes[None]
    max_gap = max(10 * tolerance, 0.01)  # detections that differ more are not the same
    is_too_far = np.maximum(score_gap, box_gap / longer_side) > max_gap
    cannot_match = is_other_class | is_too_far

    cost = score_gap + box_gap / longer_side + 10 * cannot_match
    our_index, their_index = linear_sum_assignment(cost)
    is_match = ~cannot_match[our_index, their_index]
    our_index = our_index[is_match]
    their_index = their_index[is_match]
    row.num_values += len(our_index)

    score_difference = _largest(score_gap[our_index, their_index])
    rises = np.diff(our_scores).clip(min=0)  # scores must be in descending order
    row.score = max(row.score, score_difference, _largest(rises))
    box_difference = _largest(box_gap[our_index, their_index])
    row.box = max(row.box, box_difference)
    row.relative_box = max(row.relative_box, box_difference / longer_side)

    # Rounding decides whether detections at the threshold, or at the end of a full table, are
    # listed. So a detection counts as unmatched only if its score clearly exceeds the lowest score
    # that the other result can contain.
    num_rows = got["boxes"].shape[1]
    our_lowest = threshold
    if len(our_scores) >= num_rows:
        our_lowest = max(threshold, our_scores.min())
    their_lowest = threshold
    if len(their_scores) >= num_rows:
        their_lowest = max(threshold, their_scores.min())
    our_unmatched = np.delete(our_scores, our_index)
    their_unmatched = np.delete(their_scores, their_index)
    row.unmatched += int((our_unmatched > their_lowest + tolerance).sum())
    row.unmatched += int((their_unmatched > our_lowest + tolerance).sum())


def _largest(values: npt.NDArray[Any]) -> float:
    """Returns the largest absolute value: 0 if there is none, infinite if one is not finite."""
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        return np.inf
    return largest
