# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Shuffled BatchNorm: a query and its key are normalised in batches of different images.

"Momentum Contrast for Unsupervised Visual Representation Learning", arXiv:1911.05722, Sec. 3.3:
with shared batch statistics the encoder could recognise the right key by these. So the images of
all processes are redistributed for the encoder of keys. With few processes, groups within each,
with batch statistics of their own, have the same effect.
"""

from collections.abc import Callable

import torch
from detectron2.utils import comm
from torch import Tensor


def embed_in_groups(embed: Callable[[Tensor], Tensor], images: Tensor, groups: int) -> Tensor:
    """Returns (N, D) of images (N, 3, H, W), encoded in ``groups`` consecutive parts.

    Sizes of parts differ by one image at most; no part is empty.
    """
    parts = images.tensor_split(min(groups, len(images)))
    return torch.cat([embed(part) for part in parts])


def draw_order(num_images: int, *, device: torch.device) -> Tensor:
    """Returns a random order of the images of all processes, the same one on each of them.

    Args:
        num_images: of each process.
        device: of the result.
    """
    order = torch.randperm(num_images * comm.get_world_size(), device=device)
    if comm.get_world_size() > 1:
        torch.distributed.broadcast(order, src=0)
    return order


@torch.no_grad()
def embed_shuffled(
    embed: Callable[[Tensor], Tensor], images: Tensor, order: Tensor, groups: int
) -> Tensor:
    """Encodes the images of all processes, distributed to them by ``order``.

    Args:
        embed: from images (n, 3, H, W) to (n, D).
        images: (N, 3, H, W), those of this process; equally many on each.
        order: (P N,), of the images of P processes; the first N go to the first process.
        groups: parts of each process with batch statistics of their own.

    Returns:
        (P N, D), in the original order, the first process first.
    """
    num_images, rank = len(images), comm.get_rank()
    mine = order[rank * num_images : (rank + 1) * num_images]
    dealt = gather_over_processes(images)[mine]
    found = gather_over_processes(embed_in_groups(embed, dealt, groups))
    return found[order.argsort()]


@torch.no_grad()
def gather_over_processes(values: Tensor) -> Tensor:
    """Joins (N, …) of each of P processes to (P N, …); N is the same on each."""
    if comm.get_world_size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(comm.get_world_size())]
    torch.distributed.all_gather(parts, values.contiguous())
    return torch.cat(parts)
