# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "probes": what decoders of rising power find in frozen backbones."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from qbheat_det.analysis.charts import Theme
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.probe_charts import plot_probes
from qbheat_det.analysis.probe_comparison_charts import plot_by_decoder, plot_by_images
from qbheat_det.analysis.probe_results import (
    Decoder,
    Point,
    ProbeResult,
    choose_statistics,
    list_decoders,
    place_by_decoder,
    place_by_images,
)

from .options import SightOptions
from .probe_files import FILES, ProbeFile, read_probes
from .refusal import NothingToSee
from .side_by_side import look_at_each
from .subject import Subject

_HOW_TO_READ = (
    "Top-1 of decoders that were trained on the frozen backbone, from nearest neighbours and a "
    "linear classifier to transformer blocks of rising width: backbones that are alike under a "
    "weak decoder may not be under a strong one (Fig. 8 of the paper). Bars are one standard error "
    "over the images classified; of several seeds the mean is drawn, with the bar of one.",
    "Backbones are drawn with BatchNorm's statistics of whole images where there are such, random "
    "ones also as they were initialised; the table has all. A line over images seen joins "
    "checkpoints of one run, taken before its learning rate had come to its end but for the last; "
    "runs of other lengths, as Fig. 6 of the paper compares, are points of their own.",
)
_NO_BREAK = "\N{NO-BREAK SPACE}"
_SAME_SETTING = ("feature", "size", "seed", "knn", "linear", "tran")
Results = Sequence[ProbeResult]


