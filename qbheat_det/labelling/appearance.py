# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Judges boxes by the features of a frozen encoder: their classes, and whether they fit an object.

Two classifiers are fitted to the annotated boxes. The first one predicts the class of a box. The
second one distinguishes annotated boxes from copies of them that are shifted off their objects.
Both are logistic regression, so they are fitted in seconds. The images are divided into five parts,
and the boxes of each part are judged by classifiers that were fitted to the other four.

Notation: an image has n boxes, XYXY in pixels. There are K classes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import PIL.Image
import torch
from detectron2.modeling import Backbone
from torch import Tensor
from torchvision.ops import roi_align
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.api import Encoder, LinearProbe, fit_penalised
from qbheat_det.data.images import name_unreadable, read_image

from .labels import ImageBoxes

logger = logging.getLogger(__name__)
_SHORTER_SIDE = 384  # of images, pixels
_STRIDES = (8, 16, 32)  # of the feature maps in use
_NUM_PARTS = 5
_SHIFT = (0.25, 1.1)  # range of the length of a shift, relative to the box's sides
_CONTEXT = 2.0  # sides of the context of a box, relative to the box's sides
_SURROUNDINGS = 1.6  # sides of the grid that shows how a box fits, relative to the box's sides
_FINE_GRID = 5  # cells per side of this grid
_COARSE_GRID = 3  # the same for maps with many channels
_MANY_CHANNELS = 256
# At this stride, a cell has many boxes, so the maps do not show how a box fits.
_COARSE_STRIDE = 32
_NUM_COMPONENTS = 512  # most principal components of the grid
# The classifier standardizes the components. With as many components as boxes, it therefore learns
# the noise of the last ones, and its judgements are random.
_BOXES_PER_COMPONENT = 10
_CLASS_PENALTY = 0.1  # L2 penalties of the classifiers, chosen on aquarium and bccd
_FIT_PENALTY = 0.03
_TOLERANCE = 1e-3  # of the gradient of the classifiers


class ImageMaps(NamedTuple):
    """The feature maps of an image (C, H, W) by their strides, in float16.

    ``scale`` is the size of the encoded image divided by the size of the original.
    """

    maps: dict[int, Tensor]
    scale: float


class Judgement(NamedTuple):
    """What the features of n boxes say.

    Attributes:
        log_probabilities: logarithm of the probability (n, K) of each class.
        misfit: logit (n,) of the probability that the box is shifted off its object.
    """

    log_probabilities: Tensor
    misfit: Tensor


@dataclass(frozen=True)
class Judgements:
    """The judgements of the boxes of each image.

    Attributes:
        annotated: those of the annotated boxes.
        shifted: those of a shifted copy of each annotated box.
        predicted: those of the predicted boxes.
        copies: the shifted copies, each with the class of its original.
    """

    annotated: list[Judgement]
    shifted: list[Judgement]
    predicted: list[Judgement]
    copies: list[ImageBoxes]


