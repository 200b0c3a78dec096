# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Functional fingerprints: numbers that weights, pre-processing and code give together.

Statistics of a model's raw outputs (maps, logits and boxes before any threshold, sort or
suppression) on synthetic images, drawn by integer arithmetic and read like any image file, show
whether today's code computes what the code did that measured the metrics. Final detections are
compared loosely.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from detectron2.structures import ImageList, Instances
from PIL import Image
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper, undisturbed
from qbheat_det.modeling.contracts import PretrainingObjective, get_backbone
from qbheat_det.modeling.image_model import normalise_pixels

from .index import Fingerprint, OutputStats

VERSION = 1
TOLERANCE = 1e-3
"""Of a raw output's standard deviation. Rounding of float32 in another order makes some 1e-5 of it;
flipped channels or another way of resizing more than 1e-1."""
SCORE_TOLERANCE = 0.02
"""Of the scores of detections, in [0, 1]."""
BOX_TOLERANCE = 0.02
"""Of the corners of the best detection, relative to the longer side of the image."""

# Odd sizes, landscape and portrait, so that resizing rounds and a batch of detection is padded.
_SIZES = ((331, 467), (419, 283))
_NUM_VALUES = 10
_NUM_DETECTIONS = 5
_BEST_BOX = ".surest_box"
# Modules with raw outputs, in the order of computation. Of two-stage detectors only the first
# stage: the second one reads boxes that a sort has chosen.
_RAW_MODULES = ("backbone", "proposal_generator.rpn_head", "head", "predictor", "decoder")


class Deviation(NamedTuple):
    """How far an output is from the expected one, in tolerances: more than 1 is not equal."""

    output: str
    ratio: float
    reason: str = ""


