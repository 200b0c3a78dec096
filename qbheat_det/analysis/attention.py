# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "attention": attention between the global tokens and the pixels of a Mobile-Former.

Paper: QB-Heat, arXiv:2211.13228, Appendix E, Fig. 13 and 14. The paper argues by eye; the measures
are this package's. Of its four blocks it names 10 and 12; 3 and 6 end strides 4 and 8 in Table 8.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure as Chart
from torch import Tensor, nn
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.layers import MobileFormerBlock, read_attention
from qbheat_det.modeling.backbone import MobileFormer

from .figure import (
    FigureOptions,
    SharedImages,
    batch_images,
    crop_squares,
    find_size,
    run_each,
)
from .plotting import (
    RGBImage,
    add_legend,
    chart_image,
    list_styles,
    overlay_map,
    plot_grid,
    shrink,
    start_chart,
    themed,
    to_rgb,
    to_text,
    to_texts,
)
from .run import Run

Bridge = Literal["to_former", "to_mobile"]
Heads = Literal["mean", "apart"]

PAPER_BLOCKS = (3, 6, 10, 12)
"""Of the paper's networks, which have twelve."""
_PAPER_SIZE = 256  # of pre-training, Table 9
_NUM_IMAGES = 16  # that measures are averaged over
_ABOVE = 0.05  # share of a map's attention that may lie above the top of its colours
_CELL = 104  # pixels
_BRIDGES: dict[Bridge, tuple[str, str, str]] = {
    "to_former": ("Mobile→Former", "overlap", "attention that two tokens have in common"),
    "to_mobile": ("Mobile←Former", "spread", "entropy over tokens (1: uniform)"),
}
_EXPLANATION = (
    "Mobile→Former shows where each token attends (Fig. 13 of the paper), in multiples of uniform "
    "attention; Mobile←Former which tokens each pixel attends to (Fig. 14). Overlap is 1 where all "
    "tokens attend to the same pixels, spread 1 where pixels attend to all tokens equally. Both "
    "are 1 for identical tokens, and for an untrained network, whose tokens attend everywhere.",
)


@dataclass(frozen=True)
class BlockAttention:
    """Both bridges of one block, numbered from 1 as in Table 8, and strides of their maps.

    ``to_former`` (N, heads, M, H, W) is of Mobile→Former and sums to 1 over the pixels of its map;
    ``to_mobile`` (N, heads, M, H', W') is of Mobile←Former and sums to 1 over the M tokens.
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
    blocks = [
        (f"stages.{i}.{j}", block)
        for i, stage in enumerate(backbone.stages)
        for j, block in enumerate(cast(nn.ModuleList, stage))
    ]
    for number, (name, block) in enumerate(blocks, start=1):
        before, stride = stride, stride * cast(int, block.stride)
        if isinstance(block, MobileFormerBlock):
            found[number] = (name, before, stride)
    return found


def choose_blocks(backbone: MobileFormer) -> list[int]:
    """Returns the paper's blocks in a network of twelve, else the last at each resolution."""
    blocks = list_blocks(backbone)
    if sum(len(cast(nn.ModuleList, stage)) for stage in backbone.stages) == max(PAPER_BLOCKS):
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
            to_former=record[f"{name}.mobile_to_former"][-1].cpu(),
            to_mobile=record[f"{name}.former_to_mobile"][-1].cpu(),
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
    """Returns the mean over pairs of tokens of what both attend to, (...), of (..., M, H, W)."""
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


class _Attention(NamedTuple):
    """Of one run: mean measures of all blocks; by drawn image, the drawn blocks and pixels."""

    blocks: list[dict[str, Any]]
    drawn: list[list[BlockAttention]]
    images: list[RGBImage]


@register_figure("attention")
def draw_attention(
    runs: Sequence[Run],
    options: FigureOptions,
    *,
    attention_heads: Heads = "mean",
    attention_blocks: Sequence[int] | None = None,
) -> Figure:
    """Draws both bridges of a few blocks over images, and measures of all blocks as charts.

    ``attention_heads`` are their mean, or a row for each; ``attention_blocks`` the numbers of the
    drawn blocks, None for those of ``choose_blocks``.
    """
    size = find_size(runs, _PAPER_SIZE)
    shared = SharedImages(runs, max(options.num_images, _NUM_IMAGES), options.images)

    def compute(run: Run) -> _Attention:
        return _attend(run, shared, size, attention_blocks, options.num_images)

    results = run_each(runs, compute, nothing="no attention of tokens")
    found = results.found
    blocks = {label: one.blocks for label, one in found.items()}
    images: dict[str, Image] = {}
    for bridge, (arrow, measure, _) in _BRIDGES.items():
        images[f"{bridge}_blocks"] = chart_image(
            plot_blocks(blocks, bridge), caption=f"{arrow}: {measure} by block."
        )
        for index in range(min(options.num_images, len(shared.files))):
            images[f"{bridge}_{index + 1}"] = _draw_image(found, bridge, index, attention_heads)
    return Figure(
        "attention",
        "Attention between tokens and pixels",
        [*_EXPLANATION, *shared.explain(), *results.explain()],
        images,
        {"images": shared.files, "size": size, "runs": blocks, "left_out": results.left_out},
        _tabulate(blocks),
    )


