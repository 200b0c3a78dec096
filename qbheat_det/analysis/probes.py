# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "probes": accuracies of probes on frozen backbones.

Accuracies are drawn by decoder (Fig. 8 of the QB-Heat paper) and by images seen (Fig. 6). They are
read from the result files of tools/probe_backbone.py and tools/compare_pretraining.py.
"""

import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import Figure, NotApplicable, Table, register_figure
from qbheat_det.probing import parse_transformer

from . import plotting
from .run import FigureOptions, Run, run_each

_Key = TypeVar("_Key", bound=Hashable)
_SPREAD = 0.5  # width over which the points of all series are spread, relative to a tick distance
_EXPLANATION = (
    "Top-1 of decoders trained on the frozen backbone, averaged over seeds. Bars are one standard "
    "error over images. Charts show recalibrated BatchNorm statistics if there are any, and random "
    "backbones with both; the table has all results.",
)


class Decoder(NamedTuple):
    """kNN (``power`` 0), a linear classifier (1), or tran-k (2) with depth k and a width."""

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
    """The result of one probe on one backbone: ``top1`` and its standard ``error`` in percent.

    A series consists of the checkpoints of a run, the seeds of an objective, or all random
    backbones. ``images_seen`` is 0 for random backbones and None if unknown. ``recalibrated`` means
    that BatchNorm statistics were estimated on whole images.
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
    """Draws results of probes. Skips files whose probes used other images than the first file."""
    tasks: list[str] = []

    def read(run: Run) -> tuple[dict[str, Any], list[ProbeResult]]:
        if run.probe_file is None:
            raise NotApplicable(f"'{run.label}' has no probes.json: use qbheat probe --json")
        setting, results = read_probes(run.probe_file)
        tasks.append(json.dumps([setting.get(key) for key in ("contents", "num_classes")]))
        if tasks[-1] != tasks[0]:
            raise NotApplicable(f"'{run.label}' was probed on other images")
        return setting, results

    files = run_each(runs, read, nothing="no results of probes")
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
    return files.draw("probes", title, _EXPLANATION, images, table, runs=data)


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
    """Returns the recalibrated results of each series, or all results if none is recalibrated.

    Random backbones keep results with and without recalibration, as separate series, because
    either of them may be higher.
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
    """Draws mean top-1 by decoder, for the backbones of each series that saw the most images."""
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
    """Draws top-1 over images seen, with one chart per decoder and one line per series."""
    known = [result for result in results if result.images_seen is not None]
    names = list(dict.fromkeys(result.series for result in known))
    styles = dict(zip(names, plotting.list_styles(len(names)), strict=True))
    groups = _group(known, lambda result: result.decoder)
    rows = max(1, -(-len(groups) // 2))
    figure = plotting.start_figure(height=3 * rows, width=1 + 3.7 * min(2, len(groups)))
    for index, decoder in enumerate(sorted(groups), 1):
        axes = figure.add_subplot(rows, min(2, len(groups)), index)
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
    plotting.add_legend(figure, *figure.axes)
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
    checkpoints: dict[Path, dict[str, Any]] = {}  # by folder: images seen by digest
    for row in content["rows"]:
        if row["images_seen"] != 0:
            own = checkpoints.setdefault(Path(row["backbone"]).parent, {})
            own[row["digest"]] = row["images_seen"]
    found = []
    for row in content["rows"]:
        path, seen = Path(row["backbone"]), row["images_seen"]
        numbers = list(checkpoints.get(path.parent, {}).values())
        # Files in a folder are checkpoints of one run if their numbers of images seen differ.
        is_run = len(set(numbers)) == len(numbers) and (None not in numbers or len(numbers) == 1)
        series = "random" if seen == 0 else str(path.parent if is_run else path.with_suffix(""))
        decoder = Decoder(int(row["probe"] == "linear"))
        depth, width = parse_transformer(row["probe"])
        if depth:
            decoder = Decoder(2, depth, width or int(content["setting"]["tran"]["width"]))
        if row["top1"] is not None:
            found.append(
                ProbeResult(
                    series=row.get("series", series),
                    backbone=str(path),
                    images_seen=seen,
                    recalibrated=bool(row["recalibrated"]),
                    decoder=decoder,
                    top1=float(row["top1"]),
                    error=float(row["top1_standard_error"] or 0.0),
                )
            )
    return found
