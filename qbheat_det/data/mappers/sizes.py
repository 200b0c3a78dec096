# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sizes of augmented images, which mappers of detectors know before they read a file.

``DATALOADER.SIZE_GROUPING`` forms batches of images of about the same size.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from qbheat_det.core.errors import UserError


@runtime_checkable
class _SizingMapper(Protocol):
    def find_size(self, dataset_dict: dict[str, Any]) -> tuple[int, int]: ...


def find_size(mapper: Callable[..., Any], dataset_dict: dict[str, Any]) -> tuple[int, int]:
    """Returns the height and width of the image that a mapper would return for a record.

    It draws the random numbers that the mapper would draw for the image, so equal states of the
    random generators give equal sizes. The file is not read.

    Args:
        mapper: a mapper with a method ``find_size(dataset_dict)``.
        dataset_dict: the record, with "height" and "width".

    Raises:
        UserError: the mapper has no such method, or it cannot tell the size of this image.
    """
    if not isinstance(mapper, _SizingMapper):
        raise UserError(
            "DATALOADER.SIZE_GROUPING needs a mapper (INPUT.DATASET_MAPPER_NAME) with a method "
            "find_size, as those of detectors have: set it to 0"
        )
    return mapper.find_size(dataset_dict)
