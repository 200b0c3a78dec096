# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "attention": attention between the global tokens and the pixels of a Mobile-Former.

Paper: QB-Heat, arXiv:2211.13228, Appendix E, Fig. 13 and 14.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure as Chart
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure

from .attention import (
    BlockAttention,
    choose_blocks,
    describe_block,
    find_mobile_former,
    find_top,
    list_blocks,
    read_bridges,
)
from .figure import (
    FigureOptions,
    SharedImages,
    batch_images,
    crop_squares,
    find_sizes,
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

_PAPER_SIZE = 256  # of pre-training, Table 9
_CELL = 104  # pixels
_BRIDGES: dict[Bridge, tuple[str, str, str]] = {
    "to_former": ("Mobile→Former", "overlap", "attention that two tokens have in common"),
    "to_mobile": ("Mobile←Former", "spread", "entropy over tokens (1: uniform)"),
}
_EXPLANATION = (
    "Mobile→Former is normalised over pixels and shows where each token attends (Fig. 13 of the "
    "paper); Mobile←Former is normalised over tokens and shows which tokens each pixel attends to "
    "(Fig. 14). A column is a token, a row a block; colours go from 0 to the number beside the "
    "row, in multiples of uniform attention for Mobile→Former.",
    "The charts measure the paper's \u201cmore diverse across tokens\u201d: overlap is 1 where all "
    "tokens attend to the same pixels, spread 1 where pixels attend to all tokens equally. Both "
    "are 1 for identical tokens, and for an untrained network, whose tokens attend everywhere.",
)


@dataclass(frozen=True)
class _Attention:
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
    attention_images: int = 16,
    attention_size: int | None = None,
) -> Figure:
    """Draws both bridges of a few blocks over images, and measures of all blocks as charts.

    Args:
        runs: to compare.
        options: ``images`` and ``num_images``.
        attention_heads: the mean over heads, or a row for each.
        attention_blocks: numbers of the drawn blocks; None as ``choose_blocks``.
        attention_images: images that measures are averaged over, at least those drawn.
        attention_size: of the images; None takes that of the first run, or the paper's.
    """
    size = attention_size or next(iter(find_sizes(runs)), _PAPER_SIZE)
    shared = SharedImages(runs, max(options.num_images, attention_images), options.images)

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
        {
            "images": shared.files,
            "size": size,
            "runs": blocks,
            "left_out": results.left_out,
        },
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
        raise UserError(
            f"'{run.label}' has no block {unknown[0]} with tokens: --attention-blocks are of "
            f"{', '.join(map(str, known))}"
        )
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
        blocks=[_average(rows) for rows in zip(*described, strict=True)],
        drawn=drawn,
        images=[
            to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
            for entry in entries[: len(drawn)]
        ],
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
    chart = plot_grid(grid, column_names=columns, row_names=names, title=arrow)
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
