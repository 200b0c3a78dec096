# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures "classes", confusion matrices, and "probes", accuracies of probes of frozen backbones.

Probes are drawn by decoder (Fig. 8 of the paper) and by images seen (Fig. 6), from the files of
tools/probe_backbone.py and of comparisons.
"""

import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, NotApplicable, Table, register_figure
from qbheat_det.evaluation import find_confusions
from qbheat_det.probing import depth_of, width_of

from . import plotting
from .figure import FigureOptions, run_each
from .run import Run

Counts = npt.NDArray[np.int64]
_Key = TypeVar("_Key", bound=Hashable)
_MOST_NAMED, _MOST_LISTED = 110, 30  # classes on the axes, confusions in the list
_SPREAD = 0.5  # share of a decoder's slot over which the points of all series spread
_CLASSES_EXPLANATION = (
    "Rows are true classes, columns predicted ones; the color is the share of the row. Blue cells "
    "are correct, red ones wrong. Colors exaggerate small shares.",
)
_PROBES_EXPLANATION = (
    "Top-1 of decoders trained on the frozen backbone, averaged over seeds. Bars are one standard "
    "error over images. Charts show recalibrated BatchNorm statistics if there are any, and random "
    "backbones with both; the table has all results.",
)


@register_figure("classes")
def draw_classes(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws the confusion matrix of each classifier's last evaluation."""
    nothing = "no confusion matrix"
    results = run_each(runs, _read_last_confusions, nothing=nothing, needs_weights=False)
    images, rows, data = {}, [], {}
    for number, (label, (names, counts)) in enumerate(results.found.items(), start=1):
        top1 = f"{100 * counts.trace() / max(1, counts.sum()):.2f}"
        title = f"{label}: top-1 {top1} %"
        name = f"confusion_{number}" if len(results.found) > 1 else "confusion"
        chart = plot_confusion(counts, names, title=title)
        images[name] = plotting.chart_image(chart, caption=title)
        rows.append((label, top1, f"{counts.sum():,}"))
        data[label] = {"classes": names, "matrix": counts}
    table = Table(("Run", "top-1 (%)", "images"), rows)
    text = _CLASSES_EXPLANATION
    return results.draw("classes", "Confusion of classes", text, images, table, runs=data)


def read_confusions(classification_json: Path) -> tuple[list[str], Counts]:
    """Reads class names and counts (K, K) from a file of ``ClassificationEvaluator``."""
    content = json.loads(classification_json.read_bytes())
    names = [entry["name"] for entry in content["classes"]]
    index = {name: k for k, name in enumerate(names)}
    correct = [entry["images"] * (entry["top1"] or 0.0) / 100 for entry in content["classes"]]
    counts = np.diag(np.round(correct).astype(np.int64))
    for pair in content["confusions"]:
        counts[index[pair["class"]], index[pair["taken_for"]]] = pair["images"]
    return names, counts


