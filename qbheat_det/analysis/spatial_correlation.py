# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How much the positions of a feature map say the same: spatial correlation, an image at a time.

Paper: QB-Heat, arXiv:2211.13228, Appendix D and Fig. 12, after "Barlow Twins", arXiv:2103.03230.
Left open there and chosen here: features are compared by the cosine, without their mean taken off.
"""

from torch import Tensor
from torch.nn import functional as F


def measure_spatial_correlation(features: Tensor) -> Tensor:
    """Returns the mean |cosine| between the features of any two positions of a map.

    It is 1 where all positions point in one direction or its opposite, and 0 where they are
    orthogonal to each other. A position whose features are all zero counts as orthogonal.

    Args:
        features: (N, C, H, W), two positions or more.

    Returns:
        (N,), in [0, 1].

    Raises:
        ValueError: a map has less than two positions.
    """
    vectors = F.normalize(features.float().flatten(2).transpose(1, 2), dim=-1)
    positions = vectors.shape[1]
    if positions < 2:
        raise ValueError(f"correlation needs two positions of a map, but there is {positions}")
    cosines = (vectors @ vectors.transpose(1, 2)).abs()
    off_diagonal = cosines.sum(dim=(1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(dim=1)
    return (off_diagonal / (positions * (positions - 1))).clamp(0.0, 1.0)
