# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches of all processes together, for objectives that compare images with each other."""

import torch
from detectron2.utils import comm
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from qbheat_det.core.errors import UserError


def check_equal_shares(batch_size: int, processes: int) -> None:
    """Raises a ``UserError`` if the processes cannot have equally many images of a batch."""
    if batch_size % processes:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {batch_size} is not a multiple of the {processes} processes: "
            "this objective compares images of all processes, so each needs equally many"
        )


def gather_over_processes(values: Tensor) -> Tensor:
    """Concatenates the values (N, …) of P processes to (P * N, …), with gradients.

    N must be equal on all processes. Every process must call this function.
    """
    if comm.get_world_size() == 1:
        return values
    return torch.cat(all_gather(values.contiguous()))
