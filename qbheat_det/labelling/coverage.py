# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds near-duplicate images, and selects images that cover a pool, from feature vectors only.

``k_center`` follows "Active Learning for Convolutional Neural Networks: A Core-Set Approach",
arXiv:1708.00489.

Notation: N is the number of images in the pool, and D the number of features. ``vectors`` (N, D)
have unit norm. So the squared distance of two images is 2 - 2 cos, and the farthest image is the
one with the lowest cosine. ``labelled`` has the indices of the images with labels. A strategy
returns the indices of up to ``budget`` unlabelled images, in the order of selection.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import normalize

_BLOCK = 2**24  # largest number of cosines that are computed together (64 MiB in float32)
_NUM_COMPONENTS = 128  # largest number of principal components
_MEAN_DISTANCE = 0.01  # relative distance below which features count as equal to the mean
COVERING = ("random", "k_center")


def unit_vectors(features: Tensor) -> Tensor:
    """Centers features (N, D), projects them on principal components and scales them to norm 1.

    Returns vectors (N, min(D, 128)). The dropped components are mostly noise, and the functions in
    this file are faster without them. Features that differ from the mean by less than 1 % have no
    reliable direction. They are replaced by the unit vector (1, 0, …, 0).
    """
    features = features.float()
    centred = features - features.mean(dim=0)
    is_mean = centred.norm(dim=1) < _MEAN_DISTANCE * features.norm(dim=1)
    if features.shape[1] > _NUM_COMPONENTS:
        # In float64: with few images, the covariance has many zero eigenvalues, and LAPACK's
        # float32 solver fails.
        covariance = (centred.T @ centred).double()  # (D, D), times N
        _, directions = torch.linalg.eigh(covariance)  # by ascending eigenvalue
        centred = centred @ directions[:, -_NUM_COMPONENTS:].float()
    centred[is_mean] = 0
    centred[is_mean, 0] = 1
    return normalize(centred, dim=1)


def find_duplicates(
    vectors: Tensor, features: Tensor, *, cosine: float = 0.98, raw_cosine: float = 0.99
) -> Tensor:
    """Groups near-duplicates. Returns the index (N,) of the first image in the group of each image.

    Two images are near-duplicates if the cosine of their ``vectors`` is at least ``cosine``, and
    the cosine of their ``features`` (N, D), which are not centred, is at least ``raw_cosine``.
    Frames of one video have such cosines. If A and B are near-duplicates, and so are B and C, all
    three are in one group. An image without near-duplicates is alone in its group.
    """
    # Each cosine alone is also high for different images. Centred vectors are similar if a few
    # images of one scene are in a pool of other scenes, because all of them are far from the mean.
    # Features that are not centred are similar if the images have the same background.
    raw = normalize(features.float(), dim=1)
    first = torch.arange(len(vectors))  # each image is a group
    num_rows = count_rows(vectors)
    for start in range(0, len(vectors), num_rows):
        # The columns begin at ``start``, because earlier blocks have compared earlier images.
        is_near = vectors[start : start + num_rows] @ vectors[start:].T >= cosine
        is_near.fill_diagonal_(False)  # an image and itself
        # The second cosine is computed only for images that have a similar vector.
        rows = is_near.any(dim=1).nonzero().flatten()
        columns = is_near.any(dim=0).nonzero().flatten()
        raw_cosines = raw[start + rows] @ raw[start + columns].T
        is_duplicate = is_near[rows][:, columns] & (raw_cosines >= raw_cosine)
        i, j = is_duplicate.nonzero(as_tuple=True)
        if len(i) == 0:
            continue
        pairs = torch.stack([rows[i], columns[j]]) + start  # (2, P), indices of images
        # Each pair joins the groups of its two images.
        joined = join_groups(first[pairs], len(first))
        first = joined[first]
    return first


