# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches as plain tensors, numbers and strings, which ``torch.load`` reads without unpickling."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from detectron2.structures import (
    BitMasks,
    Boxes,
    Instances,
    Keypoints,
    PolygonMasks,
    ROIMasks,
    RotatedBoxes,
)
from torch import Tensor, from_numpy

_TYPE = "__type__"
_OF_ONE_TENSOR = {
    kind.__name__: kind for kind in (BitMasks, Boxes, Keypoints, ROIMasks, RotatedBoxes)
}


def to_plain(value: Any) -> Any:
    """Copies nested data to the CPU, Detectron2's structures as dicts that say what they were.

    What is neither a structure, a container, an array, a number nor a string becomes its
    ``repr``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_TYPE: "ndarray", "tensor": from_numpy(value.copy())}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): to_plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(element) for element in value]
    if isinstance(value, Instances):
        size = [int(length) for length in value.image_size]
        return {_TYPE: "Instances", "image_size": size, "fields": to_plain(value.get_fields())}
    if isinstance(value, PolygonMasks):
        return {_TYPE: "PolygonMasks", "polygons": to_plain(value.polygons)}
    if type(value).__name__ in _OF_ONE_TENSOR:
        return {_TYPE: type(value).__name__, "tensor": to_plain(value.tensor)}
    return repr(value)


def from_plain(value: Any) -> Any:
    """Undoes ``to_plain``; tuples come back as lists."""
    if isinstance(value, list):
        return [from_plain(element) for element in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE)
    if kind == "ndarray":
        return value["tensor"].numpy()
    if kind == "Instances":
        return Instances(tuple(value["image_size"]), **from_plain(value["fields"]))
    if kind == "PolygonMasks":
        return PolygonMasks(from_plain(value["polygons"]))
    if kind in _OF_ONE_TENSOR:
        return _OF_ONE_TENSOR[kind](value["tensor"])
    return {key: from_plain(element) for key, element in value.items()}
