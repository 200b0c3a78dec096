# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether an exported file gives what the model in PyTorch gives, measured on images.

The model in PyTorch sees each image alone, as everywhere in the package: detectors through
Detectron2's ``DefaultPredictor``, classifiers as their mapper crops; all with Pillow's resize.
"""

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
from qbheat_det.engine.media import Image

from .exported_model import ExportedModel, Outputs, to_instances

BATCH_SIZES = (1, 2, 8)
Array = npt.NDArray[Any]
Reference = Callable[[Image], Outputs]
"""From one image (H, W, 3), in the file's pixel format, to the outputs of ``ExportInfo``, N 1."""


@dataclass
class Agreement:
    """How far a file is from PyTorch, over all images of one batch size.

    Attributes:
        batch_size: N.
        num_images: that were compared.
        num_values: pairs of detections, classes or values of maps that were compared.
        score: largest difference of a score; of feature maps, of a value, relative to the largest
            value of its map; infinite where either side gives what is no number.
        box: largest difference of a box's side, in pixels of the image; 0 where there are none.
        unmatched: detections on either side that the other has not, above the threshold.
        relative_box: ``box`` over the longer side of its image.
    """

    batch_size: int
    num_images: int = 0
    num_values: int = 0
    score: float = 0.0
    box: float = 0.0
    unmatched: int = 0
    relative_box: float = 0.0

    def holds(self, tolerance: float) -> bool:
        """Whether scores agree to ``tolerance``, and boxes to that part of the image's side.

        Where nothing was compared, nothing agrees.
        """
        is_close = max(self.score, self.relative_box) <= tolerance
        return is_close and not self.unmatched and self.num_values > 0


def measure_agreement(
    model: ExportedModel,
    reference: Reference,
    images: Sequence[Image],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    tolerance: float,
) -> list[Agreement]:
    """Compares a file with PyTorch at each batch size.

    Args:
        model: the file.
        reference: the model in PyTorch.
        images: (H, W, 3) in the file's pixel format, of any sizes; those of a batch are brought to
            their median height and width, cut or repeated side by side.
        batch_sizes: N; at each, every image is in one batch. Where they do not fill the last one,
            the first follow again, inverted or mirrored, so that no two are equal.
        tolerance: within which of the threshold a detection may be on one side alone.

    Raises:
        UserError: neither the file nor PyTorch finds anything on the images.
    """
    rows = []
    for size in batch_sizes:
        row = Agreement(size)
        for batch in _batches(images, size):
            outputs = model.run(batch)
            for index, image in enumerate(batch):
                one = {name: value[index : index + 1] for name, value in outputs.items()}
                _compare(row, one, reference(image), model, image.shape[:2], tolerance)
        if not row.num_values and not row.unmatched and np.isfinite(row.score):
            raise UserError(
                f"nothing is found on any of the {row.num_images} images, neither by the exported "
                "file nor by PyTorch, so that nothing can be compared: name images with objects "
                "(--images), or lower the threshold of the scores"
            )
        rows.append(row)
    return rows


