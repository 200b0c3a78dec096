# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Functional fingerprints: a few numbers that weights, pre-processing and code give together.

A hash says that a file is whole; it does not say that today's code reads images, resizes,
normalises and computes as the code did that the figures were measured with. So an entry of the
zoo also holds what its model gives for images that are drawn by integer arithmetic: no data is
needed, and no library's random numbers. They are written as PNG and go the way of any image,
through the config's mapper of test images and the model's own normalisation and padding.

What is compared are raw outputs (maps, logits, boxes before any step that jumps, such as a
threshold, a sort or the suppression of overlapping boxes), with the tolerance that stands beside
them; the detections at the end are compared loosely.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from detectron2.structures import ImageList, Instances
from PIL import Image
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.modeling.contracts import PretrainingObjective, get_backbone

from .index import Fingerprint, OutputPrint

VERSION = 1
TOLERANCE = 1e-3
"""Of a raw output's standard deviation: what counts as the same. Rounding of float32 in another
order makes some 1e-5 of it on any machine; pixels in another order, or resized otherwise, more
than 1e-1."""
SCORE_TOLERANCE = 0.02
"""Of the scores of detections, in [0, 1]."""
BOX_TOLERANCE = 0.02
"""Of the corners of the surest detection, in lengths of the image's longer side."""

# Odd, one lying and one standing, so that resizing rounds and a batch of detection is padded.
_SIZES = ((331, 467), (419, 283))
_NUM_VALUES = 10
_NUM_DETECTIONS = 5
_SUREST = ".surest_box"
# The children whose outputs are raw, in the order in which they are computed. Of two stages, it is
# the first: what the second one reads are boxes that a sort chose.
_WATCHED = ("backbone", "proposal_generator.rpn_head", "head", "predictor", "decoder")


@dataclass(frozen=True)
class Deviation:
    """How far one output lies from a fingerprint.

    Attributes:
        output: its name.
        largest: of the differences of mean, standard deviation and values; infinite where the
            output is missing or has another shape.
        tolerance: what ``largest`` may be.
        note: what else is to be said; empty where the numbers say all.
    """

    output: str
    largest: float
    tolerance: float
    note: str = ""

    @property
    def is_same(self) -> bool:
        """Whether the output counts as the same."""
        return self.largest <= self.tolerance


def draw_images() -> list[npt.NDArray[np.uint8]]:
    """Draws the synthetic images, (H, W, 3) RGB each: waves, plain boxes and fine noise."""
    return [_draw(height, width, number) for number, (height, width) in enumerate(_SIZES)]


def compute_fingerprint(model: nn.Module, cfg: CfgNode) -> Fingerprint:
    """Runs a model on the synthetic images, in evaluation mode; its mode is restored.

    Args:
        model: with its weights: a detector, a classifier, a model of pre-training or a bare
            backbone.
        cfg: of the model; pre-processing is taken from it.

    Raises:
        UserError: the model has no outputs that could be compared, or gives NaN.
    """
    batch = _read_images(cfg)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # TF32 rounds inputs to 10 bits. Nothing should draw in evaluation; seeded, nothing can.
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        ):
            torch.manual_seed(0)
            outputs = list(_run(model, cfg, batch))
    finally:
        for module, training in modes.items():
            module.training = training
    if not outputs:
        raise UserError(f"a {type(model).__name__} has no raw outputs to take a fingerprint of")
    for output in outputs:
        if not math.isfinite(output.mean):
            raise UserError(f"output '{output.name}' holds NaN or infinity on synthetic images")
    return Fingerprint(VERSION, tuple(outputs))


def compare_fingerprints(expected: Fingerprint, found: Fingerprint) -> list[Deviation]:
    """Returns how far each output of ``expected`` is from what was found, and what it lacks.

    What is tolerated is computed anew from what was found: an index cannot ask for more.

    Raises:
        UserError: they were taken of other synthetic images.
    """
    if expected.version != found.version:
        raise UserError(
            f"the fingerprint is of version {expected.version}, but this package takes those of "
            f"version {found.version}: verify with the package that the entry came with"
        )
    outputs = {output.name: output for output in found.outputs}
    deviations = [_compare(output, outputs.get(output.name)) for output in expected.outputs]
    names = {output.name for output in expected.outputs}
    for name, output in outputs.items():
        # A surest box is there or not by a margin of scores, which is compared loosely itself.
        if name not in names and not name.endswith(_SUREST):
            note = "the index does not know this output"
            deviations.append(Deviation(name, math.inf, output.tolerance, note))
    return deviations


def _compare(expected: OutputPrint, found: OutputPrint | None) -> Deviation:
    if found is None:
        return Deviation(expected.name, math.inf, expected.tolerance, "there is no such output")
    if expected.shape != found.shape:
        note = f"shape {list(found.shape)} instead of {list(expected.shape)}"
        return Deviation(expected.name, math.inf, expected.tolerance, note)
    before = (expected.mean, expected.std, *expected.values)
    now = (found.mean, found.std, *found.values)
    largest = max(abs(a - b) for a, b in zip(before, now, strict=True))
    # The numbers are rounded to six digits, which is no difference.
    rounding = 1e-5 * max(abs(value) for value in before)
    return Deviation(expected.name, largest, min(expected.tolerance, found.tolerance) + rounding)


