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
from matplotlib.figure import Figure as Chart
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
from .figures import Figure, NotApplicable
from .run import Entries, FigureOptions, Run, read_spread, run_on_images

Bridge = Literal["to_former", "to_mobile"]
Heads = Literal["mean", "apart"]

PAPER_BLOCKS = (3, 6, 10, 12)
"""Numbers of the blocks in the paper's figures. The paper's networks have twelve blocks."""
_PAPER_IMAGE_SIZE = 256  # in pre-training, Table 9
_SATURATED_SHARE = 0.05  # of a map's sum, from values above the end of the color scale
_CELL_SIDE = 104  # of an image in the figure, in pixels
_STEM_STRIDE = 2
_BRIDGE_TITLES: dict[Bridge, str] = {"to_former": "Mobile→Former", "to_mobile": "Mobile←Former"}
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
    for module in model.modules():
        if isinstance(module, MobileFormer):
            return module
    return None


def list_blocks(backbone: MobileFormer) -> dict[int, tuple[str, int, int]]:
    """Maps the numbers of the blocks with tokens to (name, input stride, output stride).

    All blocks are counted, from 1.
    """
    blocks = {}
    number = 0
    input_stride = _STEM_STRIDE
    for i, stage in enumerate(backbone.stages):
        for j, block in enumerate(cast(nn.ModuleList, stage)):
            number += 1
            output_stride = input_stride * cast(int, block.stride)
            if isinstance(block, MobileFormerBlock):
                blocks[number] = (f"stages.{i}.{j}", input_stride, output_stride)
            input_stride = output_stride
    return blocks


def choose_blocks(backbone: MobileFormer) -> list[int]:
    """Returns the numbers of the blocks to draw.

    For networks with twelve blocks, these are the blocks of the paper's figures. For others, they
    are the last blocks at each stride.
    """
    blocks = list_blocks(backbone)
    num_blocks = sum(len(cast(nn.ModuleList, stage)) for stage in backbone.stages)
    if num_blocks == max(PAPER_BLOCKS):
        return [number for number in PAPER_BLOCKS if number in blocks]
    last_blocks = {}  # by stride
    for number, (_, _, output_stride) in blocks.items():
        last_blocks[output_stride] = number
    return list(last_blocks.values())


@torch.no_grad()
def read_bridges(backbone: MobileFormer, images: Tensor) -> list[BlockAttention]:
    """Runs a network on images (N, 3, H, W). Returns the attention of its blocks, on the CPU."""
    blocks = list_blocks(backbone)
    bridges = []
    for name, _, _ in blocks.values():
        bridges += [f"{name}.mobile_to_former", f"{name}.former_to_mobile"]
    with read_attention(backbone, bridges) as record:
        backbone(images)
    return [
        BlockAttention(
            number=number,
            to_former=record[f"{name}.mobile_to_former"][-1].cpu(),
            to_mobile=record[f"{name}.former_to_mobile"][-1].cpu(),
            to_former_stride=input_stride,
            to_mobile_stride=output_stride,
        )
        for number, (name, input_stride, output_stride) in blocks.items()
    ]


def find_scale_end(maps: Sequence[npt.NDArray[np.float32]]) -> float:
    """Returns the end of the color scale. At most 5 % of each map's sum is from higher values."""
    ends = []
    for values in maps:
        descending = np.sort(values, axis=None)[::-1]
        sums = np.cumsum(descending, dtype=np.float64)
        index = np.searchsorted(sums, _SATURATED_SHARE * sums[-1])
        ends.append(float(descending[index]))
    return max(ends)


@dataclass(frozen=True)
class _ImageAttention:
    """One image of a run: its pixels, and the attention of the blocks to draw."""

    pixels: RGBImage
    blocks: list[BlockAttention]


def draw_attention(
    runs: Sequence[Run], options: FigureOptions, *, attention_heads: Heads = "mean"
) -> Figure:
    """Draws the attention of both bridges over images, for the blocks of ``choose_blocks``.

    ``attention_heads`` "mean" averages over heads, and "apart" draws one row per head. Raises
    ``NotApplicable`` if no run has a Mobile-Former with tokens.
    """
    size = find_size(runs, _PAPER_IMAGE_SIZE)

    def compute(run: Run, files: Sequence[str]) -> list[_ImageAttention]:
        return _compute_attention(run, files, size)

    results = run_on_images(runs, compute, options, nothing="no attention of tokens")
    charts = {}
    for bridge in _BRIDGE_TITLES:
        for index in range(len(results.files)):
            attentions = {label: images[index] for label, images in results.by_label.items()}
            chart = _plot_image(attentions, bridge, attention_heads)
            caption = f"{_BRIDGE_TITLES[bridge]}, image {index + 1}."
            charts[f"{bridge}_{index + 1}"] = plotting.chart_image(
                chart, caption=caption, format="jpg"
            )
    blocks = {}
    for label, images in results.by_label.items():
        blocks[label] = [block.number for block in images[0].blocks]
    title = "Attention between tokens and pixels"
    return results.draw("attention", title, _EXPLANATION, charts, size=size, blocks=blocks)