def join_groups(pairs: Tensor, count: int) -> Tensor:
    """Returns the smallest node (``count``,) in the connected component of each node of a graph.

    The nodes are 0 to ``count`` - 1, and ``pairs`` (2, P) are the edges.
    """
    is_edge = np.ones(pairs.shape[1], dtype=np.bool_)
    graph = coo_array((is_edge, pairs.numpy()), (count, count))
    _, components = connected_components(graph, directed=False)
    component_of = torch.from_numpy(components).long()  # (count,)
    nodes = torch.arange(count)
    smallest = torch.full((count,), count)  # by component; there are at most ``count``
    smallest = smallest.scatter_reduce(0, component_of, nodes, "amin")
    return smallest[component_of]


def count_rows(vectors: Tensor) -> int:
    """Returns the number of rows of the cosine matrix (N, N) to compute together."""
    return max(1, _BLOCK // len(vectors))


def cover(
    strategy: str, vectors: Tensor, budget: int, labelled: Sequence[int] = (), *, seed: int = 0
) -> list[int]:
    """Selects images with the strategy "random" or "k_center". Only "random" uses ``seed``."""
    if strategy == "random":
        order = np.random.default_rng(seed).permutation(len(vectors)).tolist()
        excluded = set(labelled)
        return [index for index in order if index not in excluded][:budget]
    return k_center(vectors, budget, labelled)


def k_center(vectors: Tensor, budget: int, labelled: Sequence[int] = ()) -> list[int]:
    """Repeatedly selects the image that is farthest from all labelled and selected images.

    The distance from a set of images is the distance from its nearest image. Without labelled
    images, the first selected image is the one nearest to the mean.
    """
    # The cosine (N,) of each image and the nearest labelled or selected image.
    nearest_cosine = torch.full((len(vectors),), -torch.inf)
    num_rows = count_rows(vectors)
    for start in range(0, len(labelled), num_rows):
        block = list(labelled[start : start + num_rows])
        cosines = vectors[block] @ vectors.T
        nearest_cosine = torch.maximum(nearest_cosine, cosines.amax(dim=0))
    nearest_cosine[list(labelled)] = torch.inf  # so that they are never the farthest image
    num_unlabelled = len(vectors) - len(set(labelled))
    chosen: list[int] = []
    for _ in range(min(budget, num_unlabelled)):
        if chosen or labelled:
            index = int(nearest_cosine.argmin())
        else:
            index = int((vectors @ vectors.mean(dim=0)).argmax())
        chosen.append(index)
        nearest_cosine = torch.maximum(nearest_cosine, vectors @ vectors[index])
        nearest_cosine[index] = torch.inf
    return chosen


def choose_balanced(
    vectors: Tensor, counts: Tensor, budget: int, labelled: Sequence[int] = ()
) -> list[int]:
    """Selects images with many objects of all classes.

    Greedily maximizes the sum over classes of log(1 + n), where n is the number of objects of a
    class in the labelled and selected images. So an object of a rare class counts more. When no
    unlabelled image with objects is left, ``k_center`` selects the rest of the budget.

    Args:
        vectors: unit vectors (N, D) of all images.
        counts: expected number of objects (N, K) of each class in each image.
        budget: number of images to select.
        labelled: indices of the images with labels.
    """
    totals = counts[list(labelled)].sum(dim=0)  # (K,), in the labelled and selected images
    new_counts = counts.clone()  # (N, K), 0 for the labelled and selected images
    new_counts[list(labelled)] = 0
    chosen: list[int] = []
    while len(chosen) < budget:
        gain_per_class = (totals + new_counts).log1p() - totals.log1p()  # (N, K)
        gains = gain_per_class.sum(dim=1)
        index = int(gains.argmax())
        if gains[index] <= 0:
            break
        chosen.append(index)
        totals = totals + counts[index]
        new_counts[index] = 0
    return chosen + k_center(vectors, budget - len(chosen), [*labelled, *chosen])
