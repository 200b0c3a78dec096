# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where the global tokens of a Mobile-Former look, and which of them each pixel listens to.

Paper: QB-Heat, arXiv:2211.13228, Appendix E, Fig. 13 and 14, after "Mobile-Former",
arXiv:2108.05895. The paper shows "four blocks at different resolutions" and names two of them, 10
and 12; the others here are the last ones at strides 4 and 8, blocks 3 and 6 of Table 8. The figures
that go with the pictures (focus, likeness) are this package's: the paper argues by eye.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from qbheat_det.layers import MobileFormerBlock, read_attention
from qbheat_det.modeling.backbone import MobileFormer

PAPER_BLOCKS = (3, 6, 10, 12)
"""Of the paper's networks, which have twelve."""


@dataclass(frozen=True)
class BlockAttention:
    """Both bridges of one block, for a batch.

    Attributes:
        number: of the block, counted from 1 with the token-free ones, as in Table 8.
        to_former: (N, heads, M, H, W), of Mobile->Former: sums to 1 over the pixels of its map.
        to_mobile: (N, heads, M, H', W'), of Mobile<-Former: sums to 1 over the M tokens.
        to_former_stride: pixels of the image between two positions of (H, W).
        to_mobile_stride: the same of (H', W'), twice that where the block halves the map.
    """

    number: int
    to_former: Tensor
    to_mobile: Tensor
    to_former_stride: int
    to_mobile_stride: int


def find_mobile_former(model: nn.Module) -> MobileFormer | None:
    """Returns the first Mobile-Former within a model, which is its backbone's, or None."""
    return next((part for part in model.modules() if isinstance(part, MobileFormer)), None)


def list_blocks(backbone: MobileFormer) -> dict[int, str]:
    """Returns the names of the blocks that have tokens, by their number."""
    return {number: name for number, name, _, _ in _walk(backbone)}


def choose_blocks(backbone: MobileFormer) -> list[int]:
    """Returns the numbers of the blocks that are worth a picture.

    Those of the paper, in a network of twelve blocks; else the last one at each resolution.
    """
    numbers = list_blocks(backbone)
    if sum(1 for _ in _blocks(backbone)) == max(PAPER_BLOCKS):
        return [number for number in PAPER_BLOCKS if number in numbers]
    last = {stride: number for number, _, _, stride in _walk(backbone)}
    return list(last.values())


def normalize_image(model: nn.Module, image: Tensor) -> Tensor:
    """Returns one image as the model's backbone takes it, unpadded.

    Args:
        model: Detectron2's or this package's, with ``pixel_mean`` and ``pixel_std``.
        image: (3, H, W), in the mapper's pixels.

    Returns:
        (1, 3, H, W), on the model's device.
    """
    mean, std = cast(Tensor, model.pixel_mean), cast(Tensor, model.pixel_std)
    return ((image.to(mean.device) - mean) / std)[None]


@torch.no_grad()
def read_bridges(
    backbone: MobileFormer,
    images: Tensor,
    image_sizes: Tensor | None = None,
    numbers: Collection[int] | None = None,
) -> list[BlockAttention]:
    """Runs the backbone once and returns the attention of its bridges, first block first.

    Args:
        backbone: in the mode in which it is to run.
        images: (N, 3, H, W), normalised.
        image_sizes: (N, 2) heights and widths in pixels, of a padded batch.
        numbers: of the blocks wanted; all that have tokens if None.

    Raises:
        ValueError: there is no such block, or it has no tokens.
    """
    blocks = {number: (name, before, behind) for number, name, before, behind in _walk(backbone)}
    if unknown := sorted(set(numbers or ()) - set(blocks)):
        raise ValueError(f"no block {unknown} with tokens: there are {sorted(blocks)}")
    wanted = [number for number in blocks if numbers is None or number in numbers]
    bridges = [
        f"{blocks[number][0]}.{bridge}"
        for number in wanted
        for bridge in ("mobile_to_former", "former_to_mobile")
    ]
    with read_attention(backbone, bridges) as record:
        backbone(images, image_sizes)
    found = []
    for number in wanted:
        name, before, behind = blocks[number]
        found.append(
            BlockAttention(
                number=number,
                to_former=record[f"{name}.mobile_to_former"][-1].unflatten().cpu(),
                to_mobile=record[f"{name}.former_to_mobile"][-1].unflatten().cpu(),
                to_former_stride=before,
                to_mobile_stride=behind,
            )
        )
    return found


