# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "attention": where the global tokens look, and which of them pixels listen to."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.attention import (
    PAPER_BLOCKS,
    BlockAttention,
    choose_blocks,
    describe_block,
    find_mobile_former,
    list_blocks,
    read_bridges,
)
from qbheat_det.analysis.attention_chart import Bridge, plot_blocks
from qbheat_det.analysis.attention_pictures import AttentionRow, draw_attention, stack_sheets
from qbheat_det.analysis.detection_pictures import RGBImage
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.plotting import to_rgb
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import MobileFormer

from .flag_types import whole
from .map_figures import list_map
from .options import SightOptions
from .refusal import NothingToSee
from .same_pictures import SamePictures, batch_images, crop_squares, find_sizes
from .side_by_side import look_at_each
from .subject import Subject

Heads = Literal["mean", "apart"]

_MEASURED = 16  # images that figures are taken over
_SIZE = 256  # of the paper's pre-training (Table 9)
_CELL = 104
_QUALITY = 82  # there are many pictures, all of them smooth
_DELAY = 2.0  # seconds without a bar
_ARROWS: dict[Bridge, str] = {"to_former": "Mobile→Former", "to_mobile": "Mobile←Former"}
_NORMALIZED: dict[Bridge, str] = {
    "to_former": "each token's attention sums to 1 over the pixels",
    "to_mobile": "at each pixel, attention sums to 1 over the tokens",
}
_HOW_TO_READ = (
    "Mobile-Former passes messages both ways between the map and a few global tokens. "
    "Mobile→Former is normalised over pixels and shows where each token looks (Fig. 13 of the "
    "paper); Mobile←Former is normalised over tokens and shows which tokens each pixel listens to "
    "(Fig. 14). A column is a token, a row a block.",
    "Of Mobile→Former, colours are multiples of even attention, and a row has one scale; at most a "
    "twentieth of a token's attention lies above its top. Of Mobile←Former with M tokens, the "
    "scale is 0 to 2 / M: the middle is evenly shared attention, 1 / M, and what is above the top "
    "has its colour.",
    "The charts put the paper's \u201cmore diverse across tokens\u201d into numbers, over all "
    "blocks: attention in common is 1 where all tokens look at the same pixels; spread is 1 where "
    "pixels listen to all tokens alike. Tokens that have become one and the same give 1 in both; "
    "so do those of an untrained network, which look everywhere alike. The pictures tell the two "
    "apart, and so does the spread over pixels in the JSON.",
)


@dataclass(frozen=True)
class _Attended:
    """Of one subject: figures of all blocks over all images, and blocks to draw, by image.

    Of each image that is drawn also the figures of all blocks over it alone.
    """

    figures: list[dict[str, Any]]
    of_images: list[list[dict[str, Any]]]
    shown: list[list[BlockAttention]]
    images: list[RGBImage]


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--attention-heads",
        choices=("mean", "apart"),
        default="mean",
        help="draw the mean over the heads (default), or a row for each, as the paper does",
    )
    parser.add_argument(
        "--attention-blocks",
        type=whole(),
        nargs="+",
        metavar="N",
        help="blocks to draw, counted from 1 (default: the paper's "
        f"{', '.join(map(str, PAPER_BLOCKS))}; the last at each resolution of other networks)",
    )
    parser.add_argument(
        "--attention-images",
        type=whole(),
        default=_MEASURED,
        metavar="N",
        help=f"images that the figures are taken over (default: {_MEASURED}, at least those drawn)",
    )
    parser.add_argument(
        "--attention-size",
        type=whole(),
        metavar="S",
        help="side of the images in pixels, the same for all runs (default: that of the first "
        f"run's pre-training or classification; of detectors the paper's {_SIZE})",
    )