def compute_fingerprint(model: nn.Module, cfg: CfgNode) -> Fingerprint:
    """Runs a detector, classifier, pre-training objective or backbone on the synthetic images.

    The model may be on any device; its mode and the random state are the same afterwards. Raises a
    ``UserError`` if it has no outputs to compare, or gives NaN.
    """
    batch = _read_images(cfg)
    # TF32 keeps 10 bits.
    with undisturbed(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.manual_seed(0)
        outputs = tuple(_run(model, cfg, batch))
    if not outputs:
        raise UserError(f"a {type(model).__name__} has no raw outputs for a fingerprint")
    for output in outputs:
        if not math.isfinite(output.mean):
            raise UserError(f"output '{output.name}' holds NaN or infinity on synthetic images")
    return Fingerprint(VERSION, outputs)


def compare_fingerprints(expected: Fingerprint, found: Fingerprint) -> list[Deviation]:
    """Returns the deviation of each output of either fingerprint, in the order of computation.

    Tolerances are at most those of ``found``, so that an index cannot ask for larger ones. Raises a
    ``UserError`` if they are of other synthetic images.
    """
    if expected.version != found.version:
        raise UserError(
            f"the fingerprint is of version {expected.version}, but this package's version is "
            f"{found.version}"
        )
    outputs = {output.name: output for output in found.outputs}
    deviations = [_compare(output, outputs.pop(output.name, None)) for output in expected.outputs]
    return deviations + [
        Deviation(name, math.inf, "the index does not have this output")
        for name in outputs
        # Whether there is a best box depends on a margin of scores, which are compared themselves.
        if not name.endswith(_BEST_BOX)
    ]


def _compare(expected: OutputStats, found: OutputStats | None) -> Deviation:
    if found is None:
        return Deviation(expected.name, math.inf, "there is no such output")
    before = (expected.mean, expected.std, *expected.values)
    now = (found.mean, found.std, *found.values)
    if expected.shape != found.shape or len(before) != len(now):
        note = f"shape {list(found.shape)} instead of {list(expected.shape)}"
        return Deviation(expected.name, math.inf, note)
    largest = max(abs(a - b) for a, b in zip(before, now, strict=True))
    rounding = 1e-5 * max(map(abs, before))  # the numbers have six digits
    tolerance = max(min(expected.tolerance, found.tolerance), 1e-12) + rounding
    reason = f"differs by {largest:.3g}, tolerance {tolerance:.3g}"
    return Deviation(expected.name, largest / tolerance, reason)


def _draw(height: int, width: int, number: int) -> npt.NDArray[np.uint8]:
    """Draws a synthetic image, (H, W, 3) RGB: waves, plain boxes and fine noise."""
    y, x, channel = (axis.astype(np.int64) for axis in np.ogrid[:height, :width, :3])
    phase = 3 * x * (channel + 1) + 2 * y * (3 - channel) + 97 * number
    wave = np.abs(phase % 510 - 255)  # 0 … 255 and back
    noise = (x * 73856093) ^ (y * 19349663) ^ ((channel + 3 * number + 1) * 83492791)
    noise = (((noise ^ (noise >> 13)) * 40503) & 0xFFFFFF) >> 19  # 0 … 31
    image = (wave * 7) // 8 + noise
    for box in range(6):
        top, left = (height * (37 * box % 71)) // 100, (width * (53 * box % 73)) // 100
        bottom, right = top + height // (4 + box), left + width // (3 + box % 4)
        image[top:bottom, left:right] = [(90 * box + 60 * c) % 256 for c in range(3)]
    return image.astype(np.uint8)


def _read_images(cfg: CfgNode) -> list[dict[str, Any]]:
    mapper = build_mapper(cfg, is_train=False)
    batch = []
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(_SIZES):
            image = _draw(*size, number)
            file = Path(folder) / f"{number}.png"
            Image.fromarray(image).save(file)
            height, width = image.shape[:2]
            record = {"image_id": number, "height": height, "width": width, "label": 0}
            entry = mapper({"file_name": str(file), **record})
            assert isinstance(entry, dict)  # not an error: the file is our own
            batch.append(entry)
    return batch


def _run(model: nn.Module, cfg: CfgNode, batch: Sequence[dict[str, Any]]) -> Iterator[OutputStats]:
    if isinstance(model, Backbone):
        yield from _summarise_all("backbone", model(_normalise(model, cfg, batch)))
        return
    raw: dict[str, list[OutputStats]] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name in _RAW_MODULES:
                hooks.enter_context(module.register_forward_hook(_record(name, raw)))
        if isinstance(model, PretrainingObjective):  # maps of whole images, for other models
            backbone = get_backbone(model)
            assert backbone is not None
            backbone(model.preprocess_image(list(batch)))
        results = model(list(batch))
    for outputs in raw.values():
        yield from outputs
    for number, result in enumerate(results if isinstance(results, list) else []):
        yield from _summarise_result(f"image{number}", result)


def _normalise(model: Backbone, cfg: CfgNode, batch: Sequence[Mapping[str, Any]]) -> Tensor:
    device, pixels = next(model.parameters()).device, (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
    images = [normalise_pixels(entry["image"].to(device), *pixels) for entry in batch]
    return ImageList.from_tensors(images, model.size_divisibility).tensor


def _record(name: str, raw: dict[str, list[OutputStats]]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: object) -> None:
        # At once: RetinaNet takes the sigmoid of its logits in place.
        raw.setdefault(name, list(_summarise_all(name, output)))

    return hook


def _summarise_all(name: str, output: object) -> Iterator[OutputStats]:
    """Summarises each floating-point tensor in nested mappings and sequences."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield _summarise(name, output)
    elif isinstance(output, Mapping | list | tuple):
        items = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, value in items:
            yield from _summarise_all(f"{name}.{key}", value)


def _summarise_result(image: str, result: Mapping[str, Any]) -> Iterator[OutputStats]:
    tensors = {key: value for key, value in result.items() if isinstance(value, Tensor)}
    yield from _summarise_all(image, tensors)
    instances = result.get("instances")
    if not isinstance(instances, Instances):
        return
    scores, order = instances.scores.sort(descending=True)
    best = scores.new_zeros(_NUM_DETECTIONS)
    best[: len(scores)] = scores[:_NUM_DETECTIONS]
    yield _summarise(f"{image}.scores", best, SCORE_TOLERANCE)
    # Which box comes first is certain only if no other one has nearly the same score.
    if best[0] - best[1] > 2 * SCORE_TOLERANCE:
        box = instances.pred_boxes.tensor[order[0]]
        yield _summarise(f"{image}{_BEST_BOX}", box, BOX_TOLERANCE * max(instances.image_size))


def _summarise(name: str, output: Tensor, tolerance: float | None = None) -> OutputStats:
    values = output.detach().double().cpu().flatten()
    mean, std = float(values.mean()), float(values.std(correction=0))
    if tolerance is None:  # an output that is constant is compared relative to its value
        scale = std if std > 1e-6 * abs(mean) else max(abs(mean), 1e-6)
        tolerance = _round(TOLERANCE * scale)
    count, sample = len(values), values
    if count > _NUM_VALUES:  # steps of the golden section: positions spread over all channels
        positions = [(step * 2654435769 % 2**32) * count >> 32 for step in range(_NUM_VALUES)]
        sample = values[positions]
    rounded = tuple(map(_round, sample.tolist()))
    return OutputStats(name, tuple(output.shape), _round(mean), _round(std), rounded, tolerance)


def _round(value: float) -> float:
    return float(f"{value:.6g}")
