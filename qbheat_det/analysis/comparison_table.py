# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The table of a comparison of objectives, in Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .comparison_summary import Spread, list_measures, summarise_all

_NONE = "-"


def render_comparison(
    results: Sequence[Mapping[str, Any]], objectives: Sequence[str], about: Mapping[str, Any]
) -> str:
    """Returns the tables of what objectives reach and of what they cost, with what ± means.

    Args:
        results: of single stages, those that are done.
        objectives: rows, in order.
        about: ``train_images``, ``val_images``, ``classes``, ``pretraining_images``, ``seeds``,
            ``epochs``, ``stages``, ``done``, ``failed``, ``hardware``.
    """
    summary = summarise_all(results, objectives)
    measures = list_measures(results)
    anew = {key: title for key, title in measures.items() if not key.startswith("probes_as")}
    stored = {key: title for key, title in measures.items() if key.startswith("probes_as")}
    parts = ["# Objectives of pre-training, one frozen encoder each", _describe(about)]
    if anew:
        parts += ["## What the frozen encoder gives", _measures(summary, anew)]
        parts.append(_explain(summary, results, about))
    if stored:
        parts += ["## The same with BatchNorm's statistics as trained", _measures(summary, stored)]
    parts += ["## What pre-training cost", _cost(summary), _COST_NOTE.format(**about["hardware"])]
    return "\n\n".join(parts) + "\n"


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown, its columns lined up for those who read it as it is."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = [headers, ["-" * width for width in widths], *rows]
    padded = ([cell.ljust(n) for cell, n in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


_COST_NOTE = (
    "Multiply-adds are those of all encoders in the forward pass of training, for an image of the "
    "batch (quarters, several views and a momentum encoder as they are), counted on a batch; "
    "convolutions, linear layers and attention. Seconds are medians of the logged steps, with "
    "whatever else ran beside them: {cpu}, {cores} cores, {accelerator}."
)


def _describe(about: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, about["seeds"]))
    failed = f", {about['failed']} failed" if about["failed"] else ""
    return (
        f"{about['epochs']:g} epochs of {about['pretraining_images']:,} images each; "
        f"seeds {seeds}. Probes learn from {about['train_images']:,} images of "
        f"{about['classes']} classes and are judged on {about['val_images']:,}. "
        f"{about['done']} of {about['stages']} stages done{failed}."
    )


def _measures(summary: Mapping[str, Mapping[str, Spread]], names: Mapping[str, str]) -> str:
    lines = [
        (row, *(_cell(figures.get(name)) for name in names)) for row, figures in summary.items()
    ]
    headers = ("objective", *(f"{title}, %" for title in names.values()))
    return render_table(headers, lines)


def _cost(summary: Mapping[str, Mapping[str, Spread]]) -> str:
    def number(figures: Mapping[str, Spread], name: str, text: str, scale: float = 1.0) -> str:
        return text.format(figures[name].mean * scale) if name in figures else _NONE

    lines = [
        (
            row,
            number(figures, "pretraining/images_seen", "{:,.0f}"),
            number(figures, "backbone/madds_of_training", "{:,.0f} M", 1e-6),
            number(figures, "pretraining/seconds_per_image", "{:.1f} ms", 1e3),
            number(figures, "pretraining/seconds", "{:.1f} min", 1 / 60),
        )
        for row, figures in summary.items()
    ]
    headers = (
        "objective",
        "images seen",
        "encoder multiply-adds an image",
        "time an image",
        "time of all steps",
    )
    return render_table(headers, lines)


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return _NONE
    if math.isnan(spread.deviation):
        return f"{spread.mean:.2f} (one seed)"
    return f"{spread.mean:.2f} ± {spread.deviation:.2f} ({len(spread.values)})"


def _explain(
    summary: Mapping[str, Mapping[str, Spread]],
    results: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> str:
    found = {one["figures"].get("recalibrated_images") for one in results}
    counts = sorted(count for count in found if count)
    anew = " or ".join(f"{count:,}" for count in counts)
    errors = [
        spread.standard_error
        for figures in summary.values()
        for spread in figures.values()
        if not math.isnan(spread.standard_error)
    ]
    text = "Mean ± standard deviation over seeds (their number)."
    if anew:
        text += f" BatchNorm's statistics are estimated anew on {anew} whole training images."
    if errors:
        bounds = dict.fromkeys((f"{min(errors):.2f}", f"{max(errors):.2f}"))
        text += (
            f" The accuracies' binomial standard error over the {about['val_images']:,} images is "
            f"{' to '.join(bounds)} points; they are the same images for all: "
            "differences of that size are noise, however small the spread over seeds."
        )
    return text
