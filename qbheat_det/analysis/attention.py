# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "attention": attention between global tokens and pixels in a Mobile-Former.

Paper: QB-Heat, arXiv:2211.13228, Appendix E, Fig. 13 and 14. The paper shows four blocks, but only
states the numbers of two of them: block 10 and block 12. For the remaining two, this figure uses
block 3 and block 6, which are the last blocks at strides 4 and 8 (Table 8).

Other figures use this module's functions to prepare square images for encoders.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from torch import Tensor, nn
from tqdm import tqdm

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.inference.drawing import RGBImage
from qbheat_det.layers import MobileFormerBlock, read_attention
from qbheat_det.modeling.backbone import MobileFormer
from qbheat_det.modeling.contracts import get_pixel_statistics
from qbheat_det.tasks import DETECTION, find_task

from . import plotting
from .figures import Figure, Image, NotApplicable
from .run import Entries, FigureOptions, Run, read_spread, run_on_images

Bridge = Literal["to_former", "to_mobile"]
Heads = Literal["mean", "apart"]

PAPER_BLOCKS = (3, 6, 10, 12)
"""Numbers of the blocks in the paper's figures. The paper's networks have twelve blocks."""
_PAPER_SIZE = 256  # image side in pre-training, Table 9
_ABOVE = 0.05  # share of the attention that lies above the end of the color scale
_CELL = 104  # side of an image in the figure, in pixels
_BRIDGES: dict[Bridge, str] = {"to_former": "Mobile→Former", "to_mobile": "Mobile←Former"}
_EXPLANATION = (
    "Mobile→Former shows where each token attends (Fig. 13 of the paper), in multiples of uniform "
    "attention. Mobile←Former shows which tokens each pixel attends to (Fig. 14). Identical tokens "
    "have identical maps. Tokens of an untrained network attend everywhere.",
)
_BATCH_SIZE = 32


@dataclass(frozen=True)
class BlockAttention:
    """Attention of the two bridges of block ``number`` (from 1, as in Table 8) for N images.

    ``to_former`` (N, heads, M, H, W), for Mobile→Former, sums to 1 over the H x W positions.
    ``to_mobile`` (N, heads, M, H', W'), for Mobile←Former, sums to 1 over the M tokens.
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
    """Maps the numbers of the blocks with tokens to (name, input stride, output stride).

    All blocks are counted, from 1.
    """
    found = {}
    stride, number = 2, 0  # the stem's stride
    for i, stage in enumerate(backbone.stages):
        for j, block in enumerate(cast(nn.ModuleList, stage)):
            before, stride, number = stride, stride * cast(int, block.stride), number + 1
            if isinstance(block, MobileFormerBlock):
                found[number] = (f"stages.{i}.{j}", before, stride)
    return found


def choose_blocks(backbone: MobileFormer) -> list[int]:
    """Returns the numbers of the blocks to draw.

    For networks with twelve blocks, these are the blocks of the paper's figures. For others, they
    are the last blocks at each stride.
    """
    blocks = list_blocks(backbone)
    if sum(len(cast(nn.ModuleList, stage)) for stage in backbone.stages) == max(PAPER_BLOCKS):
        return [number for number in PAPER_BLOCKS if number in blocks]
    return list({stride: number for number, (_, _, stride) in blocks.items()}.values())


@torch.no_grad()
def read_bridges(backbone: MobileFormer, images: Tensor) -> list[BlockAttention]:
    """Runs a network on images (N, 3, H, W). Returns the attention of its blocks, on the CPU."""
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
            to_former=record[f"{name}.mobile_to_former"][-1].cpu(),
            to_mobile=record[f"{name}.former_to_mobile"][-1].cpu(),
            to_former_stride=before,
            to_mobile_stride=after,
        )
        for number, (name, before, after) in blocks.items()
    ]


def find_top(maps: Sequence[npt.NDArray[np.float32]]) -> float:
    """Returns the top of the color scale. At most 5 % of each map's sum is from higher values."""
    tops = []
    for values in maps:
        falling = np.sort(values, axis=None)[::-1]
        mass = np.cumsum(falling, dtype=np.float64)
        tops.append(float(falling[np.searchsorted(mass, _ABOVE * mass[-1])]))
    return max(tops)


_Attention = list[tuple[RGBImage, list[BlockAttention]]]
"""For each image of one run: its pixels, and the attention of the blocks to draw."""


def draw_attention(
    runs: Sequence[Run], options: FigureOptions, *, attention_heads: Heads = "mean"
) -> Figure:
    """Draws the attention of both bridges over images, for the blocks of ``choose_blocks``.

    ``attention_heads`` "mean" averages over heads, and "apart" draws one row per head. Raises
    ``NotApplicable`` if no run has a Mobile-Former with tokens.
    """
    size = find_size(runs, _PAPER_SIZE)
    nothing = "no attention of tokens"
    results = run_on_images(
        runs, lambda run, files: _attend(run, files, size), options, nothing=nothing
    )
    found = results.found
    blocks = {label: [block.number for block in one[0][1]] for label, one in found.items()}
    images = {
        f"{bridge}_{index + 1}": _draw_image(found, bridge, index, attention_heads)
        for bridge in _BRIDGES
        for index in range(len(results.files))
    }
    title = "Attention between tokens and pixels"
    return results.draw("attention", title, _EXPLANATION, images, size=size, blocks=blocks)


