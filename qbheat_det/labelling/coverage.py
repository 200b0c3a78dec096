# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Chooses images that cover a pool, from their features alone: the cold start of labelling.

- ``typiclust``: "Active Learning on a Budget: Opposite Strategies Suit High and Low Budgets",
  arXiv:2202.02794. The most typical image of each uncovered cluster.
- ``prob_cover``: "Active Learning Through a Covering Lens", arXiv:2205.11320. Balls of one radius
  that cover as many images as possible.
- ``k_center``: "Active Learning for Convolutional Neural Networks: A Core-Set Approach",
  arXiv:1708.00489. The image farthest from all chosen ones.

Letters: N images of the pool, D features, unit vectors (N, D) throughout, so that the squared
distance of two images is 2 - 2 cos. ``taken`` holds indices that are labelled already or must not
be chosen; every function returns new indices in the order of choice, as many as the budget unless
the pool is too small.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_BLOCK = 2048  # rows of a similarity matrix in memory at a time
_NEIGHBOURS = 20  # of typicality, as in TypiClust
_MAX_CLUSTERS = 500  # as in TypiClust
_PURITY = 0.95  # of ProbCover's balls


def unit_vectors(features: Tensor, *, dimensions: int = 128) -> Tensor:
    """Centres features (N, D), projects them to their main directions, and scales them to length 1.

    At most ``dimensions`` are kept, since distances in the others are mostly noise, and the cost of
    all functions here is proportional to D.
    """
    centred = features.float() - features.float().mean(0)
    if features.shape[1] > dimensions:
        _, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
        centred = centred @ directions[:, -dimensions:]
    return torch.nn.functional.normalize(centred, dim=1)


