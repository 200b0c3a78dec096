# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What is known of a config's datasets, as lines for a terminal and as an illustrated page."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from numpy.typing import NDArray

from qbheat_det.data.errors import DataError

from .dataset_charts import plot_counts, plot_distribution
from .dataset_inspection import Inspection
from .dataset_statistics import DatasetStatistics
from .html_report import Picture, Report, Section, SummaryFigure, Table

_SMALL_SIDE = 8  # pixels at the network's input: one cell of the finest map that most heads use
_BAR = 24
_CLASSES_SHOWN = 20
_FAULTS_SHOWN = 10  # of a kind, on a terminal
_FAULTS_ON_PAGE = 2000


@dataclass(frozen=True)
class DatasetReport:
    """All that the two forms of the report are made of.

    Attributes:
        title: what was looked at.
        inspections: of each dataset; training sets first.
        faults: of all datasets and of their comparison.
        warnings: likewise.
        cfg: says how images are resized.
    """

    title: str
    inspections: Sequence[Inspection]
    faults: Sequence[DataError]
    warnings: Sequence[str]
    cfg: CfgNode


def format_report(report: DatasetReport) -> str:
    """Returns the report as lines of text: figures, classes, warnings, faults."""
    blocks = [report.title, _align([_header(report), *_figures(report)])]
    blocks.append("\n".join(_format_classes(report)))
    if report.warnings:
        blocks.append("\n".join(["Warnings", *(f"  {text}" for text in report.warnings)]))
    blocks.append("\n".join(_format_faults(report.faults)))
    return "\n\n".join(blocks)


def describe_datasets(report: DatasetReport, samples: Sequence[Picture]) -> Report:
    """Returns the page; ``samples`` are training images as the model sees them."""
    sets = [one.statistics for one in report.inspections]
    num_faults = len(report.faults)
    kinds = Counter(fault.kind for fault in report.faults)
    sections = [
        Section(
            f"Faults ({num_faults:,})",
            paragraphs=["Each stops training, or silently spoils what it learns or measures."],
            table=Table(("Kind", "Number"), [(kind, f"{n:,}") for kind, n in kinds.items()]),
            commands=[fault.message for fault in report.faults[:_FAULTS_ON_PAGE]],
        )
        if report.faults
        else None,
        Section("Warnings", paragraphs=report.warnings) if report.warnings else None,
        Section("Figures", table=Table(_header(report), list(_figures(report)))),
        _describe_samples(samples),
        _describe_classes(report),
        _describe_boxes(report),
    ]
    return Report(
        title=report.title,
        lead="What the annotations hold, what the model will see of it, and what is wrong with it.",
        figures=[
            SummaryFigure(f"{sum(one.num_images for one in sets):,}", "Images"),
            SummaryFigure(f"{sum(one.num_boxes for one in sets):,}", "Boxes"),
            SummaryFigure(f"{max((len(one.class_names) for one in sets), default=0):,}", "Classes"),
            SummaryFigure(f"{num_faults:,}", "Faults"),
            SummaryFigure(f"{len(report.warnings):,}", "Warnings"),
        ],
        sections=[section for section in sections if section],
        footer="Written by tools/inspect_dataset.py of qbheat_det.",
    )


def _header(report: DatasetReport) -> list[str]:
    return ["", *(one.source.name for one in report.inspections)]


def _figures(report: DatasetReport) -> Iterator[list[str]]:
    """Yields the rows of the table of figures: a name, and a cell for each dataset."""
    resize = report.cfg.INPUT.MIN_SIZE_TEST, report.cfg.INPUT.MAX_SIZE_TEST
    smallest = min(report.cfg.INPUT.MIN_SIZE_TRAIN), report.cfg.INPUT.MAX_SIZE_TRAIN
    rows: dict[str, Callable[[DatasetStatistics], str]] = {
        "images": lambda s: f"{s.num_images:,}",
        "images without boxes": lambda s: f"{s.num_images_without_boxes:,}",
        "image size, most common": _most_common_size,
        "image sizes, shorter side": lambda s: _quantiles(s.image_sizes.min(axis=1), "{:.0f}"),
        "boxes": lambda s: f"{s.num_boxes:,}",
        "crowd regions": lambda s: f"{s.num_crowds:,}",
        "boxes in an image": lambda s: _quantiles(s.boxes_per_image, "{:.0f}"),
        "box size (px)": lambda s: _quantiles(s.sides, "{:.0f}"),
        "box size (share of image)": lambda s: _quantiles(100 * s.relative_sides, "{:.1f} %"),
        "width : height of a box": lambda s: _quantiles(s.aspect_ratios, "{:.2f}"),
        "small / medium / large": lambda s: " / ".join(
            _percent(n, s.num_boxes) for n in s.count_sizes()
        ),
        _input_row("in evaluation", *resize): lambda s: _count_tiny(s, *resize),
        _input_row("in training at least", *smallest): lambda s: _count_tiny(s, *smallest),
    }
    for name, cell in rows.items():
        yield [name, *(cell(one.statistics) for one in report.inspections)]


