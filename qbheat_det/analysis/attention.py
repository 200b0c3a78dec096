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
_SATURATED_SHARE = 0.05  # share of a map's sum that may lie above the end of the color scale
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
    """Attention between the M tokens and the pixels in one block, for N images.

    Attributes:
        number: number of the block, from 1, as in Table 8.
        to_former: attention of each token to the pixels of the block's input (N, heads, M, H, W).
            It sums to 1 over the H x W pixels.
        to_mobile: attention of each pixel of the block's output to the tokens
            (N, heads, M, H', W'). It sums to 1 over the M tokens.
        to_former_stride: stride of the block's input.
        to_mobile_stride: stride of the block's output.
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
    """Maps the number of each block that has tokens to (name, input stride, output stride).

    Numbers start from 1 and also count the blocks without tokens.
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
        last_blocks[output_stride] = number  # replaces the block before
    return list(last_blocks.values())


@torch.no_grad()
def read_bridges(backbone: MobileFormer, images: Tensor) -> list[BlockAttention]:
    """Runs a network on normalized images (N, 3, H, W), and returns its attention on the CPU.

    The result has one item per block with tokens, in the order of the network.
    """
    blocks = list_blocks(backbone)
    bridges = []
    for name, _, _ in blocks.values():
        bridges += [f"{name}.mobile_to_former", f"{name}.former_to_mobile"]
    with read_attention(backbone, bridges) as record:
        backbone(images)
    attentions = []
    for number, (name, input_stride, output_stride) in blocks.items():
        attention = BlockAttention(
            number=number,
            to_former=record[f"{name}.mobile_to_former"][-1].cpu(),  # of the last call
            to_mobile=record[f"{name}.former_to_mobile"][-1].cpu(),
            to_former_stride=input_stride,
            to_mobile_stride=output_stride,
        )
        attentions.append(attention)
    return attentions


def find_scale_end(maps: Sequence[npt.NDArray[np.float32]]) -> float:
    """Returns the value at the end of the color scale, which all maps share.

    It is so high that, in each map, values above it have at most 5 % of the map's sum.
    """
    ends = []
    for values in maps:
        descending = np.sort(values, axis=None)[::-1]
        sums = np.cumsum(descending, dtype=np.float64)  # of the n highest values
        index = np.searchsorted(sums, _SATURATED_SHARE * sums[-1])
        ends.append(float(descending[index]))
    return max(ends)


@dataclass(frozen=True)
class _ImageAttention:
    """One image of a run: its pixels (H, W, 3), and the attention of the blocks to draw."""

    pixels: RGBImage
    blocks: list[BlockAttention]


def draw_attention(
    runs: Sequence[Run], options: FigureOptions, *, attention_heads: Heads = "mean"
) -> Figure:
    """Draws the attention of both bridges over images, for the blocks of ``choose_blocks``.

    ``attention_heads`` is "mean" for the average over heads, or "apart" for one row per head.
    Raises ``NotApplicable`` if no run has a Mobile-Former with tokens.
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
    """Runs the Mobile-Former of a run on the central square of each file.

    The squares are resized to ``size`` pixels. Raises ``NotApplicable`` if the run has no
    Mobile-Former with tokens.
    """
    backbone = find_mobile_former(run.model)
    if backbone is None or not choose_blocks(backbone):
        name = run.cfg.MODEL.BACKBONE.NAME
        raise NotApplicable(f"'{run.label}' has no Mobile-Former with tokens, but '{name}'")
    numbers = choose_blocks(backbone)
    entries = crop_squares(run.cfg, files, size)
    results = []
    for entry in tqdm(entries, unit="image", desc=f"attention, {run.label}", delay=2, leave=False):
        # Batches of one image, because the attention of all blocks of large images needs much
        # memory.
        (image,) = batch_images(run.model, [entry], "")
        blocks = [block for block in read_bridges(backbone, image) if block.number in numbers]
        pixels = plotting.to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
        results.append(_ImageAttention(pixels, blocks))
    return results


def _plot_image(attentions: Mapping[str, _ImageAttention], bridge: Bridge, heads: Heads) -> Chart:
    """Draws the attention on one image. A row has the image, and a map for each token.

    Each run has a row per block (and head). ``attentions`` maps the label of each run to its
    attention on this image.
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
                    # Uniform attention over the tokens has the color in the middle of the scale.
                    num_tokens = len(maps)
                    scale_end = min(1.0, 2 / num_tokens)
                overlays = [
                    plotting.overlay_map(image, values, stride=stride * scale, high=scale_end)
                    for values in maps
                ]
                rows.append([image, *overlays])
                row_name = f"{name}\n0 to {scale_end:.2g}"
                if len(attentions) > 1:
                    row_name = f"{plotting.to_text(label)}\n{row_name}"
                row_names.append(row_name)
    num_columns = max(len(row) for row in rows)
    column_names = ["image", *(f"token {i}" for i in range(1, num_columns))]
    return plotting.plot_grid(rows, column_names=column_names, row_names=row_names)


def _list_maps(
    block: BlockAttention, bridge: Bridge, heads: Heads
) -> list[tuple[str, list[npt.NDArray[np.float32]], int]]:
    """Returns the rows to draw for one block of one image.

    Each row is (name, M maps (H, W), their stride). There is one row for the mean over heads, or
    one row per head.
    """
    if bridge == "to_former":
        stride = block.to_former_stride
        attention = block.to_former[0].float()  # (heads, M, H, W)
        height, width = attention.shape[2:]
        attention = attention * (height * width)  # multiples of uniform attention
    else:
        stride = block.to_mobile_stride
        attention = block.to_mobile[0].float()
    if heads == "mean":
        attention = attention.mean(dim=0, keepdim=True)
        names = [f"stride {stride}"]
    else:
        names = [f"head {i + 1}" for i in range(len(attention))]
    rows = []
    for name, maps in zip(names, attention, strict=True):
        rows.append((f"block {block.number}, {name}", list(maps.numpy()), stride))
    return rows


def crop_squares(cfg: CfgNode, files: Sequence[str], size: int | None = None) -> Entries:
    """Crops the central square of each file. Returns the mapper's dict of each readable file.

    The key "image" has the square (3, S, S), with S = ``size``, by default ``INPUT.PRETRAIN.SIZE``.
    The evaluation mapper of ``cfg`` crops it. If ``cfg`` is the config of a detector, whose mapper
    does not crop, the mapper of pre-training is used instead.
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
    """Returns the side in pixels of the square images that all runs get.

    It is ``INPUT.PRETRAIN.SIZE`` of the first run that is not a detector, or else ``default``.
    """
    for run in runs:
        # An error is ignored here, because the figure reports it when it uses the run.
        with contextlib.suppress(NotApplicable, UserError):
            if run.task is not DETECTION:
                return int(run.cfg.INPUT.PRETRAIN.SIZE)
    return default


def batch_images(model: nn.Module, entries: Entries, label: str) -> Iterator[Tensor]:
    """Yields normalized batches (n, 3, S, S), n <= 32, on the model's device.

    ``entries`` are results of ``crop_squares``. ``label`` is the text of the progress bar.
    """
    statistics = get_pixel_statistics(model)
    mean = statistics["pixel_mean"].view(-1, 1, 1)
    std = statistics["pixel_std"].view(-1, 1, 1)
    starts = range(0, len(entries), _BATCH_SIZE)
    for start in tqdm(starts, unit="batch", desc=label, delay=2, leave=False):
        images = torch.stack([entry["image"] for entry in entries[start : start + _BATCH_SIZE]])
        yield (images.to(mean.device) - mean) / std