def _compute_attention(run: Run, files: Sequence[str], size: int) -> list[_ImageAttention]:
    backbone = find_mobile_former(run.model)
    if backbone is None or not choose_blocks(backbone):
        name = run.cfg.MODEL.BACKBONE.NAME
        raise NotApplicable(f"'{run.label}' has no Mobile-Former with tokens, but '{name}'")
    numbers = choose_blocks(backbone)
    entries = crop_squares(run.cfg, files, size)
    results = []
    for entry in tqdm(entries, unit="image", desc=f"attention, {run.label}", delay=2, leave=False):
        # One image at a time, because the attention of all blocks of large images needs much memory
        (image,) = batch_images(run.model, [entry], "")
        blocks = [block for block in read_bridges(backbone, image) if block.number in numbers]
        pixels = plotting.to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
        results.append(_ImageAttention(pixels, blocks))
    return results


def _plot_image(attentions: Mapping[str, _ImageAttention], bridge: Bridge, heads: Heads) -> Chart:
    """Draws the attention on one image, with the rows of all runs below each other.

    ``attentions`` maps the label of each run to its attention on this image.
    """
    rows = []
    row_names = []
    for label, attention in attentions.items():
        image = plotting.resize_longest_side(attention.pixels, _CELL_SIDE)
        scale = image.shape[1] / attention.pixels.shape[1]
        for block in attention.blocks:
            for name, maps, stride in _list_maps(block, bridge, heads):
                if bridge == "to_former":
                    scale_end = max(2.0, find_scale_end(maps))
                else:
                    # Uniform attention over the tokens has the middle color.
                    scale_end = min(1.0, 2 / len(maps))
                overlays = [
                    plotting.overlay_map(image, values, stride=stride * scale, high=scale_end)
                    for values in maps
                ]
                rows.append([image, *overlays])
                row_name = f"{name}\n0 to {scale_end:.2g}"
                if len(attentions) > 1:
                    row_name = f"{plotting.to_text(label)}\n{row_name}"
                row_names.append(row_name)
    num_tokens = max(len(row) for row in rows) - 1
    column_names = ["image", *(f"token {i + 1}" for i in range(num_tokens))]
    return plotting.plot_grid(rows, column_names=column_names, row_names=row_names)


def _list_maps(
    block: BlockAttention, bridge: Bridge, heads: Heads
) -> list[tuple[str, list[npt.NDArray[np.float32]], int]]:
    """Returns (row name, one map (H, W) per token, stride) for the mean or for each head."""
    if bridge == "to_former":
        stride = block.to_former_stride
        weights = block.to_former[0].float()
        weights = weights * weights[0, 0].numel()  # multiples of uniform attention
    else:
        stride = block.to_mobile_stride
        weights = block.to_mobile[0].float()
    if heads == "mean":
        weights = weights.mean(dim=0, keepdim=True)
        names = [f"stride {stride}"]
    else:
        names = [f"head {i + 1}" for i in range(len(weights))]
    return [
        (f"block {block.number}, {name}", list(maps.numpy()), stride)
        for name, maps in zip(names, weights, strict=True)
    ]


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
    entries, _ = read_spread(records, build_mapper(cfg, is_train=False), len(records))
    return entries


def find_size(runs: Sequence[Run], default: int) -> int:
    """Returns the image side in pixels of the first run that is no detector, or ``default``."""
    for run in runs:
        # The figure reports these errors when it uses the run.
        with contextlib.suppress(NotApplicable, UserError):
            if run.task is not DETECTION:
                return int(run.cfg.INPUT.PRETRAIN.SIZE)
    return default


def batch_images(model: nn.Module, entries: Entries, label: str) -> Iterator[Tensor]:
    """Yields normalized batches (n, 3, S, S) on the model's device, and shows progress."""
    statistics = get_pixel_statistics(model)
    mean = statistics["pixel_mean"].view(-1, 1, 1)
    std = statistics["pixel_std"].view(-1, 1, 1)
    starts = range(0, len(entries), _BATCH_SIZE)
    for start in tqdm(starts, unit="batch", desc=label, delay=2, leave=False):
        images = torch.stack([entry["image"] for entry in entries[start : start + _BATCH_SIZE]])
        yield (images.to(mean.device) - mean) / std
