# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The results of a comparison: mean and spread over seeds, as JSON, Markdown and a chart."""

import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure
from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]
from torch.utils.flop_counter import FlopCounterMode

from qbheat_det.analysis.plotting import COLORS, QUIET, chart_image, start_figure, themed
from qbheat_det.analysis.run import read_metrics
from qbheat_det.checkpoint import info_of
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import to_json
from qbheat_det.core.files import write_atomically
from qbheat_det.data import DataError, build_mapper, preserved_randomness
from qbheat_det.engine.run_record import find_commit, list_versions
from qbheat_det.engine.trainer import Trainer

from .objectives import RANDOM
from .plan import DETECTORS, WEIGHTS, Comparison, Row

_DETECTOR_TITLES = {"retinanet": "RetinaNet", "mf-dec-211": "MF-Dec-211"}
_COSTS = {  # measure: header, format, scale
    "images_seen": ("images seen", "{:,.0f}", 1.0),
    "flops": ("multiply-adds an image", "{:,.0f} M", 0.5e-6),
    "seconds_per_image": ("time an image", "{:.1f} ms", 1e3),
    "seconds": ("time of all steps", "{:.1f} min", 1 / 60),
}
_COST_NOTE = (
    "Multiply-adds are those of the whole model in one forward pass of training for an image of "
    "the batch, counted by PyTorch (quarters, views and a momentum encoder as they are). Seconds "
    "are medians of the logged steps, with whatever else ran beside them."
)


@dataclass(frozen=True)
class Spread:
    """One measure over seeds.

    Attributes:
        mean: over the seeds.
        deviation: standard deviation of one seed (n - 1); nan for a single one.
        values: by seed.
    """

    mean: float
    deviation: float
    values: Mapping[int, float]


def summarize(values: Mapping[int, float]) -> Spread:
    """Returns mean and spread of a measure, by seed; at least one."""
    numbers = list(values.values())
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return Spread(statistics.fmean(numbers), deviation, dict(values))


