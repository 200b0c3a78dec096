# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What is known of a config's datasets, as text for a terminal and as an illustrated page."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_image_to_rgb
from matplotlib.figure import Figure as MplFigure
from numpy.typing import NDArray
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Image, Table
from qbheat_det.data import build_mapper, preserved_randomness, seed_place
from qbheat_det.data.errors import DataError

from .box_drawing import draw_instances
from .dataset_statistics import DatasetStatistics
from .datasets import Inspection
from .page import Fact, Page, Section
from .plotting import INK, chart_image, start_chart, themed, to_text, to_texts

_TINY_SIDE = 8  # pixels at the network's input: one cell of the finest map of most heads
_CLASSES_SHOWN = 40
_ERRORS_SHOWN, _ERRORS_ON_PAGE = 10, 2000  # of a kind on the terminal, and in all
_BINS = 40


@dataclass(frozen=True)
class DatasetReport:
    """The content of both reports.

    Attributes:
        title: of the page.
        inspections: of each dataset, training sets first.
        errors: of all datasets, and of their comparison.
        warnings: likewise.
        cfg: decides how images are resized and augmented.
    """

    title: str
    inspections: Sequence[Inspection]
    errors: Sequence[DataError]
    warnings: Sequence[str]
    cfg: CfgNode

    @property
    def statistics(self) -> dict[str, DatasetStatistics]:
        return {one.source.name: one.statistics for one in self.inspections}


def format_report(report: DatasetReport) -> str:
    """Returns the report as text: statistics, classes, warnings, errors."""
    table = _tabulate(report)
    counts = _count_classes(report)
    names = list(next(iter(counts.values()), {}))[:_CLASSES_SHOWN]
    rows = [(name, *(own[name] for own in counts.values())) for name in names]
    blocks = [
        report.title,
        tabulate(table.rows, table.header, tablefmt="plain", disable_numparse=True),
        tabulate(rows, ("class", *counts), tablefmt="plain", intfmt=","),
        "\n".join(f"warning: {text}" for text in report.warnings),
        "\n".join(_format_errors(report.errors)),
    ]
    return "\n\n".join(block for block in blocks if block)


def build_page(report: DatasetReport, samples: Sequence[Image]) -> Page:
    """Returns the page; ``samples`` are training images as the model sees them."""
    sets = report.statistics
    sections = []
    if report.errors:
        sections.append(
            Section(
                f"Errors ({len(report.errors):,})",
                ["Each stops training, or silently spoils what is learned or measured."],
                code=[error.message for error in report.errors[:_ERRORS_ON_PAGE]],
            )
        )
    if report.warnings:
        sections.append(Section("Warnings", report.warnings))
    sections.append(Section("Statistics", table=_tabulate(report)))
    if samples:
        text = (
            "Random images after the mapper of the config: resized, flipped and cropped as in "
            "training, with the boxes that are left, in the size of the network's input."
        )
        sections.append(Section("Training images", [text], samples))
    if any(one.boxes.size for one in sets.values()):
        caption = "Boxes of each class, as a share of their dataset."
        images = [chart_image(plot_class_counts(_count_classes(report)), caption=caption)]
        images += [
            chart_image(plot_distribution({name: measure(one) for name, one in sets.items()},
                                          label=label, log=log), caption=label)
            for label, (log, measure) in _MEASURES.items()
        ]  # fmt: skip
        sections.append(Section("Boxes", images=images))
    return Page(
        title=report.title,
        lead="What the annotations contain, what the model sees of it, and what is wrong with it.",
        facts=[
            Fact(f"{sum(len(one.image_sizes) for one in sets.values()):,}", "Images"),
            Fact(f"{sum(len(one.boxes) for one in sets.values()):,}", "Boxes"),
            Fact(f"{max(len(one.class_names) for one in sets.values()):,}", "Classes"),
            Fact(f"{len(report.errors):,}", "Errors"),
            Fact(f"{len(report.warnings):,}", "Warnings"),
        ],
        sections=sections,
        footer="Written by tools/inspect_dataset.py of qbheat_det.",
    )