def see_attention(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws both bridges of a few blocks over images, and figures of all blocks as charts.

    Raises:
        NothingToSee: no subject has a Mobile-Former, or there are no pictures.
        UserError: a block has no tokens, or a flag makes no sense.
    """
    size = options.extra.get("attention_size") or next(iter(find_sizes(subjects)), _SIZE)
    number = max(options.num_images, options.extra.get("attention_images") or _MEASURED)
    if size < 1 or number < 1:
        raise UserError("--attention-size and --attention-images are at least 1")
    chosen = SamePictures(subjects, number, options.images)

    def look(subject: Subject) -> _Attended:
        backbone = _find_backbone(subject)
        return _attend(subject, backbone, chosen.pick(subject), size, options)

    looked = look_at_each(subjects, look, nothing="no attention of tokens")
    blocks = {label: one.figures for label, one in looked.found.items()}
    heads: Heads = options.extra.get("attention_heads") or "mean"
    pictures: dict[str, Picture] = {}
    for bridge in _ARROWS:
        pictures[f"{bridge}_blocks"] = _draw_chart(blocks, bridge)
        for index in range(min(options.num_images, len(chosen.files))):
            pictures[f"{bridge}_{index + 1}"] = _draw_image(looked.found, bridge, index, heads)
    return Exhibit(
        "attention",
        "Attention between tokens and pixels",
        [*_HOW_TO_READ, *chosen.explain(), *looked.explain()],
        pictures,
        {
            "images": chosen.files,
            "size": size,
            "subjects": blocks,
            "drawn": {label: _list_drawn(one, heads) for label, one in looked.found.items()},
            "left_out": looked.left_out,
        },
        _tabulate(blocks),
    )


def _find_backbone(subject: Subject) -> MobileFormer:
    backbone = find_mobile_former(subject.model)
    if backbone is None:
        raise NothingToSee(
            f"'{subject.label}' has no Mobile-Former, whose tokens this is about, but a backbone "
            f"'{subject.cfg.MODEL.BACKBONE.NAME}'"
        )
    if not list_blocks(backbone):
        raise NothingToSee(f"the Mobile-Former of '{subject.label}' has no block with tokens")
    return backbone


def _attend(
    subject: Subject,
    backbone: MobileFormer,
    files: Sequence[str],
    size: int,
    options: SightOptions,
) -> _Attended:
    wanted = options.extra.get("attention_blocks") or choose_blocks(backbone)
    if unknown := sorted(set(wanted) - set(list_blocks(backbone))):
        raise UserError(
            f"block {unknown[0]} of '{subject.label}' does not exist or has no tokens: there are "
            f"{', '.join(map(str, list_blocks(backbone)))}"
        )
    entries = crop_squares(subject.cfg, files, size)
    described: list[list[dict[str, Any]]] = []
    shown: list[list[BlockAttention]] = []
    bar = tqdm(entries, unit="image", desc=f"attention, {subject.label}", delay=_DELAY, leave=False)
    for index, entry in enumerate(bar):
        # One by one: all maps of all blocks of a batch would be much memory for large images.
        (image,) = batch_images(subject.model, [entry])
        blocks = read_bridges(backbone, image)
        described.append([describe_block(block) for block in blocks])
        if index < options.num_images:
            shown.append([block for block in blocks if block.number in wanted])
    return _Attended(
        figures=[_average(rows) for rows in zip(*described, strict=True)],
        of_images=described[: len(shown)],
        shown=shown,
        images=[
            to_rgb(entry["image"], subject.cfg.INPUT.FORMAT).astype(np.uint8)
            for entry in entries[: len(shown)]
        ],
    )


def _average(rows: Sequence[Any]) -> Any:
    """Returns the mean over images of figures of one block, whatever they are nested in."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {key: _average([row[key] for row in rows]) for key in first}
    mean = torch.tensor(rows, dtype=torch.float64).mean(dim=0)
    return int(mean) if isinstance(first, int) else mean.tolist()


def _draw_chart(blocks: Mapping[str, Sequence[Mapping[str, Any]]], bridge: Bridge) -> Picture:
    key = "likeness" if bridge == "to_former" else "spread"
    said = "; ".join(
        f"{label}: {rows[0][bridge][key]:.2f} at block {rows[0]['number']}, "
        f"{rows[-1][bridge][key]:.2f} at block {rows[-1]['number']}"
        for label, rows in blocks.items()
    )
    alt = f"{_ARROWS[bridge]}, {key} of attention against the block: {said}"
    return Picture.from_chart(
        lambda theme: plot_blocks(blocks, bridge, theme=theme),
        alt=alt,
        caption=f"{_ARROWS[bridge]}: {key}.",
    )


def _draw_image(
    found: Mapping[str, _Attended], bridge: Bridge, index: int, heads: Heads
) -> Picture:
    sheets = []
    for label, one in found.items():
        rows = [row for block in one.shown[index] for row in _list_rows(block, bridge, heads)]
        columns = [f"token {i + 1}" for i in range(len(rows[0].maps))]
        title = f"{label}\n{_ARROWS[bridge]}\n{_NORMALIZED[bridge]}"
        sheets.append(draw_attention(one.images[index], rows, columns, title=title, cell=_CELL))
    alt = f"{_ARROWS[bridge]} over image {index + 1}, of {', '.join(found)}: a column is a token"
    caption = f"{_ARROWS[bridge]}, image {index + 1}."
    return Picture.from_rgb(stack_sheets(sheets), alt=alt, caption=caption, quality=_QUALITY)


def _list_rows(block: BlockAttention, bridge: Bridge, heads: Heads) -> list[AttentionRow]:
    weights: Tensor = block.to_former[0] if bridge == "to_former" else block.to_mobile[0]
    stride = block.to_former_stride if bridge == "to_former" else block.to_mobile_stride
    if bridge == "to_former":
        weights = weights * weights[0, 0].numel()  # multiples of even attention
    named = (
        [(f"block {block.number}", weights.mean(dim=0))]
        if heads == "mean"
        else [(f"block {block.number}, head {i + 1}", one) for i, one in enumerate(weights)]
    )
    return [
        AttentionRow(
            label=f"{name}\nstride {stride}",
            maps=[one.float().numpy() for one in maps],
            strides=[stride] * len(maps),
            unit="x even" if bridge == "to_former" else "",
            top=None if bridge == "to_former" else min(1.0, 2 / weights.shape[1]),
            least=2.0,  # so that even attention is the middle of the scale, not its top
        )
        for name, maps in named
    ]


def _list_drawn(one: _Attended, heads: Heads) -> list[dict[str, Any]]:
    """Returns for each image what its pictures hold: rows, their scales, and their small maps."""
    return [
        {
            "blocks": figures,
            "rows": {
                bridge: [
                    {
                        "label": row.label.replace("\n", ", "),
                        "unit": row.unit,
                        "top_of_scale": row.find_scale(),
                        "maps": [list_map(values) for values in row.maps],
                    }
                    for block in blocks
                    for row in _list_rows(block, bridge, heads)
                ]
                for bridge in _ARROWS
            },
        }
        for figures, blocks in zip(one.of_images, one.shown, strict=True)
    ]


def _tabulate(blocks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    numbers = sorted({row["number"] for rows in blocks.values() for row in rows})
    body = []
    for label, rows in blocks.items():
        own = {row["number"]: row for row in rows}
        for bridge, key in (("to_former", "likeness"), ("to_mobile", "spread")):
            cells = [f"{own[n][bridge][key]:.2f}" if n in own else "" for n in numbers]
            body.append((f"{label}, {key}", *cells))
    return Table(("Run", *(f"block {n}" for n in numbers)), body)
