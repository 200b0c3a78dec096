# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention between the global tokens and the pixels of a Mobile-Former, and measures of it.

Paper: QB-Heat, arXiv:2211.13228, Appendix E, Fig. 13 and 14. The paper argues by eye; the measures
are this package's. Of its four blocks it names 10 and 12; 3 and 6 end strides 4 and 8 in Table 8.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qbheat_det.layers import MobileFormerBlock, read_attention
from qbheat_det.modeling.backbone import MobileFormer

PAPER_BLOCKS = (3, 6, 10, 12)
"""Of the paper's networks, which have twelve."""
_ABOVE = 0.05  # share of a map's attention that may lie above the top of its colours


@dataclass(frozen=True)
class BlockAttention:
    """Both bridges of one block, for a batch.

    Attributes:
        number: of the block, counted from 1 with those without tokens, as in Table 8.
        to_former: (N, heads, M, H, W), of Mobile→Former: sums to 1 over the pixels of its map.
        to_mobile: (N, heads, M, H', W'), of Mobile←Former: sums to 1 over the M tokens.
        to_former_stride: pixels of the image between two positions of (H, W).
        to_mobile_stride: the same of (H', W'), twice that where the block halves the map.
    """

    number: int
    to_former: Tensor
    to_mobile: Tensor
    to_former_stride: int
    to_mobile_stride: int


def find_mobile_former(model: nn.Module) -> MobileFormer | None:
    """Returns the Mobile-Former of a model, or None."""
    return next((part for part in model.modules() if isinstance(part, MobileFormer)), None)


def list_blocks(backbone: MobileFormer) -> dict[int, tuple[str, int, int]]:
    """Returns by number the name of each block with tokens, and the strides before and after it."""
    found = {}
    stride = 2  # of the stem
    for number, (name, block) in enumerate(_iterate_blocks(backbone), start=1):
        before, stride = stride, stride * cast(int, block.stride)
        if isinstance(block, MobileFormerBlock):
            found[number] = (name, before, stride)
    return found


def choose_blocks(backbone: MobileFormer) -> list[int]:
    """Returns the paper's blocks in a network of twelve, else the last at each resolution."""
    blocks = list_blocks(backbone)
    if sum(1 for _ in _iterate_blocks(backbone)) == max(PAPER_BLOCKS):
        return [number for number in PAPER_BLOCKS if number in blocks]
    return list({stride: number for number, (_, _, stride) in blocks.items()}.values())


@torch.no_grad()
def read_bridges(backbone: MobileFormer, images: Tensor) -> list[BlockAttention]:
    """Returns the attention of all bridges of a backbone for images (N, 3, H, W), on the CPU."""
    blocks = list_blocks(backbone)
    bridges = [
        f"{name}.{bridge}"
        for name, _, _ in blocks.values()
        for bridge in ("mobile_to_former", "former_to_mobile")
    ]
    with read_attention(backbone, bridges) as record:
        backbone(images)
    return [
        BlockAttention(
            number=number,
            to_former=record[f"{name}.mobile_to_former"][-1].unflatten().cpu(),
            to_mobile=record[f"{name}.former_to_mobile"][-1].unflatten().cpu(),
            to_former_stride=before,
            to_mobile_stride=after,
        )
        for number, (name, before, after) in blocks.items()
    ]


def measure_spread(weights: Tensor, dim: int) -> Tensor:
    """Returns the entropy of attention over ``dim``, in [0, 1]: 1 if it is uniform."""
    entropy = torch.special.entr(weights.double()).sum(dim=dim)
    return entropy / math.log(weights.shape[dim])


def measure_overlap(weights: Tensor) -> Tensor:
    """Returns the attention that two tokens have in common, (...), as the mean over all pairs.

    Of a pair it is the sum over pixels of the smaller weight of (..., M, H, W). "More diverse
    across tokens" (Appendix E) is a smaller overlap.
    """
    flat = weights.flatten(-2).double()
    # A token at a time: all pairs at once are M times the memory.
    common = [
        torch.minimum(flat[..., i : i + 1, :], flat[..., i + 1 :, :]).sum(dim=-1)
        for i in range(flat.shape[-2] - 1)
    ]
    return torch.cat(common, dim=-1).mean(dim=-1)


def describe_block(block: BlockAttention) -> dict[str, Any]:
    """Returns the measures of one block, each the mean over images and heads."""
    to_former, to_mobile = block.to_former, block.to_mobile
    return {
        "number": block.number,
        "to_former": {
            "stride": block.to_former_stride,
            "spread": measure_spread(to_former.flatten(3), dim=3).mean(dim=(0, 1)).tolist(),
            "overlap": float(measure_overlap(to_former).mean()),
        },
        "to_mobile": {
            "stride": block.to_mobile_stride,
            "spread": float(measure_spread(to_mobile, dim=2).mean()),
            "share": to_mobile.double().mean(dim=(0, 1, 3, 4)).tolist(),
        },
    }


def find_top(maps: Sequence[npt.NDArray[np.float32]]) -> float:
    """Returns the value of the last colour: at most a twentieth of a map's attention is above."""
    tops = []
    for values in maps:
        falling = np.sort(values, axis=None)[::-1]
        mass = np.cumsum(falling, dtype=np.float64)
        tops.append(float(falling[np.searchsorted(mass, _ABOVE * mass[-1])]))
    return max(tops)


def _iterate_blocks(backbone: MobileFormer) -> Iterator[tuple[str, nn.Module]]:
    for i, stage in enumerate(backbone.stages):
        for j, block in enumerate(cast(nn.ModuleList, stage)):
            yield f"stages.{i}.{j}", block