def draw_samples(report: DatasetReport, number: int) -> list[Image]:
    """Draws random images of the first dataset through the config's training mapper.

    Images without boxes, and those that cannot be read, are passed over. ``SEED`` decides which
    images are drawn and how each is augmented.
    """
    cfg, first = report.cfg, report.inspections[0]
    seed = max(cfg.SEED, 0)
    records = [record for record in first.records if _count_objects(record)]
    mapper = build_mapper(cfg, is_train=True) if number and records else None
    images: list[Image] = []
    for position, index in enumerate(np.random.default_rng(seed).permutation(len(records))):
        if mapper is None or len(images) == number:
            break
        record = records[index]
        try:
            with preserved_randomness():
                seed_place(seed, position)
                mapped = mapper(record)
        except UserError:
            continue
        if not isinstance(mapped, dict):
            continue
        pixels = convert_image_to_rgb(mapped["image"].permute(1, 2, 0).numpy(), cfg.INPUT.FORMAT)
        names, instances = first.statistics.class_names, mapped["instances"]
        height, width = pixels.shape[:2]
        caption = (
            f"{Path(record['file_name']).name} (image id {record.get('image_id')}): "
            f"{width} x {height}, {len(instances)} of {_count_objects(record)} boxes"
        )
        drawn = draw_instances(np.ascontiguousarray(pixels), instances, names)
        images.append(Image.from_rgb(drawn, alt=caption, caption=caption, quality=85))
    return images


@themed
def plot_class_counts(counts: Mapping[str, Mapping[str, int]]) -> MplFigure:
    """Draws a bar for each class and dataset, ``counts[dataset][class]``, the first on top.

    A bar is the share of its dataset, which makes datasets of different sizes comparable.
    """
    names = list(dict.fromkeys(name for own in counts.values() for name in own))
    figure, axes = start_chart(height=max(1.8, 0.9 + (0.14 + 0.14 * len(counts)) * len(names)))
    height = 0.8 / len(counts)
    for index, (dataset, own) in enumerate(counts.items()):
        total = max(sum(own.values()), 1)
        rows = np.arange(len(names)) - 0.4 + (index + 0.5) * height
        shares = [100 * own.get(name, 0) / total for name in names]
        bars = axes.barh(rows, shares, height=0.9 * height, label=to_text(dataset))
        axes.bar_label(bars, [f"{own.get(name, 0):,}" for name in names], fontsize=8, color=INK,
                       padding=2)  # fmt: skip
    axes.set_yticks(range(len(names)), to_texts(names, longest=32))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel("% of the boxes")
    if len(counts) > 1:
        axes.legend()
    return figure


@themed
def plot_distribution(
    values: Mapping[str, NDArray[Any]], *, label: str, log: bool = False
) -> MplFigure:
    """Draws a histogram of each dataset in percent, all over the same bins.

    Args:
        values: by dataset; positive with ``log``.
        label: of the values.
        log: whether the bins are equal in the logarithm.
    """
    values = {name: own for name, own in values.items() if len(own)}
    joined = np.concatenate(list(values.values())).astype(np.float64)
    edges = np.histogram_bin_edges(np.log(joined) if log else joined, _BINS)
    edges = np.exp(edges) if log else edges
    edges[0], edges[-1] = min(edges[0], joined.min()), max(edges[-1], joined.max())  # rounding
    figure, axes = start_chart(height=2.6)
    for name, own in values.items():
        weights = np.full(len(own), 100 / len(own))
        axes.hist(
            own, edges.tolist(), weights=weights, histtype="step", lw=1.8, label=to_text(name)
        )
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(label)
    axes.set_ylabel("%")
    if len(values) > 1:
        axes.legend()
    return figure


