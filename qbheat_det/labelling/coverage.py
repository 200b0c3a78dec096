# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compares images by their features alone: near-duplicates, and images that cover a pool.

- ``typiclust``: "Active Learning on a Budget: Opposite Strategies Suit High and Low Budgets",
  arXiv:2202.02794. The most typical image of each uncovered cluster.
- ``prob_cover``: "Active Learning Through a Covering Lens", arXiv:2205.11320. Balls of one radius
  that cover as many images as possible.
- ``k_center``: "Active Learning for Convolutional Neural Networks: A Core-Set Approach",
  arXiv:1708.00489. The image farthest from all chosen ones.

Letters: N images of the pool, D features, unit vectors (N, D) throughout, so that the squared
distance of two images is 2 - 2 cos. ``taken`` holds indices of images that have labels. A strategy
returns new indices in the order of choice, as many as the budget unless the pool is too small.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import normalize

_BLOCK = 2**24  # cosines in memory at a time: 64 MiB
_DIMENSIONS = 128
_NO_DIFFERENCE = 0.01  # of an image to the mean of the pool, as a share of its features' length
_NEIGHBOURS = 20  # of typicality, as in TypiClust
_MAX_CLUSTERS = 500  # as in TypiClust
_PURITY = 0.95  # of ProbCover's balls
_CANDIDATES = 4  # uncertain images for each one that is chosen
COVERING = ("typiclust", "prob_cover", "k_center")


def unit_vectors(features: Tensor) -> Tensor:
    """Centres features (N, D), projects them to their main directions, and scales them to length 1.

    At most 128 directions are kept: distances in the others are mostly noise, and the cost of all
    functions here is proportional to D. Images that equal the mean get the same vector.
    """
    features = features.float()
    centred = features - features.mean(0)
    is_mean = centred.norm(dim=1) < _NO_DIFFERENCE * features.norm(dim=1)
    if features.shape[1] > _DIMENSIONS:
        _, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
        centred = centred @ directions[:, -_DIMENSIONS:]
    centred[is_mean] = torch.eye(1, centred.shape[1])
    return normalize(centred, dim=1)


def find_duplicates(vectors: Tensor, *, cosine: float = 0.98) -> Tensor:
    """Returns for each image the first image (N,) that it nearly repeats, or its own index.

    Frames of one video are the usual case. Groups are connected: an image belongs to the group of
    every image it repeats.
    """
    first = torch.arange(len(vectors))
    for rows, cosines in _blocks(vectors, is_upper=True):
        row, column = (cosines >= cosine).nonzero(as_tuple=True)
        pairs = first[torch.stack([row, column]) + rows.start]
        pairs = pairs[:, pairs[0] != pairs[1]]
        if pairs.numel():
            first = _join(pairs, len(first))[first]
    return first


def _join(pairs: Tensor, count: int) -> Tensor:
    """Returns for each of ``count`` indices the smallest one that pairs (2, P) connect it to."""
    graph = coo_array((np.ones(pairs.shape[1], dtype=np.bool_), pairs.numpy()), (count, count))
    groups = torch.from_numpy(connected_components(graph, directed=False)[1]).long()
    smallest = torch.full((count,), count).scatter_reduce(0, groups, torch.arange(count), "amin")
    return smallest[groups]


