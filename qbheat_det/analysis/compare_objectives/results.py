# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The results of a comparison: mean and spread over seeds, as JSON and Markdown."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.analysis.run import read_metrics
from qbheat_det.checkpoint import info_of
from qbheat_det.config import load_config
from qbheat_det.core.figures import to_json
from qbheat_det.core.files import write_atomically
from qbheat_det.engine.run_record import find_commit, list_versions

from .plan import DETECTORS, WEIGHTS, Comparison, Row

_DETECTOR_TITLES = {"retinanet": "RetinaNet", "mf-dec-211": "MF-Dec-211"}
_COSTS = {  # measure: header, format, scale
    "images_seen": ("images seen", "{:,.0f}", 1.0),
    "seconds_per_image": ("time an image", "{:.1f} ms", 1e3),
    "seconds": ("time of all steps", "{:.1f} min", 1 / 60),
}


@dataclass(frozen=True)
class Spread:
    """One measure by seed: mean and standard deviation (n - 1); nan for a single one."""

    mean: float
    deviation: float
    values: Mapping[int, float]


def summarize(values: Mapping[int, float]) -> Spread:
    """Returns mean and spread of a measure, by seed; at least one."""
    numbers = list(values.values())
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return Spread(statistics.fmean(numbers), deviation, dict(values))


def write_report(comparison: Comparison, rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """Writes ``comparison.json`` and ``comparison.md``; returns the tables.

    Raises:
        UserError: a file cannot be written.
    """
    summary: dict[str, dict[str, Spread]] = {}
    measured = [(row, measure_row(comparison, row)) for row in rows]
    for title in dict.fromkeys(title for _, own in measured for title in own):
        for objective in comparison.objectives:
            values = {row.seed: own[title] for row, own in measured
                      if row.objective.name == objective.name and title in own}  # fmt: skip
            if values:
                summary.setdefault(objective.name, {})[title] = summarize(values)
    settings = [content["setting"] for row in rows if (content := _read_probes(row))]
    content = {
        "objectives": {one.name: one.config_file for one in comparison.objectives},
        "images": {name: len(records) for name, records in comparison.images.items()},
        **{key: getattr(comparison, key) for key in ("seeds", "epochs", "opts", "detector_opts")},
        "commit": find_commit(),
        "versions": list_versions(),
        "setting": settings[0] if settings else None,
        # As tools/probe_backbone.py writes them, for the figure "probes".
        "rows": [entry for row in rows for entry in _read_probe_rows(row)],
        "summary": {name: {k: asdict(v) for k, v in own.items()} for name, own in summary.items()},
        "failed": failed,
    }
    text = render_tables(comparison, summary, failed)
    files = {"json": json.dumps(to_json(content), indent=1).encode(), "md": text.encode()}
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
        found |= _measure_cost(row)
    return found


def render_tables(
    comparison: Comparison,
    summary: Mapping[str, Mapping[str, Spread]],
    failed: Mapping[str, str],
) -> str:
    """Returns the tables of results and costs in Markdown."""
    images = {name: len(records) for name, records in comparison.images.items()}
    titles = dict.fromkeys(k for own in summary.values() for k in own if k not in _COSTS)
    results = [[name, *(_format(own.get(title)) for title in titles)]
               for name, own in summary.items()]  # fmt: skip
    costs = [
        [name, *(text.format(own[key].mean * scale) if key in own else "-"
                 for key, (_, text, scale) in _COSTS.items())]
        for name, own in summary.items()
    ]  # fmt: skip
    headers = ["objective", *(f"{title}, %" for title in titles)]
    share = [own[title].mean / 100 for own in summary.values() for title in titles
             if title in own and "AP" not in title]  # fmt: skip
    errors = [100 * math.sqrt(p * (1 - p) / images["val"]) for p in share] or [0.0]
    return "\n\n".join([
        "# Objectives of pre-training, one frozen encoder each",
        f"{comparison.epochs:g} epochs of {images['pretraining']:,} images; seeds "
        f"{', '.join(map(str, comparison.seeds))}. Probes are trained on {images['train']:,} "
        f"images and classify {images['val']:,}."
        + (f" Failed: {', '.join(failed)}." if failed else ""),
        tabulate(results, headers, tablefmt="github", disable_numparse=True),
        "Mean ± standard deviation over seeds (their number). BatchNorm's statistics are estimated "
        f"on {comparison.num_recalibrated:,} whole training images, unless a column says "
        f"otherwise. The binomial standard error of an accuracy over the {images['val']:,} images "
        f"is {min(errors):.2f} to {max(errors):.2f} points.",
        "## Cost of pre-training",
        tabulate(costs, ["objective", *(header for header, _, _ in _COSTS.values())],
                 tablefmt="github", disable_numparse=True),
    ]) + "\n"  # fmt: skip


def _measure_cost(row: Row) -> dict[str, float]:
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
    return found


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