def similarity_blocks(vectors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows of the matrix of cosines (N, N), block by block."""
    for start in range(0, len(vectors), _BLOCK):
        rows = slice(start, min(start + _BLOCK, len(vectors)))
        yield rows, vectors[rows] @ vectors.T


def k_center(vectors: Tensor, budget: int, taken: Sequence[int] = ()) -> list[int]:
    """Chooses the farthest image again and again; the first is the one nearest to the mean."""
    chosen: list[int] = []
    nearest = torch.full((len(vectors),), -torch.inf)  # cosine with the nearest chosen image
    for index in taken:
        nearest = torch.maximum(nearest, vectors @ vectors[index])
    nearest[list(taken)] = torch.inf
    for _ in range(min(budget, len(vectors) - len(set(taken)))):
        is_first = not chosen and not taken
        index = int((vectors @ vectors.mean(0)).argmax() if is_first else nearest.argmin())
        chosen.append(index)
        nearest = torch.maximum(nearest, vectors @ vectors[index])
        nearest[index] = torch.inf
    return chosen


def typicality(vectors: Tensor, clusters: Tensor) -> Tensor:
    """Returns the inverse mean distance (N,) of each image to its neighbours in its own cluster."""
    typical = torch.zeros(len(vectors))
    for cluster in clusters.unique():
        members = (clusters == cluster).nonzero().flatten()
        count = min(_NEIGHBOURS, len(members) - 1)
        for rows, cosines in similarity_blocks(vectors[members]):
            best = cosines.topk(count + 1, dim=1).values[:, 1:]  # without the image itself
            distances = (2 - 2 * best).clamp(min=0).sqrt()
            typical[members[rows]] = 1 / (distances.mean(1) if count else 1.0)
    return typical


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
    scores = torch.where(free, typicality(vectors, clusters), -torch.inf)
    labelled = torch.bincount(clusters[~free], minlength=count)
    sizes = torch.bincount(clusters, minlength=count)
    chosen: list[int] = []
    while len(chosen) < min(budget, int(free.sum()) + len(chosen)):
        is_open = torch.bincount(clusters[free], minlength=count) > 0
        fewest = labelled[is_open].min()
        candidates = is_open & (labelled == fewest)
        cluster = int(torch.where(candidates, sizes, -1).argmax())
        index = int(torch.where(clusters == cluster, scores, -torch.inf).argmax())
        chosen.append(index)
        labelled[cluster] += 1
        free[index], scores[index] = False, -torch.inf
    return chosen


def prob_cover(
    vectors: Tensor, budget: int, taken: Sequence[int] = (), *, seed: int = 0
) -> list[int]:
    """Chooses the image whose ball covers the most uncovered images, again and again.

    The radius is the largest at which 95 % of the balls lie in one cluster of as many as will be
    labelled in all. Once all images are covered, ``k_center`` chooses the rest.
    """
    least = choose_cosine(vectors, len(set(taken)) + budget, seed=seed)
    uncovered = torch.ones(len(vectors), dtype=torch.bool)
    gains = _count_neighbours(vectors, vectors, least)  # uncovered images in the ball of each

    def cover(index: int) -> None:
        fresh = uncovered & (vectors @ vectors[index] >= least)
        uncovered[fresh] = False
        gains.sub_(_count_neighbours(vectors, vectors[fresh], least))

    for index in taken:
        cover(index)
    chosen: list[int] = []
    gains[list(taken)] = -1
    while len(chosen) < budget and int(gains.max()) > 0:
        index = int(gains.argmax())
        cover(index)
        chosen.append(index)
    return chosen + k_center(vectors, budget - len(chosen), [*taken, *chosen])


def _count_neighbours(vectors: Tensor, others: Tensor, least: float) -> Tensor:
    """Returns for each vector (N,) how many of the others have at least a cosine with it."""
    counts = torch.zeros(len(vectors), dtype=torch.int64)
    for part in others.split(_BLOCK):
        is_near = vectors @ part.T >= least
        counts += is_near.view(torch.uint8).sum(1, dtype=torch.int32)  # faster than bool
    return counts


def choose_cosine(vectors: Tensor, num_clusters: int, *, seed: int = 0) -> float:
    """Returns the least cosine, that is the largest radius, at which 95 % of the balls are pure.

    A ball is pure if all of its images are of one k-means cluster.
    """
    clusters = k_means(vectors, min(num_clusters, _MAX_CLUSTERS, len(vectors)), seed=seed)
    nearest_other = torch.full((len(vectors),), -1.0)
    for rows, cosines in similarity_blocks(vectors):
        is_other = clusters[rows, None] != clusters
        nearest_other[rows] = torch.where(is_other, cosines, -1.0).amax(1)
    # Above the cosine of the nearest image of another cluster, and below 1, so that a ball contains
    # its own centre, both in spite of rounding.
    return min(float(nearest_other.quantile(_PURITY)) + 1e-5, 1 - 1e-4)


def k_means(vectors: Tensor, count: int, *, seed: int = 0, iterations: int = 30) -> Tensor:
    """Returns the cluster (N,) of each vector by spherical k-means from k-means++ centres."""
    generator = torch.Generator().manual_seed(seed)
    first = int(torch.randint(len(vectors), (), generator=generator))
    centres = [vectors[first]]
    distances = 2 - 2 * vectors @ vectors[first]
    for _ in range(count - 1):
        weights = distances.clamp(min=1e-12)
        index = int(torch.multinomial(weights, 1, generator=generator))
        centres.append(vectors[index])
        distances = torch.minimum(distances, 2 - 2 * vectors @ vectors[index])
    means = torch.stack(centres)
    clusters = torch.zeros(len(vectors), dtype=torch.int64)
    for _ in range(iterations):
        nearest = (vectors @ means.T).argmax(1)
        if torch.equal(nearest, clusters):
            break
        clusters = nearest
        sums = torch.zeros_like(means).index_add_(0, clusters, vectors)
        is_used = torch.bincount(clusters, minlength=count) > 0
        means[is_used] = torch.nn.functional.normalize(sums[is_used], dim=1)
    return clusters


def find_duplicates(vectors: Tensor, *, cosine: float = 0.98) -> Tensor:
    """Returns for each image the first image (N,) that it nearly repeats, or its own index.

    Frames of one video are the usual case. Groups are connected: an image belongs to the group of
    every image it repeats.
    """
    first = torch.arange(len(vectors))
    for rows, cosines in similarity_blocks(vectors):
        for row, column in (cosines >= cosine).nonzero().tolist():
            first_row, first_column = _root(first, rows.start + row), _root(first, column)
            first[max(first_row, first_column)] = min(first_row, first_column)
    return torch.tensor([_root(first, index) for index in range(len(vectors))])


def _root(first: Tensor, index: int) -> int:
    while int(first[index]) != index:
        index = int(first[index])
    return index
