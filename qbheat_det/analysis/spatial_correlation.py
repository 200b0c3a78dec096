# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How much the positions of a feature map say the same: spatial correlation, an image at a time.

Paper: QB-Heat, arXiv:2211.13228, Appendix D and Fig. 12, after "Barlow Twins", arXiv:2103.03230.
As there, the mean over the channels is taken off: maps behind a rectifier, which have no negative
features, would else seem correlated where they are not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor
from torch.nn import functional as F

_ROUNDING = 1e-6  # relative


def measure_spatial_correlation(features: Tensor) -> Tensor:
    """Returns the mean |correlation| over channels between any two positions of a map.

    It is 1 where the features of all positions are the same, up to sign, scale and a constant, and
    0 where none says anything of another. A position whose features are all equal counts so.

    Args:
        features: (N, C, H, W), two positions or more.

    Returns:
        (N,), in [0, 1].

    Raises:
        ValueError: a map has less than two positions.
    """
    vectors = features.float().flatten(2).transpose(1, 2)
    centred = vectors - vectors.mean(dim=-1, keepdim=True)
    # Of features that are all equal, rounding is left, which must not pass for a direction.
    differ = centred.norm(dim=-1, keepdim=True) > _ROUNDING * vectors.norm(dim=-1, keepdim=True)
    vectors = F.normalize(centred * differ, dim=-1)
    positions = vectors.shape[1]
    if positions < 2:
        raise ValueError(f"correlation needs two positions of a map, but there is {positions}")
    correlations = (vectors @ vectors.transpose(1, 2)).abs()
    off_diagonal = correlations.sum(dim=(1, 2))
    off_diagonal = off_diagonal - correlations.diagonal(dim1=1, dim2=2).sum(dim=1)
    return (off_diagonal / (positions * (positions - 1))).clamp(0.0, 1.0)


def correlate_images(
    backbone: Callable[[Tensor], Mapping[str, Tensor]], name: str, batches: Iterable[Tensor]
) -> list[float]:
    """Returns the spatial correlation of a backbone's map of each image.

    Args:
        backbone: from a batch to maps (N, C, H, W) by name; in evaluation mode.
        name: of the map.
        batches: images (N, 3, S, S), as the backbone takes them.

    Raises:
        ValueError: a map has less than two positions.
    """
    found: list[float] = []
    for images in batches:
        found += measure_spatial_correlation(backbone(images)[name]).tolist()
    return found


def summarize_correlation(values: Sequence[float]) -> dict[str, Any]:
    """Returns "mean", "deviation" (of all images, not of a sample) and the "values" themselves."""
    return {"mean": fmean(values), "deviation": pstdev(values), "values": list(values)}