@themed
def plot_blocks(blocks: Mapping[str, Sequence[Mapping[str, Any]]], bridge: Bridge) -> Chart:
    """Draws overlap (of Mobile→Former) or spread (of Mobile←Former) against the block's number."""
    arrow, measure, label = _BRIDGES[bridge]
    figure, axes = start_chart(height=3.4)
    for rows, name, style in zip(
        blocks.values(), to_texts(blocks), list_styles(len(blocks)), strict=True
    ):
        values = [row[bridge][measure] for row in rows]
        axes.plot([row["number"] for row in rows], values, label=name, **style)
    axes.set_ylim(0, 1.04)
    axes.set_xticks(sorted({row["number"] for rows in blocks.values() for row in rows}))
    axes.set_title(f"{arrow}: {measure}")
    axes.set_xlabel("block, numbered as in Table 8")
    axes.set_ylabel(label)
    add_legend(figure, axes)
    return figure


def _attend(
    run: Run, shared: SharedImages, size: int, wanted: Sequence[int] | None, num_drawn: int
) -> _Attention:
    backbone = find_mobile_former(run.model)
    known = list_blocks(backbone) if backbone is not None else {}
    if backbone is None or not known:
        name = run.cfg.MODEL.BACKBONE.NAME
        raise NotApplicable(f"'{run.label}' has no Mobile-Former with tokens, but '{name}'")
    numbers = wanted or choose_blocks(backbone)
    if unknown := sorted(set(numbers) - set(known)):
        raise UserError(f"--attention-blocks: '{run.label}' has no block {unknown[0]} with tokens")
    entries = crop_squares(run.cfg, shared.choose(run), size)
    described: list[list[dict[str, Any]]] = []
    drawn: list[list[BlockAttention]] = []
    bar = tqdm(entries, unit="image", desc=f"attention, {run.label}", delay=2, leave=False)
    for index, entry in enumerate(bar):
        # One by one: all maps of all blocks of a batch would be much memory for large images.
        (image,) = batch_images(run.model, [entry], "")
        blocks = read_bridges(backbone, image)
        described.append([describe_block(block) for block in blocks])
        if index < num_drawn:
            drawn.append([block for block in blocks if block.number in numbers])
    return _Attention(
        [_average(rows) for rows in zip(*described, strict=True)],
        drawn,
        [to_rgb(e["image"], run.cfg.INPUT.FORMAT).astype(np.uint8) for e in entries[: len(drawn)]],
    )


def _average(rows: Sequence[Any]) -> Any:
    """Returns the mean over images of the nested measures of one block."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {key: _average([row[key] for row in rows]) for key in first}
    mean = torch.tensor(rows, dtype=torch.float64).mean(dim=0)
    return int(mean) if isinstance(first, int) else mean.tolist()


def _draw_image(found: Mapping[str, _Attention], bridge: Bridge, index: int, heads: Heads) -> Image:
    """Draws one image, the rows of all runs below each other."""
    grid, names = [], []
    for label, one in found.items():
        image = shrink(one.images[index], _CELL)
        factor = image.shape[1] / one.images[index].shape[1]
        for block in one.drawn[index]:
            for name, maps, stride in _list_maps(block, bridge, heads):
                # Uniform attention is the middle of the colours, not the last one.
                top = min(1.0, 2 / len(maps))
                if bridge == "to_former":
                    top = max(2.0, find_top(maps))
                overlays = [overlay_map(image, m, stride=stride * factor, high=top) for m in maps]
                grid.append([image, *overlays])
                prefix = f"{to_text(label)}\n" if len(found) > 1 else ""
                names.append(f"{prefix}{name}\n0 to {top:.2g}")
    columns = ["image", *(f"token {i + 1}" for i in range(max(map(len, grid)) - 1))]
    arrow = _BRIDGES[bridge][0]
    chart = plot_grid(grid, column_names=columns, row_names=names)
    return chart_image(chart, caption=f"{arrow}, image {index + 1}.", format="jpg")


def _list_maps(
    block: BlockAttention, bridge: Bridge, heads: Heads
) -> list[tuple[str, list[npt.NDArray[np.float32]], int]]:
    """Returns name, maps (H, W) of the tokens and their stride, for the mean or for each head."""
    former = bridge == "to_former"
    weights = (block.to_former if former else block.to_mobile)[0].float()
    stride = block.to_former_stride if former else block.to_mobile_stride
    if former:
        weights = weights * weights[0, 0].numel()  # multiples of uniform attention
    if heads == "mean":
        return [
            (f"block {block.number}, stride {stride}", list(weights.mean(dim=0).numpy()), stride)
        ]
    return [
        (f"block {block.number}, head {i + 1}", list(maps.numpy()), stride)
        for i, maps in enumerate(weights)
    ]


def _tabulate(blocks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    numbers = sorted({row["number"] for rows in blocks.values() for row in rows})
    body = []
    for label, rows in blocks.items():
        own = {row["number"]: row for row in rows}
        for bridge, (_, measure, _) in _BRIDGES.items():
            cells = [f"{own[n][bridge][measure]:.2f}" if n in own else "" for n in numbers]
            body.append((f"{label}, {measure}", *cells))
    return Table(("Run", *(f"block {n}" for n in numbers)), body)
