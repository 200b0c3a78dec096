# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How diverse the attention of the tokens is from block to block, one line a run."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .charts import (
    INK,
    LINE,
    Format,
    Theme,
    add_legend,
    encode,
    list_styles,
    start_figure,
    to_texts,
)

Bridge = Literal["to_former", "to_mobile"]

_FIGURES: dict[Bridge, tuple[str, str, str]] = {
    "to_former": (
        "likeness",
        "Mobile→Former: how alike the tokens look at the pixels",
        "attention in common (1: the same)",
    ),
    "to_mobile": (
        "spread",
        "Mobile←Former: how evenly a pixel listens to the tokens",
        "share of the largest entropy",
    ),
}


def plot_blocks(
    blocks: Mapping[str, Sequence[Mapping[str, Any]]],
    bridge: Bridge,
    *,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws likeness (of Mobile->Former) or spread (of Mobile<-Former) against the block's number.

    Args:
        blocks: by run, what ``describe_block`` gives for each of its blocks.
        bridge: which of the two.
        theme: of the page.
        format: of the file.
    """
    key, title, label = _FIGURES[bridge]
    figure, axes = start_figure(theme, height=3.4)
    numbers: set[int] = set()
    looks = zip(to_texts(blocks), list_styles(theme, len(blocks)), strict=True)
    for rows, (name, style) in zip(blocks.values(), looks, strict=True):
        own = [int(row["number"]) for row in rows]
        numbers.update(own)
        line: dict[str, Any] = {"label": name, "lw": 1.8, "ms": 4, **style}
        axes.plot(own, [row[bridge][key] for row in rows], **line)
    axes.set_ylim(0, 1.04)
    axes.set_xticks(sorted(numbers))
    axes.set_title(title, fontsize=10, loc="left", color=INK[theme])
    axes.set_xlabel("block, as Table 8 counts them")
    axes.set_ylabel(label)
    axes.grid(color=LINE[theme])
    add_legend(figure, axes, theme)
    return encode(figure, theme, format)