def see_probes(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws the figures of probes that files hold, in common charts where the images are the same.

    Nothing is probed here. What holds no figures is named with its reason.

    Raises:
        NothingToSee: there are no figures of probes.
        UserError: nor is there anything but files that cannot be read.
    """
    looked = look_at_each(
        subjects, _read_figures, nothing="no figures of probes", needs_weights=False
    )
    found = looked.found
    results = _name_series(found)
    tasks: dict[str, dict[str, ProbeFile]] = {}
    for label, file in found.items():
        tasks.setdefault(file.task, {})[label] = file
    pictures: dict[str, Picture] = {}
    for number, files in enumerate(tasks.values(), start=1):
        ending, before = (f"_{number}", f"Images {number}: ") if len(tasks) > 1 else ("", "")
        drawn = _draw([result for label in files for result in results[label]], before)
        pictures |= {f"{name}{ending}": picture for name, picture in drawn.items()}
    return Exhibit(
        "probes",
        "Probes of frozen backbones",
        [*_explain(list(tasks.values())), *looked.explain()],
        pictures,
        {"runs": _collect(found, results), "left_out": looked.left_out},
        _tabulate(results),
    )


def _read_figures(subject: Subject) -> ProbeFile:
    if subject.figures is None:
        raise NothingToSee(
            f"'{subject.label}' has no {FILES[0]}, which tools/probe_backbone.py writes with "
            f"--json OUTPUT_DIR/{FILES[0]}"
        )
    return read_probes(subject.figures)


def _name_series(found: Mapping[str, ProbeFile]) -> dict[str, list[ProbeResult]]:
    """Names series so that no two files share one."""
    named = {}
    for label, file in found.items():
        alone = len({result.series for result in file.results}) == 1
        named[label] = [
            replace(result, series=_name(label, result.series, alone, len(found) > 1))
            for result in file.results
        ]
    return named


def _name(label: str, series: str, alone: bool, several: bool) -> str:
    if alone or not series:
        return label
    return f"{label}: {series}" if several else series


def _draw(results: Results, before: str) -> dict[str, Picture]:
    chosen = choose_statistics(results)
    by_decoder = place_by_decoder(chosen)
    pictures = {
        "decoders": Picture.from_chart(
            lambda theme: plot_by_decoder(by_decoder, theme=theme),
            alt=f"{before}Top-1 by decoder: {_tell(by_decoder)}",
            caption=f"{before}Top-1 under each decoder, by its width where it is a transformer; of "
            "a run, its last checkpoint.",
        )
    }
    trained = [result for result in chosen if result.images_seen]
    if len({result.images_seen for result in trained}) < 2:
        return pictures
    if len({result.series for result in trained}) == 1:
        widths = {result.decoder.width for result in results} - {0}
        rows = [_to_row(result, len(widths) > 1) for result in results]
        pictures["images_seen"] = Picture.from_chart(
            lambda theme: plot_probes(rows, theme=theme),
            caption=f"{before}Top-1 of {trained[0].series} against the images seen in "
            "pre-training; random backbones are level lines.",
        )
        return pictures
    for decoder in list_decoders(trained):
        pictures[f"images_seen_{_slug(decoder)}"] = _draw_lengths(
            place_by_images(chosen, decoder), decoder, list(by_decoder), before
        )
    return pictures


def _draw_lengths(
    points: Mapping[str, Mapping[int, Point]], decoder: Decoder, series: Sequence[str], before: str
) -> Picture:
    caption = f"{before}Top-1 by {decoder.title} against the images seen in pre-training."

    def plot(theme: Theme) -> bytes:
        return plot_by_images(points, title=decoder.title, series=series, theme=theme)

    ends = "; ".join(f"{name}: {list(own.values())[-1].top1:.2f} %" for name, own in points.items())
    return Picture.from_chart(plot, alt=f"{caption} {ends}", caption=caption)


def _tell(points: Mapping[str, Mapping[Decoder, Point]]) -> str:
    return "; ".join(
        f"{series} " + ", ".join(f"{d.title} {point.top1:.2f} %" for d, point in own.items())
        for series, own in points.items()
    )


def _to_row(result: ProbeResult, with_width: bool) -> dict[str, Any]:
    return {
        "images_seen": result.images_seen,
        "recalibrated": result.recalibrated,
        "probe": result.decoder.title if with_width else result.decoder.name,
        "top1": result.top1,
        "top1_standard_error": result.error,
    }


def _slug(decoder: Decoder) -> str:
    return re.sub(r"[^a-z0-9]+", "-", decoder.title.lower())


def _explain(tasks: Sequence[Mapping[str, ProbeFile]]) -> list[str]:
    paragraphs = [*_HOW_TO_READ]
    if len(tasks) > 1:
        listed = "; ".join(f"images {i} for {', '.join(files)}" for i, files in enumerate(tasks, 1))
        paragraphs.append(f"Figures of different images do not compare: {listed}.")
    for files in tasks:
        differing = [
            key for key in _SAME_SETTING
            if len({str(_drop_width(file.setting.get(key))) for file in files.values()}) > 1
        ]  # fmt: skip
        if differing:
            paragraphs.append(f"{', '.join(files)} also differ in how they were probed "
                              f"({', '.join(differing)}): the JSON has the settings.")  # fmt: skip
    return paragraphs


def _drop_width(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "width"} if isinstance(value, dict) else value


def _tabulate(results: Mapping[str, Results]) -> Table:
    everything = [result for own in results.values() for result in own]
    decoders = list_decoders(everything)
    rows: dict[tuple[str, str, bool], dict[Decoder, ProbeResult]] = {}
    for result in everything:
        key = result.series, result.backbone, result.recalibrated
        rows.setdefault(key, {})[result.decoder] = result
    lines = []
    for (series, backbone, recalibrated), own in rows.items():
        seen = next(iter(own.values())).images_seen
        cells = (own.get(decoder) for decoder in decoders)
        lines.append([
            series,
            backbone.rsplit("/", 1)[-1],
            "n/a" if seen is None else f"{seen:,}",
            "whole images" if recalibrated else "as stored",
            *("" if cell is None else _format(cell) for cell in cells),
        ])  # fmt: skip
    titles = (f"{decoder.title} (%)" for decoder in decoders)
    return Table(("Run", "backbone", "images seen", "BatchNorm", *titles), lines)


def _format(result: ProbeResult) -> str:
    return f"{result.top1:.2f} ± {result.error:.2f}".replace(" ", _NO_BREAK)


def _collect(
    found: Mapping[str, ProbeFile], results: Mapping[str, Results]
) -> Mapping[str, Mapping[str, Any]]:
    return {
        label: {
            "setting": file.setting,
            "results": [
                {**asdict(result), "decoder": result.decoder.title} for result in results[label]
            ],
        }
        for label, file in found.items()
    }