def _attend(run: Run, files: Sequence[str], size: int) -> _Attention:
    backbone = find_mobile_former(run.model)
    numbers = choose_blocks(backbone) if backbone is not None else []
    if backbone is None or not numbers:
        name = run.cfg.MODEL.BACKBONE.NAME
        raise NotApplicable(f"'{run.label}' has no Mobile-Former with tokens, but '{name}'")
    entries = crop_squares(run.cfg, files, size)
    drawn = []
    for entry in tqdm(entries, unit="image", desc=f"attention, {run.label}", delay=2, leave=False):
        # One image at a time, because the attention of all blocks of large images needs much memory
        (image,) = batch_images(run.model, [entry], "")
        found = [one for one in read_bridges(backbone, image) if one.number in numbers]
        pixels = plotting.to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
        drawn.append((pixels, found))
    return drawn


def _draw_image(found: Mapping[str, _Attention], bridge: Bridge, index: int, heads: Heads) -> Image:
    """Draws the attention on one image, with the rows of all runs below each other."""
    grid, names = [], []
    for label, one in found.items():
        pixels, blocks = one[index]
        image = plotting.shrink(pixels, _CELL)
        factor = image.shape[1] / pixels.shape[1]
        for block in blocks:
            for name, maps, stride in _list_maps(block, bridge, heads):
                # Uniform attention has the middle color.
                top = min(1.0, 2 / len(maps))
                if bridge == "to_former":
                    top = max(2.0, find_top(maps))
                overlays = [
                    plotting.overlay_map(image, m, stride=stride * factor, high=top) for m in maps
                ]
                grid.append([image, *overlays])
                prefix = f"{plotting.to_text(label)}\n" if len(found) > 1 else ""
                names.append(f"{prefix}{name}\n0 to {top:.2g}")
    columns = ["image", *(f"token {i + 1}" for i in range(max(map(len, grid)) - 1))]
    chart = plotting.plot_grid(grid, column_names=columns, row_names=names)
    return plotting.chart_image(
        chart, caption=f"{_BRIDGES[bridge]}, image {index + 1}.", format="jpg"
    )


def _list_maps(
    block: BlockAttention, bridge: Bridge, heads: Heads
) -> list[tuple[str, list[npt.NDArray[np.float32]], int]]:
    """Returns (row name, one map (H, W) per token, stride) for the mean or for each head."""
    weights, stride = block.to_mobile[0].float(), block.to_mobile_stride
    if bridge == "to_former":
        weights, stride = block.to_former[0].float(), block.to_former_stride
        weights = weights * weights[0, 0].numel()  # multiples of uniform attention
    if heads == "mean":
        weights, rows = weights.mean(dim=0, keepdim=True), [f"stride {stride}"]
    else:
        rows = [f"head {i + 1}" for i in range(len(weights))]
    return [(f"block {block.number}, {row}", list(maps.numpy()), stride)
            for row, maps in zip(rows, weights, strict=True)]  # fmt: skip


def crop_squares(cfg: CfgNode, files: Sequence[str], size: int | None = None) -> Entries:
    """Returns one dict per readable file. Its key "image" has the central square (3, S, S).

    The evaluation mapper of ``cfg`` crops the square. If ``cfg`` is the config of a detector, the
    mapper of pre-training is used instead. S is ``size``, by default ``INPUT.PRETRAIN.SIZE``.
    """
    cfg = with_values(cfg)
    if find_task(cfg) is DETECTION:
        cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    if size is not None:
        cfg.INPUT.PRETRAIN.SIZE = size
    records = [{"file_name": name} for name in files]
    return read_spread(records, build_mapper(cfg, is_train=False), len(records))[0]


def find_size(runs: Sequence[Run], default: int) -> int:
    """Returns the image side in pixels of the first run that is no detector, or ``default``."""
    for run in runs:
        with contextlib.suppress(NotApplicable, UserError):  # reported when the run is used
            if run.task is not DETECTION:
                return int(run.cfg.INPUT.PRETRAIN.SIZE)
    return default


def batch_images(model: nn.Module, entries: Entries, label: str) -> Iterator[Tensor]:
    """Yields normalized batches (n, 3, S, S) on the model's device, and shows progress."""
    statistics = get_pixel_statistics(model)
    mean, std = (statistics[name].view(-1, 1, 1) for name in ("pixel_mean", "pixel_std"))
    starts = range(0, len(entries), _BATCH_SIZE)
    for start in tqdm(starts, unit="batch", desc=label, delay=2, leave=False):
        images = torch.stack([entry["image"] for entry in entries[start : start + _BATCH_SIZE]])
        yield (images.to(mean.device) - mean) / std
