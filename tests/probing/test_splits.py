# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The part of the training images set aside has each class in its proportion."""

import torch

from qbheat_det.probing import split_by_class


def test_each_class_is_divided_in_the_same_proportion() -> None:
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 3 + [3] * 2 + [4])[torch.randperm(36)]
    remain, aside = split_by_class(labels, share=0.2)
    assert sorted([*remain.tolist(), *aside.tolist()]) == list(range(36))
    # 2 of 10, 4 of 20, 0.6 of 3 rounded, at least 1 of 2; the only image of a class stays.
    assert labels[aside].bincount(minlength=5).tolist() == [2, 4, 1, 1, 0]
    assert torch.equal(remain, remain.sort().values)


def test_the_draw_is_a_function_of_the_seed() -> None:
    labels = torch.arange(60) % 3
    first, again, other = (split_by_class(labels, seed=seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_class_is_never_set_aside_whole() -> None:
    remain, aside = split_by_class(torch.tensor([0, 0, 1, 1, 1]), share=1.0)
    assert (len(remain), len(aside)) == (2, 3)
