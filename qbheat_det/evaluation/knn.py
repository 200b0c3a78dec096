# Copyright (c) qbheat_det contributors. Apache-2.0.
"""k-nearest-neighbour classification of features, without training.

"Unsupervised Feature Learning via Non-Parametric Instance Discrimination", arXiv:1805.01978: the
k most similar training images vote, each with weight exp(cosine similarity / temperature).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .classification import TopAccuracy, rank_true_class

_TINY = torch.finfo(torch.float64).tiny
_LEAST_VOTE = 1e-300  # of a neighbour, however far: less would round to none
_CHUNK = 2**24  # similarities at a time: 128 MB


@torch.no_grad()
def score_neighbours(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> TopAccuracy:
    """Classifies images by the votes of others.

    Args:
        train: features (T, D) and labels (T,) of the images that vote.
        val: features (N, D) and labels (N,) of those that are classified.
        k: neighbours that vote; all where there are fewer.
        temperature: the lower, the more the nearest count.
    """
    return TopAccuracy.from_ranks(rank_true_classes(train, val, k=k, temperature=temperature))


@torch.no_grad()
def rank_true_classes(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    k: int,
    temperature: float,
    chunk: int = _CHUNK,
) -> Tensor:
    """Returns (N,), how many classes come before the true one; see ``score_neighbours``.

    Of equally similar images the first vote, of classes with equal votes the lower label comes
    first, and a class without votes comes last.

    Raises:
        ValueError: ``k`` or ``temperature`` is not positive, or nobody can vote.
    """
    (train_features, train_labels), (features, labels) = train, val
    if k < 1 or not temperature > 0 or not len(train_features):
        raise ValueError(
            f"k ({k}), temperature ({temperature}) and the number of images that vote "
            f"({len(train_features)}) must be positive"
        )
    k = min(k, len(train_features))
    num_classes = int(torch.cat([train_labels, labels]).max()) + 1
    voters = F.normalize(train_features.double(), dim=1, eps=_TINY).T
    ranks = [torch.empty(0, dtype=torch.long, device=labels.device)]
    rows = max(1, chunk // len(train_features))
    for some, truth in zip(features.split(rows), labels.split(rows), strict=True):
        # In float64 and rounded, equal features have equal similarities, whatever the chunks.
        similarities = (F.normalize(some.double(), dim=1, eps=_TINY) @ voters).float()
        neighbours = _first_of_the_largest(similarities, k)
        nearest = similarities.gather(1, neighbours).double()
        # Relative to the largest: exp(1 / temperature) alone is infinite at a low temperature.
        nearest -= nearest.amax(dim=1, keepdim=True)
        weights = (nearest / temperature).exp().clamp(min=_LEAST_VOTE)
        votes = weights.new_zeros(len(some), num_classes)
        votes.scatter_add_(1, train_labels[neighbours], weights)
        has_votes = votes.gather(1, truth[:, None])[:, 0] > 0
        ranks.append(torch.where(has_votes, rank_true_class(votes, truth), num_classes + 5))
    return torch.cat(ranks)


@torch.no_grad()
def extract_features(
    describe: Callable[[list[dict[str, Any]]], Tensor], batches: Iterable[list[dict[str, Any]]]
) -> tuple[Tensor, Tensor]:
    """Returns features (N, D) and labels (N,) of all images, on the CPU.

    Args:
        describe: from a batch of a mapper's dicts to its features (N, D).
        batches: dicts with "label".
    """
    features, labels = [torch.empty(0, 0)], []
    for batch in batches:
        features.append(describe(batch).float().cpu())
        labels += [entry["label"] for entry in batch]
    return torch.cat(features[1:] or features), torch.tensor(labels, dtype=torch.long)


def _first_of_the_largest(values: Tensor, k: int) -> Tensor:
    """Returns (N, k), the columns of the k largest of each row, of equal ones the first.

    ``topk`` alone leaves open which of equal ones it takes.
    """
    smallest = values.topk(k, dim=1).values[:, -1:]
    above, equal = values > smallest, values == smallest
    free = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= free))
    return chosen.nonzero()[:, 1].view(len(values), k)
