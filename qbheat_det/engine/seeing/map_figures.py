# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The numbers of small maps, as JSON beside the pictures of them has them."""

from typing import Any

import numpy as np
import numpy.typing as npt

MOST_POSITIONS = 256
"""Of maps that are written out: 16 x 16. The numbers of larger ones are nobody's reading."""
_DIGITS = 4


def list_map(values: npt.ArrayLike) -> list[Any] | None:
    """Returns a map (..., H, W) as nested lists, to 4 significant digits; None for large ones."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape[-2] * array.shape[-1] > MOST_POSITIONS:
        return None
    rounded = [float(f"{value:.{_DIGITS}g}") for value in array.ravel().tolist()]
    listed: list[Any] = np.array(rounded).reshape(array.shape).tolist()
    return listed