def _input_row(when: str, min_size: int, max_size: int) -> str:
    resize = f"{min_size}, ≤ {max_size}" if min_size else "no resize"
    return f"below {_SMALL_SIDE} px, {when} ({resize})"


def _count_tiny(statistics: DatasetStatistics, min_size: int, max_size: int) -> str:
    tiny = int((statistics.short_sides_at_input(min_size, max_size) < _SMALL_SIDE).sum())
    return f"{tiny:,} ({_percent(tiny, statistics.num_boxes)})"


def _most_common_size(statistics: DatasetStatistics) -> str:
    if not statistics.num_images:
        return "none"
    sizes, counts = np.unique(statistics.image_sizes, axis=0, return_counts=True)
    width, height = sizes[counts.argmax()]
    return f"{width:.0f} x {height:.0f} ({_percent(int(counts.max()), statistics.num_images)})"


def _quantiles(values: NDArray[np.float64] | NDArray[np.int64], form: str) -> str:
    if not len(values):
        return "none"
    low, middle, high = (form.format(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return f"{middle} ({low} to {high})"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("   ".join([first.ljust(widths[0]), *right]))
    return "\n".join([*lines, "a (b to c): median, and 5 % and 95 % quantiles"])


def _class_counts(report: DatasetReport) -> dict[str, dict[str, int]]:
    """Returns boxes by dataset and class, most frequent class first."""
    counts: dict[str, dict[str, int]] = {}
    total: dict[str, int] = defaultdict(int)
    for one in report.inspections:
        pairs = list(
            zip(one.statistics.class_names, one.statistics.boxes_per_class.tolist(), strict=True)
        )
        counts[one.source.name] = defaultdict(int)
        for name, number in pairs:
            counts[one.source.name][name] += number
            total[name] += number
    order = sorted(total, key=lambda name: -total[name])
    return {series: {name: values[name] for name in order} for series, values in counts.items()}


def _format_classes(report: DatasetReport) -> Iterator[str]:
    counts = _class_counts(report)
    first: Mapping[str, int] = next(iter(counts.values()), {})
    longest = max([len(name) for name in first] + [6])
    largest = max([*first.values(), 1])
    yield f"{'Classes':<{longest + 2}}  {'':{_BAR}}  " + "  ".join(f"{s:>10}" for s in counts)
    for name in list(first)[:_CLASSES_SHOWN]:
        bar = "█" * round(_BAR * first[name] / largest) or ("▏" if first[name] else "")
        numbers = "  ".join(f"{v[name]:>{max(10, len(s))},}" for s, v in counts.items())
        yield f"  {name:<{longest}}  {bar:<{_BAR}}  {numbers}"
    if len(first) > _CLASSES_SHOWN:
        yield f"  and {len(first) - _CLASSES_SHOWN} more classes, on the page"


def _format_faults(faults: Sequence[DataError]) -> Iterator[str]:
    if not faults:
        yield "No faults."
        return
    by_kind: dict[str, list[DataError]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    yield f"{len(faults):,} fault{'s' * (len(faults) > 1)}"
    for kind, alike in by_kind.items():
        yield f"  {kind}: {len(alike):,}"
        yield from (f"    {fault.message}" for fault in alike[:_FAULTS_SHOWN])
        if len(alike) > _FAULTS_SHOWN:
            yield f"    and {len(alike) - _FAULTS_SHOWN:,} more like it"


def _describe_samples(samples: Sequence[Picture]) -> Section | None:
    if not samples:
        return None
    text = (
        "Drawn at random and passed through the config's own mapper: resized, flipped and cropped "
        "as in training, with the boxes that are left. The size is that of the network's input."
    )
    return Section("As the model sees them", paragraphs=[text], pictures=samples)


def _describe_classes(report: DatasetReport) -> Section | None:
    counts = _class_counts(report)
    if not any(any(values.values()) for values in counts.values()):
        return None
    caption = "Boxes of each class, as a share of their dataset."
    return Section("Classes", pictures=[_in_both_themes(partial(plot_counts, counts), caption)])


def _describe_boxes(report: DatasetReport) -> Section | None:
    sets = {i.source.name: i.statistics for i in report.inspections if i.statistics.num_boxes}
    if not sets:
        return None
    measures: tuple[tuple[str, bool, Callable[[DatasetStatistics], NDArray[Any]]], ...] = (
        ("side of a square of the box's area (px)", True, lambda s: s.sides),
        ("the same as a share of the image's (%)", False, lambda s: 100 * s.relative_sides),
        ("width of a box by its height", True, lambda s: s.aspect_ratios),
        ("boxes in an image", False, lambda s: s.boxes_per_image),
    )
    pictures = []
    for label, log, measure in measures:
        values = {name: measure(one).tolist() for name, one in sets.items()}
        draw = partial(plot_distribution, values, label=label, log=log)
        pictures.append(_in_both_themes(draw, label.capitalize()))
    return Section("Boxes", pictures=pictures)


def _in_both_themes(draw: Callable[..., bytes], caption: str) -> Picture:
    return Picture.from_chart(lambda theme: draw(theme=theme), caption=caption)