_MEASURES: Mapping[str, tuple[bool, Callable[[DatasetStatistics], NDArray[Any]]]] = {
    "Side of a square with the box's area (px)": (True, lambda s: s.sides),
    "The same as a share of the image's (%)": (False, lambda s: 100 * s.relative_sides),
    "Width of a box by its height": (True, lambda s: s.aspect_ratios),
    "Boxes in an image": (False, lambda s: s.boxes_per_image),
}


def _tabulate(report: DatasetReport) -> Table:
    size = report.cfg.INPUT
    at_test = size.MIN_SIZE_TEST, size.MAX_SIZE_TEST
    at_train = min(size.MIN_SIZE_TRAIN), size.MAX_SIZE_TRAIN

    def count_tiny(s: DatasetStatistics, sizes: tuple[int, int]) -> str:
        return _percent(int((s.short_sides_at_input(*sizes) < _TINY_SIDE).sum()), len(s.boxes))

    def name_tiny(when: str, sizes: tuple[int, int]) -> str:
        return f"below {_TINY_SIDE} px, {when} ({sizes[0] or 'no resize'}, ≤ {sizes[1]})"

    rows: dict[str, Callable[[DatasetStatistics], str]] = {
        "images": lambda s: f"{len(s.image_sizes):,}",
        "images without boxes": lambda s: f"{(s.boxes_per_image == 0).sum():,}",
        "image size, shorter side": lambda s: _quantiles(s.image_sizes.min(axis=1), "{:.0f}"),
        "boxes": lambda s: f"{len(s.boxes):,}",
        "crowd regions": lambda s: f"{s.num_crowds:,}",
        "boxes in an image": lambda s: _quantiles(s.boxes_per_image, "{:.0f}"),
        "box size (px)": lambda s: _quantiles(s.sides, "{:.0f}"),
        "box size (share of image)": lambda s: _quantiles(100 * s.relative_sides, "{:.1f} %"),
        "width : height of a box": lambda s: _quantiles(s.aspect_ratios, "{:.2f}"),
        "small / medium / large": lambda s: " / ".join(
            _percent(n, len(s.boxes)) for n in s.count_sizes()
        ),
        name_tiny("in evaluation", at_test): lambda s: count_tiny(s, at_test),
        name_tiny("in training at least", at_train): lambda s: count_tiny(s, at_train),
    }
    sets = report.statistics
    lines = [[name, *(cell(one) for one in sets.values())] for name, cell in rows.items()]
    return Table(("median (5 % to 95 %)", *sets), lines)


def _quantiles(values: NDArray[Any], form: str) -> str:
    if not len(values):
        return "none"
    low, middle, high = (form.format(value) for value in np.quantile(values, (0.05, 0.5, 0.95)))
    return f"{middle} ({low} to {high})"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def _count_classes(report: DatasetReport) -> dict[str, dict[str, int]]:
    """Returns boxes by dataset and class, the most frequent class first."""
    counts: dict[str, dict[str, int]] = {}
    total: dict[str, int] = defaultdict(int)
    for dataset, one in report.statistics.items():
        own = counts.setdefault(dataset, defaultdict(int))
        for name, number in zip(one.class_names, one.boxes_per_class.tolist(), strict=True):
            own[name] += number
            total[name] += number
    order = sorted(total, key=lambda name: -total[name])
    return {dataset: {name: own[name] for name in order} for dataset, own in counts.items()}


def _format_errors(errors: Sequence[DataError]) -> Iterator[str]:
    by_kind: dict[str, list[DataError]] = defaultdict(list)
    for error in errors:
        by_kind[error.kind].append(error)
    yield f"{len(errors):,} errors" if errors else "No errors."
    for kind, own in by_kind.items():
        yield f"  {kind}: {len(own):,}"
        yield from (f"    {error.message}" for error in own[:_ERRORS_SHOWN])
        if len(own) > _ERRORS_SHOWN:
            yield f"    and {len(own) - _ERRORS_SHOWN:,} more"


def _count_objects(record: Mapping[str, Any]) -> int:
    return sum(not a.get("iscrowd", 0) for a in record.get("annotations", ()))