def build_reference(predictor: DefaultPredictor, cfg: CfgNode, task: str) -> Reference:
    """Returns the model in PyTorch as a function of one image.

    Args:
        predictor: with the weights.
        cfg: of the model.
        task: of ``ExportInfo``.
    """
    model = predictor.model
    in_rgb = cfg.INPUT.FORMAT == "RGB"

    def detect(image: Image) -> Outputs:
        found = predictor(image[:, :, ::-1] if in_rgb else image)["instances"].to("cpu")
        found = found[found.scores.argsort(descending=True)]
        return {
            "boxes": found.pred_boxes.tensor[None].numpy(),
            "scores": found.scores[None].numpy(),
            "labels": found.pred_classes[None].numpy(),
            "counts": np.array([len(found)]),
        }

    def classify(image: Image) -> Outputs:
        # The square of ClassificationMapper; what that does in reading files, which a graph cannot,
        # docs/export.md measures.
        height, width = image.shape[:2]
        side = max(1, round(cfg.INPUT.CLASSIFY.TEST_CROP * min(height, width)))
        top, left = (height - side) // 2, (width - side) // 2
        square = to_pillow(image[top : top + side, left : left + side])
        resized = square.resize((model.image_size, model.image_size), Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
        return {"scores": model([{"image": pixels}])[0]["scores"][None].cpu().numpy()}

    def encode(image: Image) -> Outputs:
        lengths = [cfg.INPUT.MIN_SIZE_TEST] * 2
        resized = ResizeShortestEdge(lengths, cfg.INPUT.MAX_SIZE_TEST).get_transform(image)
        pixels = torch.from_numpy(resized.apply_image(image).copy()).permute(2, 0, 1)
        normalised = (pixels.to(model.device) - model.pixel_mean) / model.pixel_std
        padded = ImageList.from_tensors([normalised], model.backbone.size_divisibility)
        return {k: v.cpu().numpy() for k, v in model.backbone(padded.tensor).items()}

    ways: dict[str, Reference] = {
        "detection": detect,
        "classification": classify,
        "features": encode,
    }
    chosen = ways[task]

    def without_gradients(image: Image) -> Outputs:
        with torch.no_grad():
            return chosen(np.ascontiguousarray(image))

    return without_gradients


def table_of(rows: Sequence[Agreement], task: str, tolerance: float) -> str:
    """Returns the agreement as text, one line a batch size."""
    what = {"detection": "detections", "classification": "scores", "features": "values"}[task]
    lines = [
        f"batch  images  {what:>10}  {'score':>9}" + "  box (px)  unmatched" * _has_boxes(task)
    ]
    if task == "features":
        lines[0] = lines[0].replace("score", "value")
    for row in rows:
        line = f"{row.batch_size:>5}  {row.num_images:>6}  {row.num_values:>10}  {row.score:>9.1e}"
        line += f"  {row.box:>8.1e}  {row.unmatched:>9}" * _has_boxes(task)
        lines.append(line + ("" if row.holds(tolerance) else "  differs"))
    return "\n".join(lines)


def _has_boxes(task: str) -> bool:
    return task == "detection"


def _batches(images: Sequence[Image], size: int) -> list[Image]:
    """Returns batches (N, H, W, 3) in which every image is once, and no two images are equal."""
    if size == 1:
        return [image[None] for image in images]
    missing = -len(images) % size
    chosen = [*images, *(_vary(images[i % len(images)], i // len(images)) for i in range(missing))]
    batches = []
    for start in range(0, len(chosen), size):
        batch = chosen[start : start + size]
        height, width = (int(np.median([image.shape[axis] for image in batch])) for axis in (0, 1))
        rows, columns = range(height), range(width)
        batches.append(
            np.stack([x.take(rows, 0, mode="wrap").take(columns, 1, mode="wrap") for x in batch])
        )
    return batches


def _vary(image: Image, number: int) -> Image:
    """Returns an image inverted (0), mirrored, both, upside down …: seven, all different."""
    bits = number + 1
    turned = image[:: -1 if bits & 4 else 1, :: -1 if bits & 2 else 1]
    return 255 - turned if bits & 1 else turned


def _compare(
    row: Agreement,
    got: Outputs,
    wanted: Outputs,
    model: ExportedModel,
    size: Sequence[int],
    tolerance: float,
) -> None:
    row.num_images += 1
    if model.info.task == "detection":
        compare_boxes(row, got, wanted, model.info.score_threshold, size, tolerance)
        return
    if got.keys() != wanted.keys():
        raise UserError(f"'{model.path}' gives {[*got]}, and the model {[*wanted]}")
    for name, value in wanted.items():
        scale = 1.0 if model.info.task == "classification" else float(np.abs(value).max()) or 1.0
        difference = _largest(got[name] - value) if got[name].shape == value.shape else np.inf
        row.score = max(row.score, difference / scale if np.isfinite(scale) else np.inf)
        row.num_values += value.size


def compare_boxes(
    row: Agreement,
    got: Outputs,
    wanted: Outputs,
    threshold: float,
    size: Sequence[int],
    tolerance: float,
) -> None:
    """Pairs the detections of an image one to one, where label, score and box agree best."""
    mine, theirs = (to_instances(outputs, (size[0], size[1]))[0] for outputs in (got, wanted))
    boxes = [found.pred_boxes.tensor.double().numpy() for found in (mine, theirs)]
    scores = [found.scores.double().numpy() for found in (mine, theirs)]
    if not all(np.isfinite(values).all() for values in (*boxes, *scores)):
        row.score = np.inf
        return
    box_gap = np.abs(boxes[0][:, None] - boxes[1][None]).max(axis=2, initial=0.0)  # (A, B)
    score_gap = np.abs(scores[0][:, None] - scores[1][None])
    other = mine.pred_classes.numpy()[:, None] != theirs.pred_classes.numpy()[None]
    side = max(size)
    apart = other | (np.maximum(score_gap, box_gap / side) > max(10 * tolerance, 0.01))
    first, second = linear_sum_assignment(score_gap + box_gap / side + 10 * apart)
    paired = ~apart[first, second]
    first, second = first[paired], second[paired]
    row.num_values += len(first)
    rises = np.diff(scores[0]).clip(min=0)  # a score that stands behind a lesser one is misplaced
    row.score = max(row.score, _largest(score_gap[first, second]), _largest(rises))
    row.box = max(row.box, _largest(box_gap[first, second]))
    row.relative_box = max(row.relative_box, _largest(box_gap[first, second]) / side)
    # Which of two detections at the threshold, or at the end of a full table, is in is a matter of
    # rounding: only those that stand above where the other side ends are missed there.
    rows = got["boxes"].shape[1]
    ends = [max(threshold, found.min()) if len(found) >= rows else threshold for found in scores]
    for found, used, end in zip(scores, (first, second), reversed(ends), strict=True):
        row.unmatched += int((np.delete(found, used) > end + tolerance).sum())


def _largest(values: Array) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    return largest if np.isfinite(largest) else np.inf