@plotting.themed
def plot_confusion(
    counts: Counts, class_names: Sequence[str], *, title: str = "", unit: str = "images"
) -> MplFigure:
    """Draws a confusion matrix (K, K) beside a list of the most frequent confusions."""
    number = len(class_names)
    printable = ["".join(c if c.isprintable() else "?" for c in name) for name in class_names]
    names = [plotting.to_text(name, longest=26) for name in printable]
    side = float(np.clip(0.11 * number, 3.6, 9.0))
    figure = plotting.start_figure(height=side + 1.8, width=side + 6.5)
    axes, text = figure.subplots(1, 2, width_ratios=(side + 1.8, 4.7))
    shares = counts / counts.sum(axis=1).clip(min=1)[:, None]
    strength = np.sqrt(shares)[..., None]
    wrong, correct = np.array([0.84, 0.27, 0.31]), np.array([0.12, 0.44, 0.92])
    color = np.where(np.eye(number, dtype=bool)[..., None], correct, wrong)
    axes.imshow(1 - strength * (1 - color))
    axes.grid(visible=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class")
    axes.set_title(plotting.to_text(title, longest=80))
    if number <= _MOST_NAMED:
        size = 8 if number <= 60 else 5
        axes.set_xticks(range(number), names, rotation=90, fontsize=size)
        axes.set_yticks(range(number), names, fontsize=size)
    total = int(counts.sum())
    lines = [f"Most confused ({total - counts.trace():,} of {total:,} {unit} are wrong)", ""]
    for i, j, count in find_confusions(counts)[: min(_MOST_LISTED, int(5 * side))]:
        lines.append(f"{names[i]} → {names[j]}:  {count:,} of {counts[i].sum():,}")
    text.set_axis_off()
    text.text(0, 1, "\n".join(lines), fontsize=8, va="top", linespacing=1.5, color=plotting.INK)
    return figure


def _read_last_confusions(run: Run) -> tuple[list[str], Counts]:
    folder = run.folder or (run.checkpoint or run.path).parent
    files = list(folder.glob("inference/*/classification.json"))
    if not files:
        raise NotApplicable(f"'{run.label}' has no inference/*/classification.json")
    return read_confusions(max(files, key=lambda path: path.stat().st_mtime))


class Decoder(NamedTuple):
    """kNN (power 0), a linear classifier (1), or tran-k (2) with depth k and a width."""

    power: int
    depth: int = 0
    width: int = 0

    @property
    def name(self) -> str:
        return ("kNN", "linear", f"tran-{self.depth}")[self.power]

    @property
    def title(self) -> str:
        return f"{self.name}, width {self.width}" if self.width else self.name


@dataclass(frozen=True)
class ProbeResult:
    """One probe of one backbone: ``top1`` and its standard ``error`` in percent.

    A series is a run with its checkpoints, an objective with its seeds, or all random backbones.
    ``images_seen`` is 0 for a random backbone and None if unknown. ``recalibrated`` means BatchNorm
    statistics of whole images.
    """

    series: str
    backbone: str
    images_seen: int | None
    recalibrated: bool
    decoder: Decoder
    top1: float
    error: float


@register_figure("probes")
def draw_probes(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws results of probes on the images of the first file; leaves out results on others."""
    tasks: list[str] = []

    def read(run: Run) -> tuple[dict[str, Any], list[ProbeResult]]:
        if run.probe_file is None:
            raise NotApplicable(f"'{run.label}' has no probes.json: use qbheat probe --json")
        setting, results = read_probes(run.probe_file)
        tasks.append(json.dumps([setting.get(key) for key in ("contents", "num_classes")]))
        if tasks[-1] != tasks[0]:
            raise NotApplicable(f"'{run.label}' was probed on other images")
        return setting, results

    files = run_each(runs, read, nothing="no results of probes", needs_weights=False)
    data, everything = {}, []
    for label, (setting, found) in files.found.items():
        alone = len({result.series for result in found}) == 1
        prefix = f"{label}: " if len(files.found) > 1 else ""
        results = [replace(r, series=label if alone else prefix + r.series) for r in found]
        everything += results
        rows = [asdict(r) | {"decoder": r.decoder.title} for r in results]
        data[label] = {"setting": setting, "results": rows}
    chosen = choose_statistics(everything)
    caption = "Top-1 under each decoder; of a run, its last checkpoint."
    images = {"decoders": plotting.chart_image(plot_by_decoder(chosen), caption=caption)}
    if len({result.images_seen for result in chosen if result.images_seen}) > 1:
        caption = "Top-1 by images seen in pre-training; random backbones are level lines."
        images["images_seen"] = plotting.chart_image(plot_by_images(chosen), caption=caption)
    title, table = "Probes of frozen backbones", _tabulate(everything)
    return files.draw("probes", title, _PROBES_EXPLANATION, images, table, runs=data)


def plot_probes(content: Mapping[str, Any]) -> MplFigure:
    """Draws the content of a file of tools/probe_backbone.py as ``plot_by_images`` does."""
    return plot_by_images(choose_statistics(_parse_results(content)))


def read_probes(file: Path) -> tuple[dict[str, Any], list[ProbeResult]]:
    """Reads settings and results of ``tools/probe_backbone.py --json`` or of a comparison.

    Raises a ``UserError`` if the file cannot be read or has no results.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        setting, results = dict(content["setting"]), _parse_results(content)
        if not results:
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"'{file}' has no results of probes: {error!r}") from error
    return setting, results


def choose_statistics(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    """Returns the recalibrated results of each series, or all results if it has none.

    Random backbones keep both, in separate series, because either may be higher.
    """
    recalibrated = {result.series for result in results if result.recalibrated}
    chosen = []
    for result in results:
        if result.recalibrated or result.series not in recalibrated:
            chosen.append(result)
        elif result.images_seen == 0:
            chosen.append(replace(result, series=f"{result.series}, as initialized"))
    return chosen


@plotting.themed
def plot_by_decoder(results: Sequence[ProbeResult]) -> MplFigure:
    """Draws mean top-1 by decoder, for the backbones of each series that saw most images."""
    decoders = sorted({result.decoder for result in results})
    series = _group(results, lambda result: result.series)
    figure, axes = plotting.start_chart(height=3.2, width=5.2)
    styles = plotting.list_styles(len(series))
    for index, ((name, own), style) in enumerate(zip(series.items(), styles, strict=True)):
        most = max(result.images_seen or 0 for result in own)
        points = _average((r for r in own if (r.images_seen or 0) == most), lambda r: r.decoder)
        shift = _SPREAD * ((index + 0.5) / len(series) - 0.5)
        label = plotting.to_text(name)
        for _, same in itertools.groupby(sorted(points), key=lambda decoder: decoder.name):
            widths = list(same)
            x = [decoders.index(decoder) + shift for decoder in widths]
            y, errors = zip(*(points[decoder] for decoder in widths), strict=True)
            axes.errorbar(x, y, yerr=errors, label=label, elinewidth=1, **style)
            label = "_nolegend_"
    ticks = [f"{one.name}\n{one.width}" if one.width else one.name for one in decoders]
    axes.set_xticks(range(len(decoders)), ticks)
    axes.set_xlim(-0.5, len(decoders) - 0.5)
    axes.set_xlabel("decoder on the frozen backbone")
    _finish(axes)
    plotting.add_legend(figure, axes)
    return figure


@plotting.themed
def plot_by_images(results: Sequence[ProbeResult]) -> MplFigure:
    """Draws top-1 over images seen: one chart per decoder, one line per series."""
    known = [result for result in results if result.images_seen is not None]
    names = list(dict.fromkeys(result.series for result in known))
    styles = dict(zip(names, plotting.list_styles(len(names)), strict=True))
    groups = _group(known, lambda result: result.decoder)
    columns, rows = min(2, len(groups)) or 1, -(-len(groups) // 2) or 1
    figure = plotting.start_figure(height=3 * rows, width=1 + 3.7 * columns)
    panels = []
    for index, decoder in enumerate(sorted(groups), 1):
        axes = figure.add_subplot(rows, columns, index)
        for name, own in _group(groups[decoder], lambda result: result.series).items():
            points = _average(own, lambda result: result.images_seen)
            label, style = plotting.to_text(name), styles[name]
            if seen := sorted(number for number in points if number):
                y, errors = zip(*(points[number] for number in seen), strict=True)
                axes.errorbar(seen, y, errors, label=label, elinewidth=1, **style)
            else:
                axes.axhline(points[0][0], label=label, color=style["color"], lw=1.4, ls="--")
        axes.set_title(decoder.title)
        axes.set_xlim(left=0)
        axes.set_xlabel("images seen in pre-training")
        _finish(axes)
        panels.append(axes)
    if panels:
        most = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
        plotting.add_legend(figure, most)
    return figure


def _finish(axes: Axes) -> None:
    axes.set_ylabel("top-1 (%)")
    axes.set_ylim(0, max(1.0, 1.08 * axes.dataLim.y1))


def _group(
    results: Iterable[ProbeResult], key: Callable[[ProbeResult], _Key]
) -> dict[_Key, list[ProbeResult]]:
    groups: dict[_Key, list[ProbeResult]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def _average(
    results: Iterable[ProbeResult], key: Callable[[ProbeResult], _Key]
) -> dict[_Key, tuple[float, float]]:
    """Returns mean top-1 and mean standard error of each group."""
    groups = _group(results, key)
    return {k: (fmean(r.top1 for r in v), fmean(r.error for r in v)) for k, v in groups.items()}


def _tabulate(results: Sequence[ProbeResult]) -> Table:
    decoders = sorted({result.decoder for result in results})
    lines = []
    groups = _group(results, lambda r: (r.series, r.backbone, r.images_seen, r.recalibrated))
    for (series, backbone, seen, recalibrated), own in groups.items():
        cells = {r.decoder: f"{r.top1:.2f}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{r.error:.2f}"
                 for r in own}  # fmt: skip
        number = "n/a" if seen is None else f"{seen:,}"
        statistics = "whole images" if recalibrated else "as stored"
        start = (series, Path(backbone).name, number, statistics)
        lines.append((*start, *(cells.get(decoder, "") for decoder in decoders)))
    titles = [f"{decoder.title} (%)" for decoder in decoders]
    return Table(("Run", "backbone", "images seen", "BatchNorm", *titles), lines)


def _parse_results(content: Mapping[str, Any]) -> list[ProbeResult]:
    """Returns the results in a file's content, without those whose accuracy is nan."""
    rows, found = list(content["rows"]), []
    checkpoints: dict[Path, dict[Any, Any]] = {}  # by folder: images seen by digest
    for row in rows:
        if row["images_seen"] != 0:
            folder = Path(row["backbone"]).parent
            checkpoints.setdefault(folder, {})[row["digest"]] = row["images_seen"]
    for row in rows:
        seen, path = row["images_seen"], Path(row["backbone"])
        numbers = list(checkpoints.get(path.parent, {}).values())
        # Files of one folder that saw different numbers of images are checkpoints of one run.
        is_run = len(set(numbers)) == len(numbers) and (None not in numbers or len(numbers) == 1)
        series = str(path.parent if is_run else path.parent / path.stem) if seen != 0 else "random"
        decoder = Decoder(int(row["probe"] == "linear"))
        if depth := depth_of(row["probe"]):
            width = width_of(row["probe"]) or int(content["setting"]["tran"]["width"])
            decoder = Decoder(2, depth, width)
        if row["top1"] is not None:
            found.append(
                ProbeResult(
                    series=row.get("series", series),
                    backbone=str(row["backbone"]),
                    images_seen=None if seen is None else int(seen),
                    recalibrated=bool(row["recalibrated"]),
                    decoder=decoder,
                    top1=float(row["top1"]),
                    error=float(row["top1_standard_error"] or 0.0),
                )
            )
    return found
