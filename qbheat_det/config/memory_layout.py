# Copyright (c) qbheat_det contributors. Apache-2.0.
"""In which order of memory the maps of a model lie."""

import torch
from detectron2.config import CfgNode

from qbheat_det.errors import UserError


def find_memory_format(cfg: CfgNode) -> torch.memory_format:
    """Returns the layout that ``MODEL.CHANNELS_LAST`` asks for, on ``MODEL.DEVICE`` if it is None.

    Args:
        cfg: with this package's keys.

    Raises:
        UserError: ``MODEL.CHANNELS_LAST`` is something else than True, False and None.
    """
    asked = cfg.MODEL.CHANNELS_LAST
    if asked not in (None, True, False):  # next to None, configs take any type
        raise UserError(
            f"MODEL.CHANNELS_LAST is True, False or None (the device's own), not '{asked}'"
        )
    on_cpu = torch.device(cfg.MODEL.DEVICE).type == "cpu"
    innermost = on_cpu if asked is None else asked
    return torch.channels_last if innermost else torch.contiguous_format