def encode_files(encoder: Encoder, paths: Sequence[str | Path]) -> list[ImageMaps | None]:
    """Returns the feature maps of images, whose shorter side is resized to 384 pixels.

    All maps stay in memory: about 0.5 MB per image with EfficientNet-Lite0. An image that cannot be
    read has None, and is named in the log.
    """
    backbone = cast(Backbone, encoder.model)
    strides = {}  # by name of the map
    for name, shape in backbone.output_shape().items():
        if shape.stride in _STRIDES:
            strides[name] = shape.stride
    encoded: list[ImageMaps | None] = []
    for path in tqdm(paths, desc="comparing boxes", unit="image", disable=None, delay=1):
        try:
            image = PIL.Image.fromarray(read_image(str(path), "RGB"))
        except Exception as error:  # decoders raise different types on broken files
            logger.warning(f"{name_unreadable(str(path), error).message}: not inspected")
            encoded.append(None)
            continue
        scale = _SHORTER_SIDE / min(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        outputs = encoder(np.array(image.resize(size, PIL.Image.Resampling.BILINEAR)))
        maps = {stride: outputs[name][0].half().cpu() for name, stride in strides.items()}
        encoded.append(ImageMaps(maps, scale))
    return encoded


def judge_boxes(
    images: Sequence[ImageMaps],
    annotated: Sequence[ImageBoxes],
    predicted: Sequence[ImageBoxes],
    category_ids: Sequence[int],
    seed: int,
) -> Judgements:
    """Judges the annotated and predicted boxes of images, and a shifted copy of each annotated box.

    Args:
        images: results of ``encode_files``.
        annotated: annotated boxes of each image.
        predicted: predicted boxes of each image.
        category_ids: ids of the K classes, in the order of the classes of a judgement.
        seed: seed of the shifts and of the division into parts.
    """
    generator = np.random.default_rng(seed)
    copies = [shift_boxes(boxes, generator) for boxes in annotated]
    is_empty = [not len(boxes.boxes) for boxes in annotated]
    # Images with boxes come first, so few of them are not all in one part.
    order = np.lexsort((generator.permutation(len(images)), np.array(is_empty)))
    part = torch.empty(len(images), dtype=torch.long)
    part[torch.from_numpy(order)] = torch.arange(len(images)) % _NUM_PARTS
    index_of = {category: index for index, category in enumerate(category_ids)}
    labels = [
        torch.tensor([index_of[int(label)] for label in boxes.classes], dtype=torch.long)
        for boxes in annotated
    ]
    groups = (annotated, copies, predicted)
    log_probabilities = classify(images, groups, labels, part, len(category_ids))
    misfits = measure_misfits(images, groups, part, seed)
    judged = []
    for own_logs, own_misfits in zip(log_probabilities, misfits, strict=True):
        judged.append([Judgement(*pair) for pair in zip(own_logs, own_misfits, strict=True)])
    of_annotated, of_shifted, of_predicted = judged
    return Judgements(of_annotated, of_shifted, of_predicted, copies)


def shift_boxes(boxes: ImageBoxes, generator: np.random.Generator) -> ImageBoxes:
    """Shifts each box in a random direction, by 0.25 to 1.1 of its sides."""
    num_boxes = len(boxes.boxes)
    angle = generator.uniform(0, 2 * np.pi, num_boxes)
    length = generator.uniform(*_SHIFT, num_boxes)
    direction = np.stack([length * np.cos(angle), length * np.sin(angle)], axis=1)  # (n, 2)
    sides = boxes.boxes[:, 2:] - boxes.boxes[:, :2]
    shift = sides * torch.from_numpy(direction).to(sides)
    return boxes._replace(boxes=boxes.boxes + shift.repeat(1, 2))  # both corners


def classify(
    images: Sequence[ImageMaps],
    groups: Sequence[Sequence[ImageBoxes]],
    labels: Sequence[Tensor],
    part: Tensor,
    num_classes: int,
) -> list[list[Tensor]]:
    """Returns the logarithms of class probabilities (n, K) for each group of boxes and each image.

    The classifiers are fitted to the first group, whose classes are ``labels``. ``part`` has the
    part (N,) that each image belongs to.
    """
    features = [pool_groups(images, boxes, describe_look) for boxes in groups]
    all_labels = torch.cat(list(labels))
    outputs = judge_by_others(
        features,
        part,
        lambda is_fitted: fit_penalised(
            torch.cat(features[0])[is_fitted[0]],
            all_labels[is_fitted[0]],
            num_classes=num_classes,
            l2=_CLASS_PENALTY,
            tolerance=_TOLERANCE,
            dtype=torch.float32,
        ),
    )
    return [[logits.log_softmax(dim=1) for logits in group] for group in outputs]


def measure_misfits(
    images: Sequence[ImageMaps],
    groups: Sequence[Sequence[ImageBoxes]],
    part: Tensor,
    seed: int,
) -> list[list[Tensor]]:
    """Returns the logits (n,) of being shifted for each group of boxes and each image.

    The classifiers distinguish the first group from the second. ``part`` is as in ``classify``.
    """
    features = [pool_groups(images, boxes, describe_fit) for boxes in groups]
    features = reduce_dimensions(features, seed)
    originals = torch.cat(features[0])
    copies = torch.cat(features[1])

    def fit(is_fitted: Sequence[Tensor]) -> LinearProbe:
        inputs = torch.cat([originals[is_fitted[0]], copies[is_fitted[1]]])
        is_copy = torch.zeros(len(inputs), dtype=torch.long)
        is_copy[int(is_fitted[0].sum()) :] = 1
        return fit_penalised(
            inputs,
            is_copy,
            num_classes=2,
            l2=_FIT_PENALTY,
            tolerance=_TOLERANCE,
            dtype=torch.float32,
        )

    outputs = judge_by_others(features, part, fit)
    return [[logits[:, 1] - logits[:, 0] for logits in group] for group in outputs]


def pool_groups(
    images: Sequence[ImageMaps],
    boxes: Sequence[ImageBoxes],
    describe: Callable[[ImageMaps, Tensor], Tensor],
) -> list[Tensor]:
    """Returns the features (n, D) of the boxes of each image, in float16."""
    pairs = zip(images, boxes, strict=True)
    return [describe(image, own.boxes.float()).half() for image, own in pairs]


def judge_by_others(
    features: Sequence[Sequence[Tensor]],
    part: Tensor,
    fit: Callable[[Sequence[Tensor]], LinearProbe],
) -> list[list[Tensor]]:
    """Applies classifiers to the features (n, D) of groups of images that they were not fitted to.

    Args:
        features: features of the boxes of each image, for each group.
        part: part (N,) of each image.
        fit: returns a classifier. Its argument tells for each group which of all boxes to fit to.

    Returns:
        The logits (n, K) of the boxes of each image, for each group.
    """
    sizes = [[len(own) for own in group] for group in features]
    parts = [part.repeat_interleave(torch.tensor(size)) for size in sizes]
    stacked = [torch.cat(list(group)) for group in features]
    logits: list[Tensor | None] = [None] * len(features)
    for number in range(_NUM_PARTS):
        if not any((own == number).any() for own in parts):
            continue
        classifier = fit([own != number for own in parts])
        for index, (own, inputs) in enumerate(zip(parts, stacked, strict=True)):
            chosen = own == number
            judged = classifier(inputs[chosen])
            if logits[index] is None:
                logits[index] = judged.new_zeros(len(inputs), judged.shape[1])
            target = logits[index]
            assert target is not None
            target[chosen] = judged
    split = []
    for size, judged_group in zip(sizes, logits, strict=True):
        assert judged_group is not None
        split.append(list(judged_group.split(size)))
    return split


def describe_look(image: ImageMaps, boxes: Tensor) -> Tensor:
    """Returns features (n, D) of boxes (n, 4) that show their classes.

    They are the means of all maps in the box, the values at its center, and the means in a context
    of twice its size. Logarithms of width and height are appended.
    """
    parts = []
    for stride, grid in pool(image, boxes, 3).items():
        parts.append(grid.mean(dim=(2, 3)))
        if stride < _COARSE_STRIDE:
            parts.append(grid[:, :, 1, 1])
    for stride, grid in pool(image, enlarge(boxes, _CONTEXT), 2).items():
        if stride > min(_STRIDES):
            parts.append(grid.mean(dim=(2, 3)))
    return torch.cat([*parts, measure_sides(boxes)], dim=1)


def describe_fit(image: ImageMaps, boxes: Tensor) -> Tensor:
    """Returns features (n, D) of boxes (n, 4) that show how they fit their objects.

    They are the fine maps in a grid over a box of 1.6 times the size, and the logarithms of width
    and height.
    """
    fine = {}
    for stride, values in image.maps.items():
        if stride < _COARSE_STRIDE:
            fine[stride] = values
    surroundings = enlarge(boxes, _SURROUNDINGS)
    parts = []
    for stride, values in (fine or image.maps).items():
        size = _FINE_GRID if len(values) <= _MANY_CHANNELS else _COARSE_GRID
        only = ImageMaps({stride: values}, image.scale)
        parts.append(pool(only, surroundings, size)[stride].flatten(1))
    return torch.cat([*parts, measure_sides(boxes)], dim=1)


def pool(image: ImageMaps, boxes: Tensor, size: int) -> dict[int, Tensor]:
    """Returns the values (n, C, size, size) of each map in a grid over the boxes (n, 4)."""
    pooled = {}
    for stride, values in image.maps.items():
        pooled[stride] = roi_align(
            values.float()[None],
            [boxes * image.scale],
            output_size=size,
            spatial_scale=1 / stride,
            sampling_ratio=2,
            aligned=True,
        )
    return pooled


def enlarge(boxes: Tensor, factor: float) -> Tensor:
    """Multiplies the sides of boxes (n, 4), whose centers do not change."""
    center = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = (boxes[:, 2:] - boxes[:, :2]) / 2 * factor
    return torch.cat([center - half, center + half], dim=1)


def measure_sides(boxes: Tensor) -> Tensor:
    """Returns the logarithms (n, 2) of width and height of boxes (n, 4)."""
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=1).log()


def reduce_dimensions(features: Sequence[Sequence[Tensor]], seed: int) -> list[list[Tensor]]:
    """Standardizes features (n, D) of groups, and projects them to their principal components.

    Statistics and components are those of the first two groups. There are 512 components, or fewer
    if these groups have fewer than 5,120 boxes.
    """
    known = torch.cat([*features[0], *features[1]]).float()
    mean = known.mean(dim=0)
    scale = 1 / (known.std(dim=0) + 1e-3)
    standardized = (known - mean) * scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of the randomized decomposition
        enough = max(1, len(standardized) // _BOXES_PER_COMPONENT)
        rank = min(_NUM_COMPONENTS, enough, standardized.shape[1])
        components = torch.pca_lowrank(standardized, q=rank, center=False, niter=1)[2]
    return [[(own.float() - mean) * scale @ components for own in group] for group in features]