def _blocks(vectors: Tensor, *, is_upper: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows of the matrix of cosines (N, N), block by block.

    With ``is_upper``, a block begins at the column of its first row.
    """
    size = _count_rows(vectors)
    for start in range(0, len(vectors), size):
        rows = slice(start, min(start + size, len(vectors)))
        yield rows, vectors[rows] @ vectors[start if is_upper else 0 :].T


def _count_rows(vectors: Tensor) -> int:
    """Returns how many rows of the matrix of cosines fit into a block."""
    return max(1, _BLOCK // len(vectors))


def cover(
    strategy: str, vectors: Tensor, budget: int, taken: Sequence[int] = (), *, seed: int = 0
) -> list[int]:
    """Chooses images by one of the strategies ``COVERING``; ``seed`` is that of the clustering."""
    if strategy == "k_center":
        return k_center(vectors, budget, taken)
    choose = typiclust if strategy == "typiclust" else prob_cover
    return choose(vectors, budget, taken, seed=seed)


def _find_nearest(vectors: Tensor, others: Sequence[int]) -> Tensor:
    """Returns the cosine (N,) of each vector with the nearest of some others; -inf without any."""
    nearest = torch.full((len(vectors),), -torch.inf)
    size = _count_rows(vectors)
    for start in range(0, len(others), size):
        cosines = vectors[list(others[start : start + size])] @ vectors.T
        nearest = torch.maximum(nearest, cosines.amax(0))
    return nearest


def k_center(vectors: Tensor, budget: int, taken: Sequence[int] = ()) -> list[int]:
    """Chooses the farthest image again and again; the first is the one nearest to the mean."""
    nearest = _find_nearest(vectors, taken)
    nearest[list(taken)] = torch.inf
    chosen: list[int] = []
    for _ in range(min(budget, len(vectors) - len(set(taken)))):
        is_first = not chosen and not taken
        index = int((vectors @ vectors.mean(0)).argmax() if is_first else nearest.argmin())
        chosen.append(index)
        nearest = torch.maximum(nearest, vectors @ vectors[index])
        nearest[index] = torch.inf
    return chosen


def choose_uncertain(
    vectors: Tensor, uncertainties: Tensor, budget: int, taken: Sequence[int] = ()
) -> list[int]:
    """Chooses uncertain images that differ from each other and from those with labels.

    ``k_center`` chooses among the images with the largest uncertainties (N,), four times the
    budget. The most uncertain image comes first.
    """
    is_free = torch.ones(len(vectors), dtype=torch.bool)
    is_free[list(taken)] = False
    order = uncertainties.argsort(descending=True, stable=True)
    candidates = order[is_free[order]][: _CANDIDATES * budget].tolist()
    near = [*taken, *candidates]
    known = range(len(taken) + len(candidates[:1]))
    others = k_center(vectors[near], min(budget, len(candidates)) - 1, known)
    return [near[i] for i in (*known[len(taken) :], *others)]


def typiclust(
    vectors: Tensor, budget: int, taken: Sequence[int] = (), *, seed: int = 0
) -> list[int]:
    """Clusters the pool, and chooses the most typical image of the largest uncovered clusters.

    There are as many clusters as images that will be labelled in all, at most 500.
    """
    free = torch.ones(len(vectors), dtype=torch.bool)
    free[list(taken)] = False
    count = min(len(set(taken)) + budget, _MAX_CLUSTERS, len(vectors))
    clusters = k_means(vectors, count, seed=seed)
    scores = torch.where(free, _typicality(vectors, clusters), -torch.inf)
    sizes = torch.bincount(clusters, minlength=count)
    labelled = torch.bincount(clusters[~free], minlength=count)
    chosen: list[int] = []
    for _ in range(min(budget, int(free.sum()))):
        is_open = sizes > labelled
        candidates = is_open & (labelled == labelled[is_open].min())
        cluster = int(torch.where(candidates, sizes, -1).argmax())
        index = int(torch.where(clusters == cluster, scores, -torch.inf).argmax())
        chosen.append(index)
        labelled[cluster] += 1
        scores[index] = -torch.inf
    return chosen


def _typicality(vectors: Tensor, clusters: Tensor) -> Tensor:
    """Returns the inverse mean distance (N,) of each image to its neighbours in its own cluster."""
    typical = torch.zeros(len(vectors))
    for cluster in clusters.unique():
        members = (clusters == cluster).nonzero().flatten()
        count = min(_NEIGHBOURS, len(members) - 1)
        for rows, cosines in _blocks(vectors[members]):
            best = cosines.topk(count + 1, dim=1).values[:, 1:]  # without the image itself
            distances = (2 - 2 * best).clamp(min=0).sqrt()
            typical[members[rows]] = 1 / (distances.mean(1) if count else 1.0)
    return typical


def prob_cover(
    vectors: Tensor, budget: int, taken: Sequence[int] = (), *, seed: int = 0
) -> list[int]:
    """Chooses the image whose ball covers the most uncovered images, again and again.

    The radius is the largest at which 95 % of the balls lie in one cluster of as many as will be
    labelled in all. Once all images are covered, ``k_center`` chooses the rest.
    """
    least = choose_cosine(vectors, len(set(taken)) + budget, seed=seed)
    uncovered = _find_nearest(vectors, taken) < least
    gains = _count_neighbours(vectors, vectors[uncovered], least)
    gains[list(taken)] = -1
    chosen: list[int] = []
    while len(chosen) < budget and int(gains.max()) > 0:
        index = int(gains.argmax())
        fresh = uncovered & (vectors @ vectors[index] >= least)
        uncovered &= ~fresh
        gains -= _count_neighbours(vectors, vectors[fresh], least)
        gains[index] = -1  # rounding may leave a rest
        chosen.append(index)
    return chosen + k_center(vectors, budget - len(chosen), [*taken, *chosen])


def _count_neighbours(vectors: Tensor, others: Tensor, least: float) -> Tensor:
    """Returns for each vector (N,) how many of the others have at least a cosine with it."""
    counts = torch.zeros(len(vectors), dtype=torch.int64)
    for part in others.split(_count_rows(vectors)):
        is_near = vectors @ part.T >= least
        counts += is_near.view(torch.uint8).sum(1, dtype=torch.int32)  # faster than bool
    return counts


def choose_cosine(vectors: Tensor, num_clusters: int, *, seed: int = 0) -> float:
    """Returns the least cosine, that is the largest radius, at which 95 % of the balls are pure.

    A ball is pure if all of its images are of one k-means cluster.
    """
    clusters = k_means(vectors, min(num_clusters, _MAX_CLUSTERS, len(vectors)), seed=seed)
    nearest_other = torch.full((len(vectors),), -1.0)
    for rows, cosines in _blocks(vectors):
        is_same = clusters[rows, None] == clusters
        nearest_other[rows] = cosines.masked_fill_(is_same, -1.0).amax(1)
    # Above the cosine of the nearest image of another cluster, and below 1, so that a ball contains
    # its own centre, both in spite of rounding.
    return min(float(nearest_other.quantile(_PURITY)) + 1e-5, 1 - 1e-4)


def k_means(vectors: Tensor, count: int, *, seed: int = 0, iterations: int = 30) -> Tensor:
    """Returns the cluster (N,) of each vector by spherical k-means from k-means++ centres."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(vectors), (), generator=generator))]
    distances = 2 - 2 * vectors @ vectors[chosen[0]]
    for _ in range(count - 1):
        chosen.append(int(torch.multinomial(distances.clamp(1e-12), 1, generator=generator)))
        distances = torch.minimum(distances, 2 - 2 * vectors @ vectors[chosen[-1]])
    means = vectors[chosen]
    clusters = torch.zeros(len(vectors), dtype=torch.int64)
    for _ in range(iterations):
        nearest = (vectors @ means.T).argmax(1)
        if torch.equal(nearest, clusters):
            break
        clusters = nearest
        sums = torch.zeros_like(means).index_add_(0, clusters, vectors)
        is_used = torch.bincount(clusters, minlength=count) > 0
        means[is_used] = normalize(sums[is_used], dim=1)
    return clusters
