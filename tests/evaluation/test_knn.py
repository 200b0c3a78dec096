# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Nearest neighbours against a double loop in NumPy, with ties, and what must not change them."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qbheat_det.evaluation import measure_ranks, score_neighbours
from qbheat_det.evaluation.classification import rank_true_classes

Labelled = tuple[Tensor, Tensor]


def draw(number: int, *, classes: int, dim: int = 6, seed: int = 0) -> Labelled:
    """Features that are small whole numbers, so that many are equal or of equal direction."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randint(-1, 2, (number, dim), generator=generator).float()
    features[:, 0] += 2  # else some would be zero
    return features, torch.randint(classes, (number,), generator=generator)


def naive_ranks(train: Labelled, val: Labelled, *, k: int, temperature: float) -> list[int]:
    """One image and one neighbour at a time."""
    ranks = []
    for feature, truth in zip(val[0].double().numpy(), val[1].tolist(), strict=True):
        similarities = []
        for other in train[0].double().numpy():
            cosine = feature @ other / math.sqrt(feature @ feature) / math.sqrt(other @ other)
            similarities.append(float(np.float32(cosine)))
        order = sorted(range(len(similarities)), key=lambda i: (-similarities[i], i))
        votes: dict[int, float] = {}
        for i in sorted(order[:k]):
            label = int(train[1][i])
            votes[label] = votes.get(label, 0.0) + math.exp(similarities[i] / temperature)
        ranking = sorted(votes, key=lambda label: (-votes[label], label))
        ranks.append(ranking.index(truth) if truth in ranking else 99)
    return ranks


def score_of(ranks: list[int]) -> tuple[float, float]:
    hits = [100 * sum(rank < top for rank in ranks) / len(ranks) for top in (1, 5)]
    return hits[0], hits[1]


@pytest.mark.parametrize("chunk", [200, 10**6])
@pytest.mark.parametrize(("k", "classes"), [(1, 3), (20, 12), (500, 4)])
def test_ranks_are_those_of_a_double_loop_however_the_work_is_cut(
    k: int, classes: int, chunk: int
) -> None:
    train, val = draw(90, classes=classes), draw(30, classes=classes, seed=1)
    # A tie decides which neighbours vote.
    assert len(train[0].unique(dim=0)) < len(train[0])
    ranks = rank_true_classes(train, val, k=k, temperature=0.07, chunk=chunk)
    expected = naive_ranks(train, val, k=k, temperature=0.07)
    capped = [rank if rank < 99 else classes for rank in expected]
    assert [min(rank, classes) for rank in ranks.tolist()] == capped
    score = score_neighbours(train, val, k=k)
    assert (score["top1"], score["top5"]) == pytest.approx(score_of(expected))


def test_at_a_very_low_temperature_the_nearest_decides() -> None:
    train = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), torch.tensor([0, 1, 2])
    val = torch.tensor([[0.1, 1.0], [1.0, 0.1]]), torch.tensor([2, 0])
    # exp(1 / 0.001) is infinite in float64: all would tie, and the first class win.
    ranks = rank_true_classes(train, val, k=3, temperature=0.001)
    torch.testing.assert_close(ranks, torch.tensor([0, 0]))
    ranks = rank_true_classes(train, (val[0], torch.tensor([0, 2])), k=3, temperature=0.001)
    assert int(ranks.max()) < 3  # they have votes, however small


def test_errors_are_those_of_binomial_counts() -> None:
    error = 100 * math.sqrt(0.75 * 0.25 / 4)
    expected = {"top1": 50.0, "top5": 75.0, "top1_standard_error": 25.0}
    assert measure_ranks(torch.tensor([0, 0, 3, 9])) == {**expected, "top5_standard_error": error}
    assert all(map(math.isnan, measure_ranks(torch.tensor([])).values()))


@pytest.mark.parametrize(("k", "temperature", "voters"), [(0, 1.0, 3), (1, 0.0, 3), (1, 1.0, 0)])
def test_nonsense_is_refused(k: int, temperature: float, voters: int) -> None:
    train, val = draw(voters, classes=2), draw(2, classes=2)
    with pytest.raises(ValueError, match="temperature"):
        rank_true_classes(train, val, k=k, temperature=temperature)
