# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Denoising queries and their losses a second time, image by image in Python loops.

A query is a ``NoisedBox``; boxes are (cx, cy, w, h) in [0, 1] of the unpadded image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .reference_set_criterion import Target, generalized_iou


@dataclass(frozen=True)
class Settings:
    """As the config has them."""

    groups: int = 3
    box_noise: float = 0.4
    label_noise: float = 0.25
    negatives: bool = True
    max_queries: int = 200


@dataclass(frozen=True)
class NoisedBox:
    """What a query is made of, and what it is to find: a target, or None for no object."""

    label: int
    box: tuple[float, ...]
    group: int
    target: int
    negative: bool


def noised_boxes(
    target: Target, settings: Settings, num_classes: int, noise: Tensor
) -> list[NoisedBox]:
    """All queries of one image; numbers in [0, 1) are (E, 6), E at least as many."""
    labels, boxes = target
    copies = 2 if settings.negatives else 1
    while len(labels) * copies > settings.max_queries:
        labels, boxes = labels[:-1], boxes[:-1]
    queries: list[NoisedBox] = []
    for group in range(settings.groups):
        if group and len(queries) + copies * len(labels) > settings.max_queries:
            break
        for negative in (False, True)[:copies]:
            for index in range(len(labels)):
                *shift, relabel, label = noise[len(queries)].tolist()
                seen = int(labels[index])
                if relabel < settings.label_noise:
                    seen = int(label * num_classes)
                box = _move(boxes[index].tolist(), shift, settings, negative)
                queries.append(NoisedBox(seen, box, group, index, negative))
    return queries


def _move(
    box: Sequence[float], shift: Sequence[float], settings: Settings, negative: bool
) -> tuple[float, ...]:
    centre, side = box[:2], box[2:]
    ends = []
    for axis in (0, 1):
        pair = []
        for sign, number in ((-1, shift[axis]), (1, shift[2 + axis])):
            way = 2 * number - 1
            if negative:
                way += 1 if way >= 0 else -1
            corner = centre[axis] + (sign + way * settings.box_noise) * side[axis] / 2
            pair.append(min(max(corner, 0.0), 1.0))
        ends.append(sorted(pair))
    (left, right), (top, bottom) = ends
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def denoising_losses(
    logits: Tensor,
    boxes: Tensor,
    queries: Sequence[Sequence[NoisedBox]],
    targets: Sequence[Target],
    no_object_weight: float,
) -> dict[str, Tensor]:
    """Weighted losses of logits (L, N, E, K + 1) and boxes (L, N, E, 4), summed over the blocks."""
    cross_entropy, distance, giou = logits.sum() * 0, boxes.sum() * 0, boxes.sum() * 0
    weights = sum(
        no_object_weight if query.negative else 1.0 for image in queries for query in image
    )
    found = max(sum(not query.negative for image in queries for query in image), 1)
    for block in range(len(logits)):
        for image, of_image in enumerate(queries):
            labels, true_boxes = targets[image]
            for number, query in enumerate(of_image):
                scores = logits[block, image, number]
                wanted = len(scores) - 1 if query.negative else int(labels[query.target])
                weight = no_object_weight if query.negative else 1.0
                cross_entropy = cross_entropy + weight * (scores.logsumexp(0) - scores[wanted])
                if not query.negative:
                    guess, truth = boxes[block, image, number], true_boxes[query.target]
                    distance = distance + (guess - truth).abs().sum()
                    giou = giou + 1 - generalized_iou(guess, truth)
    return {
        "loss_ce": cross_entropy / max(weights, 1e-6),
        "loss_bbox": 5 * distance / found,
        "loss_giou": 2 * giou / found,
    }
