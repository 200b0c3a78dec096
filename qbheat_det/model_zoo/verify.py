# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Verifies that an entry's file, the index and the installed code agree on this machine.

A fingerprint contains statistics of a model's raw outputs on synthetic images: feature maps, logits
and boxes before any threshold, sorting or NMS. It depends on weights, pre-processing and code, so
it shows whether results are the same as when the metrics were measured. Final detections are
compared with larger tolerances. Images are drawn with integer arithmetic, and read from files.
"""

import contextlib
import dataclasses
import itertools
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
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor, nn

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import undisturbed
from qbheat_det.core.text import one_line
from qbheat_det.data import MAPPERS_OF_CLASSES, MAPPERS_OF_IMAGES, build_mapper
from qbheat_det.evaluation.complexity import (
    CountingRule,
    count_detector_madds,
    count_madds,
    count_parameters,
)
from qbheat_det.modeling.contracts import PretrainingObjective, get_backbone, normalise_pixels

from .index import Fingerprint, OutputStats, ZooEntry
from .sources import TrainedModel, fetch, open_trained

VERSION = 1
TOLERANCE = 1e-3
"""For raw outputs, relative to their standard deviation. The rounding of float32 changes them by
about 1e-5, flipped channels or a different resize by more than 1e-1."""
SCORE_TOLERANCE = 0.02
"""For the scores of detections, in [0, 1]."""
BOX_TOLERANCE = 0.02
"""For the corners of the best detection, relative to the longer side of the image."""

# Odd sizes need rounding in the resize. Landscape and portrait need padding in detection batches.
_SIZES = ((331, 467), (419, 283))
_NUM_VALUES = 10
_NUM_DETECTIONS = 5
_BEST_BOX = ".surest_box"
# Modules with raw outputs, in the order of computation. The second stage of two-stage detectors is
# excluded, because its input boxes depend on sorting.
_RAW_MODULES = ("backbone", "proposal_generator.rpn_head", "head", "predictor", "decoder")
_STEPS = ("file and hash", "tensors loaded", "index", "fingerprint")


class Deviation(NamedTuple):
    """Difference of an output from the expected one; ``ratio`` is in multiples of the tolerance."""

    output: str
    ratio: float
    reason: str = ""


def compute_fingerprint(model: nn.Module, cfg: CfgNode) -> Fingerprint:
    """Runs a model on the synthetic images, and returns the statistics of its outputs.

    The model may be a detector, classifier, pre-training objective or backbone. Its mode and the
    random state do not change. Raises a ``UserError`` if there are no raw outputs, or if they are
    not finite.
    """
    batch = _read_images(cfg)
    # TF32 has a precision of only 10 bits.
    with undisturbed(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.manual_seed(0)
        outputs = tuple(_run(model, cfg, batch))
    if not outputs:
        raise UserError(f"a {type(model).__name__} has no raw outputs for a fingerprint")
    for output in outputs:
        if not math.isfinite(output.mean):
            raise UserError(f"output '{output.name}' contains NaN or infinity on synthetic images")
    return Fingerprint(VERSION, outputs)


def compare_fingerprints(expected: Fingerprint, found: Fingerprint) -> list[Deviation]:
    """Returns the deviation of each output that is in at least one of the fingerprints.

    Tolerances are at most those of ``found``, so an index cannot make them larger. Raises a
    ``UserError`` if the versions differ.
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
        # Whether there is a best box depends on the scores, which are compared separately.
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
    """Draws a synthetic RGB image (H, W, 3) with waves, uniform boxes and fine noise."""
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
        for number, (height, width) in enumerate(_SIZES):
            file = Path(folder) / f"{number}.png"
            Image.fromarray(_draw(height, width, number)).save(file)
            record = {"image_id": number, "height": height, "width": width, "label": 0}
            entry = mapper({"file_name": str(file), **record})
            assert isinstance(entry, dict)
            batch.append(entry)
    return batch


