# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds near-duplicate images, and selects images that cover a pool, from feature vectors only.

``k_center`` follows "Active Learning for Convolutional Neural Networks: A Core-Set Approach",
arXiv:1708.00489.

Notation: N is the number of images in the pool, and D the number of features. ``vectors`` (N, D)
have unit norm, so the squared distance of two images is 2 - 2 cos. ``taken`` has the indices of
images with labels. A strategy returns the indices of up to ``budget`` other images, in the order
of selection.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import normalize

_BLOCK = 2**24  # largest number of cosines in memory at a time (64 MiB)
_DIMENSIONS = 128
_NO_DIFFERENCE = 0.01  # an image equals the mean if its relative distance is below this
COVERING = ("random", "k_center")


def unit_vectors(features: Tensor) -> Tensor:
    """Centers features (N, D), projects them on principal components and scales them to norm 1.

    At most 128 components are kept. The dropped components are mostly noise, and the functions in
    this file are faster without them. All images whose features differ from the mean by less than
    1 % get one fixed unit vector.
    """
    features = features.float()
    centred = features - features.mean(0)
    is_mean = centred.norm(dim=1) < _NO_DIFFERENCE * features.norm(dim=1)
    if features.shape[1] > _DIMENSIONS:
        # In float32, LAPACK fails for a few images, whose covariance has many zero eigenvalues.
        _, directions = torch.linalg.eigh((centred.T @ centred).double())  # ascending
        centred = centred @ directions[:, -_DIMENSIONS:].float()
    centred[is_mean] = torch.eye(1, centred.shape[1])
    return normalize(centred, dim=1)


def find_duplicates(
    vectors: Tensor, features: Tensor, *, cosine: float = 0.98, raw_cosine: float = 0.99
) -> Tensor:
    """Returns, for each image, the index (N,) of the first image in its group of near-duplicates.

    An image without near-duplicates gets its own index. Two images are near-duplicates if the
    cosine of their ``vectors`` is at least ``cosine`` and the cosine of their ``features`` (N, D),
    which are not centred, is at least ``raw_cosine``. Frames of one video have such cosines. Groups
    are the connected components of near-duplicate pairs.
    """
    # Among other images, all images of one kind are far from the mean, so their vectors are alike.
    # Among each other, images with one background have features that are alike.
    raw = normalize(features.float(), dim=1)
    first = torch.arange(len(vectors))
    size = count_rows(vectors)
    for start in range(0, len(vectors), size):
        near = vectors[start : start + size] @ vectors[start:].T >= cosine  # each pair once
        near.fill_diagonal_(False)
        rows = near.any(1).nonzero().flatten()
        columns = near.any(0).nonzero().flatten()
        near = near[rows][:, columns] & (raw[start + rows] @ raw[start + columns].T >= raw_cosine)
        row, column = near.nonzero(as_tuple=True)
        if len(row):
            pairs = torch.stack([rows[row], columns[column]]) + start
            first = join_groups(first[pairs], len(first))[first]
    return first


def join_groups(pairs: Tensor, count: int) -> Tensor:
    """Returns the smallest index in the connected component of each of ``count`` indices.

    ``pairs`` (2, P) are the edges.
    """
    graph = coo_array((np.ones(pairs.shape[1], dtype=np.bool_), pairs.numpy()), (count, count))
    groups = torch.from_numpy(connected_components(graph, directed=False)[1]).long()
    smallest = torch.full((count,), count).scatter_reduce(0, groups, torch.arange(count), "amin")
    return smallest[groups]


def count_rows(vectors: Tensor) -> int:
    """Returns the number of rows of the cosine matrix that are computed at a time."""
    return max(1, _BLOCK // len(vectors))


def cover(
    strategy: str, vectors: Tensor, budget: int, taken: Sequence[int] = (), *, seed: int = 0
) -> list[int]:
    """Selects images with the strategy "random" or "k_center". Only "random" uses ``seed``."""
    if strategy == "random":
        order = np.random.default_rng(seed).permutation(len(vectors)).tolist()
        with_labels = set(taken)
        return [index for index in order if index not in with_labels][:budget]
    return k_center(vectors, budget, taken)


def k_center(vectors: Tensor, budget: int, taken: Sequence[int] = ()) -> list[int]:
    """Repeatedly selects the image farthest from all labelled and selected images.

    Without labelled images, the first selected image is the one nearest to the mean.
    """
    # The cosine (N,) of each vector to the nearest labelled or selected one.
    nearest = torch.full((len(vectors),), -torch.inf)
    size = count_rows(vectors)
    for start in range(0, len(taken), size):
        cosines = vectors[list(taken[start : start + size])] @ vectors.T
        nearest = torch.maximum(nearest, cosines.amax(0))
    nearest[list(taken)] = torch.inf
    chosen: list[int] = []
    for _ in range(min(budget, len(vectors) - len(set(taken)))):
        if chosen or taken:
            index = int(nearest.argmin())
        else:
            index = int((vectors @ vectors.mean(0)).argmax())
        chosen.append(index)
        nearest = torch.maximum(nearest, vectors @ vectors[index])
        nearest[index] = torch.inf
    return chosen


def choose_balanced(
    vectors: Tensor, counts: Tensor, budget: int, taken: Sequence[int] = ()
) -> list[int]:
    """Selects images with many objects of all classes.

    Greedily maximizes the sum over classes of log(1 + n), where n is the number of objects of a
    class in the labelled and selected images. So an object of a rare class counts more. When no
    other image has objects, ``k_center`` selects the remaining images.

    Args:
        vectors: unit vectors (N, D) of all images.
        counts: expected number of objects (N, K) of each class in each image.
        budget: number of images to select.
        taken: indices of the images with labels.
    """
    totals = counts[list(taken)].sum(0)
    new_counts = counts.clone()  # 0 for the labelled and selected images
    new_counts[list(taken)] = 0
    chosen: list[int] = []
    while len(chosen) < budget:
        gains = ((totals + new_counts).log1p() - totals.log1p()).sum(1)
        index = int(gains.argmax())
        if gains[index] <= 0:
            break
        chosen.append(index)
        totals = totals + counts[index]
        new_counts[index] = 0
    return chosen + k_center(vectors, budget - len(chosen), [*taken, *chosen])