def _draw(height: int, width: int, number: int) -> npt.NDArray[np.uint8]:
    y, x, channel = np.ogrid[:height, :width, :3]
    y, x, channel = (axis.astype(np.int64) for axis in (y, x, channel))
    phase = 3 * x * (channel + 1) + 2 * y * (3 - channel) + 97 * number
    wave = np.abs(phase % 510 - 255)  # 0 … 255 and back
    noise = (x * 73856093) ^ (y * 19349663) ^ ((channel + 3 * number + 1) * 83492791)
    noise = (((noise ^ (noise >> 13)) * 40503) & 0xFFFFFF) >> 19  # 0 … 31
    image = (wave * 7) // 8 + noise
    for box in range(6):  # things with an inside and an outline
        top, left = (height * (37 * box % 71)) // 100, (width * (53 * box % 73)) // 100
        bottom, right = top + height // (4 + box), left + width // (3 + box % 4)
        image[top:bottom, left:right] = [(90 * box + 60 * c) % 256 for c in range(3)]
    return image.astype(np.uint8)


def _read_images(cfg: CfgNode) -> list[dict[str, Any]]:
    mapper = build_mapper(cfg, is_train=False)
    batch = []
    with tempfile.TemporaryDirectory() as folder:
        for number, image in enumerate(draw_images()):
            file = Path(folder) / f"{number}.png"
            Image.fromarray(image).save(file)
            height, width = image.shape[:2]
            record = {"image_id": number, "height": height, "width": width, "label": 0}
            entry = mapper({"file_name": str(file), **record})
            assert isinstance(entry, dict)  # no fault: the file is our own
            batch.append(entry)
    return batch


def _run(model: nn.Module, cfg: CfgNode, batch: Sequence[dict[str, Any]]) -> Iterator[OutputPrint]:
    if isinstance(model, Backbone):
        yield from _print_all("backbone", model(_normalise(model, cfg, batch)))
        return
    raw: dict[str, list[OutputPrint]] = {}
    handles = [
        module.register_forward_hook(_record(name, raw))
        for name, module in model.named_modules()
        if name in _WATCHED
    ]
    try:
        if isinstance(model, PretrainingObjective):  # others use the maps of whole images
            backbone = get_backbone(model)
            assert backbone is not None
            backbone(model.preprocess_image(list(batch)))
        results = model(list(batch))
    finally:
        for handle in handles:
            handle.remove()
    for outputs in raw.values():
        yield from outputs
    for number, result in enumerate(results if isinstance(results, list) else []):
        yield from _print_result(f"image{number}", result)


def _normalise(model: Backbone, cfg: CfgNode, batch: Sequence[Mapping[str, Any]]) -> Tensor:
    device = next(model.parameters()).device
    mean, std = (
        torch.tensor(values, device=device).view(-1, 1, 1)
        for values in (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
    )
    images = [(entry["image"].to(device) - mean) / std for entry in batch]
    padded: Tensor = ImageList.from_tensors(images, model.size_divisibility).tensor
    return padded


def _record(name: str, raw: dict[str, list[OutputPrint]]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: object) -> None:
        # Written down at once: RetinaNet takes the sigmoid of its logits in place.
        raw.setdefault(name, list(_print_all(name, output)))

    return hook


def _print_all(name: str, output: object) -> Iterator[OutputPrint]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield _print(name, output)
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _print_all(f"{name}.{key}", value)
    elif isinstance(output, list | tuple):
        for number, value in enumerate(output):
            yield from _print_all(f"{name}.{number}", value)


def _print(name: str, output: Tensor) -> OutputPrint:
    values = output.detach().double().cpu().flatten()
    # Strides of the golden section: no two values have the same place in their maps.
    places = [(step * 2654435769 % 2**32) * len(values) >> 32 for step in range(_NUM_VALUES)]
    mean, std = float(values.mean()), float(values.std(correction=0))
    return OutputPrint(
        name=name,
        shape=tuple(output.shape),
        mean=_round(mean),
        std=_round(std),
        values=tuple(_round(float(values[place])) for place in dict.fromkeys(places)),
        # An output that is the same everywhere is measured by itself.
        tolerance=_round(TOLERANCE * (std if std > 1e-6 * abs(mean) else max(abs(mean), 1e-6))),
    )


def _print_result(image: str, result: Mapping[str, Any]) -> Iterator[OutputPrint]:
    for key, value in result.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield _print(f"{image}.{key}", value)
    instances = result.get("instances")
    if isinstance(instances, Instances):
        yield from _print_detections(image, instances)


def _print_detections(image: str, instances: Instances) -> Iterator[OutputPrint]:
    scores, order = instances.scores.double().cpu().sort(descending=True)
    surest = [*scores[:_NUM_DETECTIONS].tolist(), *[0.0] * _NUM_DETECTIONS][:_NUM_DETECTIONS]
    yield _print_loosely(f"{image}.scores", surest, SCORE_TOLERANCE)
    # Which box comes first is known only where no other one is nearly as sure.
    if surest[0] - surest[1] > 2 * SCORE_TOLERANCE:
        corners = instances.pred_boxes.tensor[order[0].item()].double().tolist()
        tolerance = BOX_TOLERANCE * max(instances.image_size)
        yield _print_loosely(f"{image}{_SUREST}", corners, tolerance)


def _print_loosely(name: str, values: Sequence[float], tolerance: float) -> OutputPrint:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    rounded = tuple(_round(value) for value in values)
    return OutputPrint(name, (len(values),), _round(mean), _round(std), rounded, tolerance)


def _round(value: float) -> float:
    return float(f"{value:.6g}")