def write_report(comparison: Comparison, rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """Writes ``comparison.json``, ``.md``, ``.svg`` and ``.png``; returns the tables.

    Raises:
        UserError: a file cannot be written.
    """
    measured = {(row.objective.name, row.seed): measure_row(comparison, row) for row in rows}
    names = [objective.name for objective in comparison.objectives]
    titles = dict.fromkeys(title for own in measured.values() for title in own)
    summary: dict[str, dict[str, Spread]] = {name: {} for name in names}
    for name in names:
        for title in titles:
            values = {seed: own[title] for (other, seed), own in measured.items()
                      if other == name and title in own}  # fmt: skip
            if values:
                summary[name][title] = summarize(values)
    probe_rows = [entry for row in rows for entry in _read_probe_rows(row)]
    settings = [content["setting"] for row in rows if (content := _read_probes(row))]
    about = {
        "objectives": {one.name: one.config_file for one in comparison.objectives},
        "images": {name: len(records) for name, records in comparison.images.items()},
        **{key: getattr(comparison, key) for key in ("seeds", "epochs", "opts", "detector_opts")},
        "hardware": _describe_hardware(),
        "commit": find_commit(),
        "versions": list_versions(),
    }
    content = {
        "about": about,
        "setting": settings[0] if settings else None,
        "rows": probe_rows,  # as tools/probe_backbone.py writes them, for the figure "probes"
        "summary": {name: {k: asdict(v) for k, v in own.items()} for name, own in summary.items()},
        "failed": failed,
    }
    text = render_tables(comparison, summary, failed)
    files = {"json": json.dumps(to_json(content), indent=1).encode(), "md": text.encode()}
    if set(titles) - set(_COSTS):
        for format in ("svg", "png"):
            files[format] = chart_image(plot_comparison(summary), format=format).content
    for suffix, data in files.items():
        path = comparison.output_dir / f"comparison.{suffix}"
        write_atomically(path, lambda stream, data=data: stream.write(data))  # type: ignore[misc]
    return text


def measure_row(comparison: Comparison, row: Row) -> dict[str, float]:
    """Returns what the finished jobs of a row measured, by title: percent, seconds and counts."""
    done = {job.stage for job in row.jobs if job.record_file.is_file()}
    found: dict[str, float] = {}
    for entry in _read_probe_rows(row) if "probes" in done else ():
        if entry["probe"] in comparison.probes and entry["top1"] is not None:
            suffix = "" if entry["recalibrated"] else ", BN as trained"
            found[{"knn": "kNN"}.get(entry["probe"], entry["probe"]) + suffix] = entry["top1"]
    for detector in DETECTORS.keys() & done:
        # Metrics that are undefined are not logged: without predictions AP is 0, not missing.
        folder = row.folder / detector
        info = info_of(str(folder / WEIGHTS))
        last = [record for record in _read_log(folder) if "bbox/AP" in record
                and record["iteration"] >= (info.iteration if info else 0)]  # fmt: skip
        for key in ("AP", "AP50"):
            title = f"{_DETECTOR_TITLES[detector]} {key}"
            found[title] = last[-1].get(f"bbox/{key}", 0.0) if last else 0.0
    if "pretraining" in done:
        found |= _measure_cost(comparison, row)
    return found


def render_tables(
    comparison: Comparison,
    summary: Mapping[str, Mapping[str, Spread]],
    failed: Mapping[str, str],
) -> str:
    """Returns the tables of results and costs in Markdown."""
    images = {name: len(records) for name, records in comparison.images.items()}
    titles = [title for title in dict.fromkeys(k for own in summary.values() for k in own)
              if title not in _COSTS]  # fmt: skip
    results = [[name, *(_format(own.get(title)) for title in titles)]
               for name, own in summary.items()]  # fmt: skip
    costs = [
        [name, *(text.format(own[key].mean * scale) if key in own else "-"
                 for key, (_, text, scale) in _COSTS.items())]
        for name, own in summary.items()
    ]  # fmt: skip
    headers = ["objective", *(f"{title}, %" for title in titles)]
    share = [spread.mean / 100 for own in summary.values() for title, spread in own.items()
             if title not in _COSTS and "AP" not in title]  # fmt: skip
    errors = [100 * math.sqrt(p * (1 - p) / images["val"]) for p in share]
    noise = (
        f" The binomial standard error of an accuracy over these {images['val']:,} images is "
        f"{min(errors):.2f} to {max(errors):.2f} points; all rows have the same images, so "
        "differences of that size are noise, however small the spread over seeds."
    ) if errors else ""  # fmt: skip
    return "\n\n".join([
        "# Objectives of pre-training, one frozen encoder each",
        f"{comparison.epochs:g} epochs of {images['pretraining']:,} images; seeds "
        f"{', '.join(map(str, comparison.seeds))}. Probes are trained on {images['train']:,} "
        f"images and classify {images['val']:,}."
        + (f" Failed: {', '.join(failed)}." if failed else ""),
        tabulate(results, headers, tablefmt="github", disable_numparse=True),
        "Mean ± standard deviation over seeds (their number). BatchNorm's statistics are estimated "
        f"on {comparison.num_recalibrated:,} whole training images, unless a column says "
        f"otherwise.{noise}",
        "## Cost of pre-training",
        tabulate(costs, ["objective", *(header for header, _, _ in _COSTS.values())],
                 tablefmt="github", disable_numparse=True),
        _COST_NOTE,
    ]) + "\n"  # fmt: skip


@themed
def plot_comparison(summary: Mapping[str, Mapping[str, Spread]]) -> MplFigure:
    """Draws a panel for each measure: mean, standard deviation over seeds, and single seeds.

    The random encoder is a dashed line through each panel.
    """
    titles = [title for title in dict.fromkeys(k for own in summary.values() for k in own)
              if title not in _COSTS and not title.endswith("as trained")]  # fmt: skip
    columns = min(3, len(titles))
    rows = -(-len(titles) // columns)
    height = rows * (0.9 + 0.32 * len(summary))
    figure = start_figure(height=height, width=1.6 + 3.2 * columns)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axes, title in zip(panels, titles, strict=False):
        _draw_measure(axes, {name: own.get(title) for name, own in summary.items()})
        axes.set_title(f"{title}, %")
    for axes in panels[len(titles) :]:
        axes.set_axis_off()
    return figure


def _draw_measure(axes: Axes, spreads: Mapping[str, Spread | None]) -> None:
    for index, (name, spread) in enumerate(spreads.items()):
        if spread is None:
            continue
        color = QUIET if name == RANDOM else COLORS[0]
        if name == RANDOM:
            axes.axvline(spread.mean, color=color, lw=1.2, ls="--")
        error = None if math.isnan(spread.deviation) else spread.deviation
        axes.errorbar(spread.mean, index, xerr=error, fmt="o", color=color, ms=6, capsize=3)
        values = list(spread.values.values())
        axes.plot(values, [index + 0.22] * len(values), "o", color=color, ms=2.5, alpha=0.7)
    axes.set_yticks(range(len(spreads)), list(spreads))
    axes.set_ylim(len(spreads) - 0.5, -0.5)


def count_training_flops(cfg: CfgNode, records: Sequence[dict[str, Any]]) -> float:
    """Returns the floating-point operations of a model's forward pass in training, per image.

    Args:
        cfg: of the objective; the model is built on the CPU and thrown away.
        records: images of training, with labels if the objective needs them.

    Raises:
        UserError: no image can be read.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    mapper = build_mapper(cfg, is_train=True)
    batch: list[Any] = []
    with preserved_randomness():
        for record in records[: 4 * cfg.SOLVER.IMS_PER_BATCH]:
            entry = mapper(dict(record))
            batch += [] if entry is None or isinstance(entry, DataError) else [entry]
        if not batch:
            raise UserError("no training image can be read")
        # A queue of keys takes complete batches.
        batch = [batch[i % len(batch)] for i in range(cfg.SOLVER.IMS_PER_BATCH)]
        model = Trainer.build_model(cfg).train()
        with EventStorage(0), FlopCounterMode(display=False) as counter:
            model(batch)
    return counter.get_total_flops() / len(batch)


def _measure_cost(comparison: Comparison, row: Row) -> dict[str, float]:
    folder = row.weights.parent
    info = info_of(str(row.weights))
    cfg = load_config(folder / "config.yaml")
    batch = cfg.SOLVER.IMS_PER_BATCH
    found = {"images_seen": float((info.iteration + 1 if info else 0) * batch)}
    records = [record for record in _read_log(folder) if "time" in record]
    if records:
        ends = [record["iteration"] + 1 for record in records]
        steps = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        times = [float(record["time"]) for record in records]
        found["seconds"] = sum(t * n for t, n in zip(times, steps, strict=True))
        found["seconds_per_image"] = statistics.median(times) / batch
    cache = row.folder.parent / "flops.json"
    if not cache.is_file():
        flops = count_training_flops(cfg, comparison.images["train"])
        write_atomically(cache, lambda stream: stream.write(json.dumps(flops).encode()))
    return found | {"flops": float(json.loads(cache.read_bytes()))}


def _read_probes(row: Row) -> dict[str, Any] | None:
    path = row.folder / "probes" / "rows.json"
    return dict(json.loads(path.read_bytes())) if path.is_file() else None


def _read_probe_rows(row: Row) -> list[dict[str, Any]]:
    content = _read_probes(row) or {"rows": []}
    return [{**entry, "series": row.objective.name} for entry in content["rows"]]


def _read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.json"
    return read_metrics(path) if path.is_file() else []


def _format(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if math.isnan(spread.deviation):
        return f"{spread.mean:.2f} (one seed)"
    return f"{spread.mean:.2f} ± {spread.deviation:.2f} ({len(spread.values)})"


def _describe_hardware() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "gpu": gpu}
