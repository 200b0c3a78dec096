# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mixed images and their targets, against a loop over images."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qbheat_det.modeling.classification import BatchMixing

WAYS = {"mixup": {"mixup": 0.8}, "cutmix": {"cutmix": 1.0}, "both": {"mixup": 0.8, "cutmix": 1.0}}
NUM_CLASSES = 5


def _batch() -> tuple[Tensor, Tensor]:
    images = torch.randn(6, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    return images, torch.tensor([0, 3, 1, 4, 4, 2])


def _one_hot(label: Tensor, smoothing: float) -> Tensor:
    target = torch.full((NUM_CLASSES,), smoothing / NUM_CLASSES)
    target[label] += 1 - smoothing
    return target


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_sum_to_one_and_weigh_the_labels_of_a_pair(way: str, smoothing: float) -> None:
    mixing = BatchMixing(num_classes=NUM_CLASSES, label_smoothing=smoothing, **WAYS[way])
    for step in range(20):
        np.random.seed(step)
        images, labels = _batch()
        _, targets = mixing(images, labels)
        assert_close(targets.sum(dim=1), torch.ones(6))
        first, last = _one_hot(labels[0], smoothing), _one_hot(labels[5], smoothing)
        share = (targets[0, 0] - last[0]) / (first[0] - last[0])
        for i in range(6):
            own, other = (_one_hot(labels[k], smoothing) for k in (i, 5 - i))
            assert_close(targets[i], share * own + (1 - share) * other)


def test_cutmix_pastes_a_rectangle_whose_area_the_targets_weigh() -> None:
    mixing = BatchMixing(num_classes=NUM_CLASSES, cutmix=1.0)
    np.random.seed(2)
    images, labels = _batch()
    mixed, targets = mixing(images.clone(), labels)
    pasted = (mixed[0] != images[0]).all(dim=0)
    rows, columns = pasted.any(dim=1), pasted.any(dim=0)
    assert torch.equal(pasted, rows[:, None] & columns)
    assert 0 < pasted.sum() < pasted.numel()
    for i in range(6):
        assert torch.equal(mixed[i], torch.where(pasted, images[5 - i], images[i]))
    assert_close(targets[0, labels[0]], 1 - pasted.float().mean())
