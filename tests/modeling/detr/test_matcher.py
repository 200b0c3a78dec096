# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hungarian matching against trying every assignment."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qbheat_det.modeling.detr import HungarianMatcher, Targets
from qbheat_det.modeling.detr.criterion import Matches

from ..reference_set_criterion import (
    CLASS_WEIGHT,
    GIOU_WEIGHT,
    L1_WEIGHT,
    match_by_trying_all,
    matching_cost,
)


def matcher() -> HungarianMatcher:
    return HungarianMatcher(class_weight=CLASS_WEIGHT, l1_weight=L1_WEIGHT, giou_weight=GIOU_WEIGHT)


def random_boxes(*shape: int, generator: torch.Generator) -> Tensor:
    """Boxes inside the image, neither thin nor aligned with it."""
    corners = torch.rand(*shape, 2, 2, generator=generator)
    size = 0.05 + 0.5 * corners[..., 1, :]
    return torch.cat([size / 2 + corners[..., 0, :] * (1 - size), size], dim=-1)


def predictions(blocks: int, images: int, queries: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(blocks + 10 * images + 100 * queries)
    logits = 3 * torch.randn(blocks, images, queries, classes + 1, generator=generator)
    return logits, random_boxes(blocks, images, queries, generator=generator)


def ground_truth(counts: list[int], classes: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(sum(counts))
    labels = [torch.randint(classes, (count,), generator=generator) for count in counts]
    return labels, [random_boxes(count, generator=generator) for count in counts]


def as_list(matches: Matches) -> list[tuple[int, int, int, int]]:
    fields = (matches.block, matches.image, matches.query, matches.target)
    return list(zip(*(field.tolist() for field in fields), strict=True))


@pytest.mark.parametrize("counts", [[3, 1, 4], [0, 2], [5, 5, 0, 1], [1]], ids=str)
def test_it_finds_the_cheapest_of_all_assignments(counts: list[int]) -> None:
    logits, boxes = predictions(3, len(counts), queries=5, classes=4)
    labels, true_boxes = ground_truth(counts, classes=4)
    expected = [
        (block, image, query, target)
        for block in range(3)
        for image, truth in enumerate(zip(labels, true_boxes, strict=True))
        for query, target in sorted(
            match_by_trying_all(
                matching_cost(logits[block, image], boxes[block, image], truth), len(truth[0])
            )
        )
    ]
    assert as_list(matcher()(logits, boxes, Targets.stack(labels, true_boxes))) == expected


def test_costs_equal_the_naive_ones() -> None:
    logits, boxes = predictions(2, 2, queries=6, classes=3)
    labels, true_boxes = ground_truth([2, 5], classes=3)
    cost = matcher().cost(logits, boxes, Targets.stack(labels, true_boxes))
    for block in range(2):
        for image, truth in enumerate(zip(labels, true_boxes, strict=True)):
            wanted = torch.tensor(matching_cost(logits[block, image], boxes[block, image], truth))
            assert_close(cost[block, image, :, : len(truth[0])], wanted, rtol=0, atol=1e-5)


def test_a_diverged_model_does_not_crash_the_solver() -> None:
    logits, boxes = predictions(1, 1, queries=5, classes=4)
    targets = Targets.stack(*ground_truth([3], 4))
    assert len(as_list(matcher()(logits * float("nan"), boxes, targets))) == 3