def _run(model: nn.Module, cfg: CfgNode, batch: Sequence[dict[str, Any]]) -> Iterator[OutputStats]:
    if isinstance(model, Backbone):
        device = next(model.parameters()).device
        pixels = (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
        images = [normalise_pixels(entry["image"].to(device), *pixels) for entry in batch]
        x = ImageList.from_tensors(images, model.size_divisibility).tensor
        yield from _summarise_all("backbone", model(x))
        return
    raw: dict[str, list[OutputStats]] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name in _RAW_MODULES:
                hooks.enter_context(module.register_forward_hook(_record(name, raw)))
        if isinstance(model, PretrainingObjective):  # adds feature maps of whole images
            backbone = get_backbone(model)
            assert backbone is not None
            backbone(model.preprocess_image(list(batch)))
        results = model(list(batch))
    yield from itertools.chain(*raw.values())
    for number, result in enumerate(results if isinstance(results, list) else []):
        yield from _summarise_result(f"image{number}", result)


def _record(name: str, raw: dict[str, list[OutputStats]]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: object, output: object) -> None:
        # Summarize now, because RetinaNet applies the sigmoid to its logits in place.
        raw.setdefault(name, list(_summarise_all(name, output)))

    return hook


def _summarise_all(name: str, output: object) -> Iterator[OutputStats]:
    """Yields statistics of each floating-point tensor in nested mappings and sequences."""
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
    # The best box is certain only if no second box has nearly the same score.
    if best[0] - best[1] > 2 * SCORE_TOLERANCE:
        box = instances.pred_boxes.tensor[order[0]]
        yield _summarise(f"{image}{_BEST_BOX}", box, BOX_TOLERANCE * max(instances.image_size))


def _summarise(name: str, output: Tensor, tolerance: float | None = None) -> OutputStats:
    values = output.detach().double().cpu().flatten()
    mean, std = float(values.mean()), float(values.std(correction=0))
    if tolerance is None:  # constant outputs are compared relative to their value
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


def verify_entry(entry: ZooEntry) -> dict[str, str]:
    """Returns a dict with "name", each step's result ("-" if not reached), and "error"."""
    verdict = {"name": entry.name, **dict.fromkeys(_STEPS, "-"), "error": ""}
    try:
        get_config_path(entry.config)
        file = fetch(entry)
        _check_equal("size", entry.size, file.stat().st_size)
        verdict["file and hash"] = "ok"
        trained = open_trained(str(file), device="cpu")
        assert trained.report is not None
        total = sum(group.num_tensors for group in trained.report.groups.values())
        verdict["tensors loaded"] = f"{trained.report.num_loaded} of {total}"
        listed = dataclasses.asdict(entry)
        for field, found in {"task": find_task(trained), **count_costs(trained)}.items():
            _check_equal(field, listed[field], found)
        verdict["index"] = "ok"
        if entry.fingerprint is None:
            raise UserError("the index has no fingerprint: add the entry again with --replace")
        fingerprint = compute_fingerprint(trained.model, trained.cfg)
        verdict["fingerprint"] = _check_fingerprint(entry.fingerprint, fingerprint)
    except UserError as error:
        verdict["error"] = str(error)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # from the code of a model
        reason = f"{type(error).__name__}: {one_line(error)}"
        verdict["error"] = f"the model does not run: {reason}"
    return verdict


def format_verdicts(verdicts: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with the results of all steps, and one line per error."""
    rows = [[verdict[column] for column in ("name", *_STEPS)] for verdict in verdicts]
    errors = [f"{verdict['name']}: {verdict['error']}" for verdict in verdicts if verdict["error"]]
    end = (
        f"{len(verdicts) - len(errors)} of {len(verdicts)} verified: raw outputs may differ by "
        f"{TOLERANCE:g} of their standard deviation."
    )
    return "\n".join([tabulate(rows, ("name", *_STEPS), tablefmt="github"), *errors, end])


def find_task(trained: TrainedModel) -> str:
    """Returns the task of a model, one of ``index.TASKS``."""
    if isinstance(trained.model, Backbone | PretrainingObjective):
        return "pretraining"
    is_classifier = trained.cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES
    return "classification" if is_classifier else "detection"


def count_costs(trained: TrainedModel) -> dict[str, Any]:
    """Returns a dict with the fields ``num_params``, ``madds`` and ``madds_input`` of an entry.

    Multiply-adds are counted by ``CountingRule.CORE``, on one image of the size in evaluation. For
    detectors, the image is in landscape orientation. For pre-training objectives, only the
    multiply-adds of the backbone are counted.
    """
    model, cfg = trained.model, trained.cfg
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_IMAGES:
        height = width = int(cfg.INPUT.PRETRAIN.SIZE)
    else:
        height, width = int(cfg.INPUT.MIN_SIZE_TEST), int(cfg.INPUT.MAX_SIZE_TEST)
        height = height or width  # 0 does not resize
    if find_task(trained) == "pretraining":
        backbone = model if isinstance(model, Backbone) else model.get_submodule("backbone")
        image = next(backbone.parameters()).new_zeros(1, 3, height, width)
        madds = count_madds(backbone, image)
    else:
        madds = count_detector_madds(model, height, width)
    return {
        "num_params": count_parameters(model),
        "madds": madds.total(CountingRule.CORE),
        "madds_input": (height, width),
    }


def _check_fingerprint(expected: Fingerprint, found: Fingerprint) -> str:
    """Returns the largest deviation, such as "ok, 3 % of tolerance", or raises a ``UserError``."""
    deviations = compare_fingerprints(expected, found)
    wrong = [deviation for deviation in deviations if deviation.ratio > 1]
    if not wrong:
        return f"ok, {100 * max(one.ratio for one in deviations):.2g} % of tolerance"
    more = f" (and {len(wrong) - 1} more of {len(deviations)} outputs)" if wrong[1:] else ""
    raise UserError(f"output '{wrong[0].output}': {wrong[0].reason}{more}")


def _check_equal(field: str, expected: object, found: object) -> None:
    if expected != found:
        raise UserError(f"'{field}' in the index is {expected}, but of the file it is {found}")