def measure_spread(weights: Tensor, dim: int) -> Tensor:
    """Returns how evenly attention is spread: its entropy as a share of the largest possible.

    1 where all get the same, 0 where one gets all.

    Args:
        weights: sum to 1 over ``dim``, which has two entries or more.
        dim: axis of what is attended to.

    Returns:
        The shape of ``weights`` without ``dim``.
    """
    entropy = torch.special.entr(weights.double()).sum(dim=dim)
    return entropy / torch.tensor(weights.shape[dim], dtype=torch.float64).log()


def measure_top_share(weights: Tensor, share: float = 0.1) -> Tensor:
    """Returns what share of its attention a token gives to the pixels it looks at most.

    Args:
        weights: (..., H, W), sum to 1 over the pixels.
        share: of the pixels, above 0; rounded up to whole ones.

    Returns:
        (...), at least ``share``, up to rounding, and at most 1.
    """
    flat = weights.flatten(-2)
    count = math.ceil(share * flat.shape[-1] - 1e-9)  # 0.1 of 30 is 3, whatever rounding says
    return flat.topk(count, dim=-1).values.sum(dim=-1)


def measure_likeness(weights: Tensor) -> Tensor:
    """Returns how much tokens look at the same pixels, as the mean over all pairs of tokens.

    Of a pair it is the attention that both have in common, the sum over pixels of the smaller of
    their weights: 1 where they look alike, 0 where no pixel is looked at by both. "More diverse
    across tokens" (Appendix E) is a smaller likeness.

    Args:
        weights: (..., M, H, W), sum to 1 over the pixels; two tokens or more.

    Returns:
        (...), in [0, 1].
    """
    flat = weights.flatten(-2).double()
    # A token at a time: all pairs at once are M times the memory.
    common = [
        torch.minimum(flat[..., i : i + 1, :], flat[..., i + 1 :, :]).sum(dim=-1)
        for i in range(flat.shape[-2] - 1)
    ]
    return torch.cat(common, dim=-1).mean(dim=-1)


def describe_block(block: BlockAttention) -> dict[str, Any]:
    """Returns the figures of one block, each the mean over images and heads.

    Of Mobile->Former: "spread" and "top_share" (of a tenth of the pixels) of each token, and the
    "likeness" of all. Of Mobile<-Former: "spread" over the tokens, the mean over all pixels, and
    "share" of each token in the attention of all pixels.
    """
    to_former, to_mobile = block.to_former, block.to_mobile
    return {
        "number": block.number,
        "to_former": {
            "stride": block.to_former_stride,
            "spread": measure_spread(to_former.flatten(3), dim=3).mean(dim=(0, 1)).tolist(),
            "top_share": measure_top_share(to_former).mean(dim=(0, 1)).tolist(),
            "likeness": float(measure_likeness(to_former).mean()),
        },
        "to_mobile": {
            "stride": block.to_mobile_stride,
            "spread": float(measure_spread(to_mobile, dim=2).mean()),
            "share": to_mobile.double().mean(dim=(0, 1, 3, 4)).tolist(),
        },
    }


def _blocks(backbone: MobileFormer) -> Iterator[tuple[str, nn.Module]]:
    for i, stage in enumerate(backbone.stages):
        for j, block in enumerate(cast(nn.ModuleList, stage)):
            yield f"stages.{i}.{j}", block


def _walk(backbone: MobileFormer) -> Iterator[tuple[int, str, int, int]]:
    """Yields number, name and the strides before and behind each block that has tokens."""
    stride = 2  # behind the stem
    for number, (name, block) in enumerate(_blocks(backbone), start=1):
        before, stride = stride, stride * cast(int, block.stride)
        if isinstance(block, MobileFormerBlock):
            yield number, name, before, stride
