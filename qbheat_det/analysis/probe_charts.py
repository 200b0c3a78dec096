# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accuracy of probes against the images that went into the backbone, random ones as levels."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import INK, LINE, Format, Theme, encode, list_colors, start_figure


def plot_probes(
    rows: Sequence[Mapping[str, Any]], *, theme: Theme = "light", format: Format = "svg"
) -> bytes:
    """Draws a line for each probe, with bars of one standard error.

    Where rows stand with BatchNorm's statistics as stored and anew, the latter are drawn. A random
    backbone, or the mean of several, is a dashed line of its probe's colour, and a dotted one where
    its statistics are those it was initialised with: the two are far apart, and either may be the
    higher. Weights that do not tell how many images they have seen are left out.

    Args:
        rows: dicts of the attributes of ``ProbeRow``.
        theme: of the page.
        format: of the file.
    """
    anew = any(row["recalibrated"] for row in rows)
    anew_trained = any(row["recalibrated"] for row in rows if row["images_seen"])
    drawn = [
        row for row in rows if not row["images_seen"] or bool(row["recalibrated"]) == anew_trained
    ]
    figure, axes = start_figure(theme, height=4.4)
    for probe, color in zip(
        dict.fromkeys(row["probe"] for row in drawn), list_colors(theme) * len(drawn), strict=False
    ):
        own = [row for row in drawn if row["probe"] == probe and row["top1"] is not None]
        seen = sorted((row for row in own if row["images_seen"]), key=lambda r: r["images_seen"])
        if seen:
            axes.errorbar(
                [row["images_seen"] for row in seen],
                [row["top1"] for row in seen],
                yerr=[row["top1_standard_error"] for row in seen],
                label=probe,
                color=color,
                lw=1.8,
                marker="o",
                ms=4,
                elinewidth=1,
            )
        for label, level, style in _random_levels(rows, probe, anew=anew):
            axes.axhline(level, label=label, color=color, lw=1.4, ls=style)
    if drawn:
        # Outside, since three probes are up to nine lines, all over the axes.
        named = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda n: n[1])
        figure.legend(
            *zip(*named, strict=True),
            loc="outside lower center",
            frameon=False,
            labelcolor=INK[theme],
            fontsize=8,
            ncols=2,
        )
    axes.set_ylim(0, max(1.0, 1.08 * axes.dataLim.y1) if drawn else 1.0)
    axes.set_xlim(left=0)
    axes.set_xlabel("images seen in pre-training")
    axes.set_ylabel("top-1 (%)")
    axes.grid(color=LINE[theme])
    return encode(figure, theme, format)


def _random_levels(
    rows: Sequence[Mapping[str, Any]], probe: str, *, anew: bool
) -> list[tuple[str, float, str]]:
    """Returns label, mean top-1 and line style of each kind of random backbone there is."""
    levels = []
    kinds = [("random", True, "--"), ("random as initialised", False, ":")]
    for kind, recalibrated, style in kinds if anew else [("random", False, "--")]:
        found = [
            row["top1"]
            for row in rows
            if (row["probe"], row["images_seen"], bool(row["recalibrated"]))
            == (probe, 0, recalibrated)
            and row["top1"] is not None
        ]
        if found:
            several = f" (mean of {len(found)})" if len(found) > 1 else ""
            levels.append((f"{probe}, {kind}{several}", statistics.fmean(found), style))
    return levels
