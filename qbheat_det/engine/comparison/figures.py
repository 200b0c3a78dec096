# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the stages of a comparison leave behind, as figures."""

import hashlib
import json
import operator
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qbheat_det.analysis.charts import read_metrics
from qbheat_det.checkpoint import info_of
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError

from ..run_record import RUN_FILE, read_run_record
from ..writers import METRICS_FILE

WEIGHTS = "model_final.safetensors"
BACKBONE_FIGURES = "figures.json"


def read_pretraining(folder: Path) -> dict[str, Any]:
    """Returns how much a finished run of pre-training saw, and what it took.

    ``seconds`` are those of its steps, by the medians that it logged; what a stopped run did
    after its last checkpoint was made again and counts once; they are None of a run of two steps,
    which logs none. None where it was too short to log any.

    Args:
        folder: its ``OUTPUT_DIR``.

    Raises:
        UserError: it is not finished.
    """
    weights = _finished(folder)
    info = info_of(str(weights))
    cfg = load_config(folder / "config.yaml")
    records = [record for record in _metrics(folder) if "time" in record]
    if info is None:
        raise UserError(f"'{weights}' does not say which iteration it is of")
    iterations = info.iteration + 1
    times = [float(record["time"]) for record in records]
    counted = [int(record["iteration"]) + 1 for record in records]
    steps = [end - start for start, end in zip([0, *counted], counted, strict=False)]
    last = {n: value for record in records[-1:] for n, value in record.items() if "loss" in n}
    starts = read_run_record(folder / RUN_FILE)
    return {
        "iterations": iterations,
        "batch_size": cfg.SOLVER.IMS_PER_BATCH,
        "images_seen": iterations * cfg.SOLVER.IMS_PER_BATCH,
        "seconds": sum(map(operator.mul, times, steps)) if times else None,
        "seconds_per_image": statistics.median(times) / cfg.SOLVER.IMS_PER_BATCH if times else None,
        "last_losses": last,
        "starts": len(starts),
        "device": starts[-1].get("device") if starts else None,
        "commits": sorted({str(start.get("commit")) for start in starts}),
        "fingerprint": fingerprint(weights),
    }


def read_backbone(folder: Path) -> dict[str, Any]:
    """Returns what the stage that writes the backbones measured, see ``backbone``."""
    content = _read_json(folder / BACKBONE_FIGURES)
    return {**content, "fingerprint": fingerprint(folder / "recalibrated.safetensors")}


def read_probes(file: Path, weights: Path, probes: Sequence[str]) -> dict[str, Any]:
    """Returns the accuracy of each probe, in percent, with its standard error over the images.

    Args:
        file: the JSON of ``tools/probe_backbone.py``.
        weights: what was probed.
        probes: those that must be there.

    Returns:
        By probe, the attributes of ``ProbeRow``; others than those asked for too.

    Raises:
        UserError: one of them is missing.
    """
    content = _read_json(file)
    rows = [row for row in content.get("rows", []) if row.get("backbone") == str(weights)]
    found = {row["probe"]: row for row in rows}
    if missing := [name for name in probes if name not in found]:
        raise UserError(f"'{file}' lacks the probes {', '.join(missing)} of '{weights}'")
    return {**found, "setting": content.get("setting")}


def read_detection(folder: Path) -> dict[str, Any]:
    """Returns the AP of a finished detector, in percent; 0 where it predicted nothing.

    Of no predictions COCO's tools give no AP; left out, they would raise the mean over seeds.

    Raises:
        UserError: it is not finished, or was never evaluated.
    """
    info = info_of(str(_finished(folder)))
    end = info.iteration if info else 0
    # What is not defined is not logged; an evaluation before the end would pass for the last.
    records = [one for one in _metrics(folder) if "bbox/AP" in one and one["iteration"] >= end]
    if not (records or (folder / "inference").is_dir()):
        raise UserError(f"'{folder}' was trained and never evaluated")
    last = records[-1] if records else {}
    times = [float(record["time"]) for record in _metrics(folder) if "time" in record]
    return {
        **{name: last.get(f"bbox/{name}", 0.0) for name in ("AP", "AP50", "AP75")},
        "iterations": end + 1,
        "seconds_per_step": statistics.median(times) if times else None,
    }


def fingerprint(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _finished(folder: Path) -> Path:
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise UserError(f"'{folder}' holds no {WEIGHTS}: the run did not come to its end")
    return weights


def _metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / METRICS_FILE
    return read_metrics(file) if file.is_file() else []


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"'{file}' cannot be read: {error}") from error
