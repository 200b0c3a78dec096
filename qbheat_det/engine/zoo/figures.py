# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of an entry: said on the command line, read from a file, or measured here."""

import argparse
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.engine.eval_only import evaluate
from qbheat_det.engine.setup import build_config
from qbheat_det.model_zoo.index import Figure
from qbheat_det.model_zoo.strict_json import from_plain, parse_json

_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_FIGURE = re.compile(
    rf"(?P<metric>[^=:]+)=\s*(?P<value>{_NUMBER})\s*(?:(?:±|\+-)\s*(?P<spread>{_NUMBER}))?"
    r"\s*(?P<unit>(?:[^:\d.][^:]*)?):(?P<data>[^:]+)(?::(?P<note>.*))?",
    re.DOTALL,
)
# What of the package's results by task stands in an entry, and how a reader knows it.
_NAMES = {
    "bbox": {"AP": "AP", "AP50": "AP50", "AP75": "AP75"},
    "segm": {"AP": "mask AP", "AP50": "mask AP50"},
    "classification": {"top1": "top-1", "top5": "top-5"},
    "knn": {"top1": "kNN top-1"},
}


def parse_figure(text: str) -> Figure:
    """Reads "METRIC=VALUE:DATA" or "METRIC=VALUE±SPREAD UNIT:DATA:NOTE".

    Raises:
        UserError: it is nothing of the kind.
    """
    match = _FIGURE.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"--figure '{text}' is not METRIC=VALUE:DATA or METRIC=VALUE±SPREAD UNIT:DATA:NOTE, "
            "such as 'AP=21.3%:Aquarium val' or 'top-1=61.2±0.4%:Caltech-101 val:3 seeds'"
        )
    parts = {name: (value or "").strip() for name, value in match.groupdict().items()}
    return Figure(
        metric=parts["metric"],
        value=float(parts["value"]),
        unit=parts["unit"],
        data=parts["data"],
        spread=f"±{parts['spread']}" if parts["spread"] else "",
        note=parts["note"],
    )


def read_figures(file: Path) -> list[Figure]:
    """Reads a JSON list of objects with the fields of ``Figure``.

    Raises:
        UserError: the file cannot be read, or something in it is not sound.
    """
    try:
        content = parse_json(file.read_text(encoding="utf-8"), f"'{file}'")
    except (OSError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read: {error}") from error
    if not isinstance(content, list):
        raise UserError(f"'{file}' is no list of figures")
    return [from_plain(Figure, one, f"'{file}', figure {i}") for i, one in enumerate(content)]


def measure_figures(weights: Path, data: str, args: argparse.Namespace) -> list[Figure]:
    """Evaluates a file as ``tools/train_net.py --eval-only`` does.

    Args:
        weights: the file; its config names the test set unless the flags do.
        data: what the figures call that set.
        args: the flags of ``tools/arguments.py`` that name data.

    Raises:
        UserError: there is nothing to evaluate on, or the evaluation gives no figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        opts = ["MODEL.WEIGHTS", str(weights), "OUTPUT_DIR", folder]
        own = {"config_file": "", "opts": opts, "eval_only": True, "resume": False}
        results = evaluate(build_config(argparse.Namespace(**{**vars(args), **own})))
    figures = [*_name_figures(results, data), *_name_losses(results, data)]
    if not figures:
        raise UserError(
            "the evaluation gave no figures: name what to evaluate on with --val-json and "
            "--val-images, --val-folder, --val-image-folder, or --knn-train-folder and "
            "--knn-val-folder"
        )
    return figures


def _name_figures(results: Mapping[str, Mapping[str, Any]], data: str) -> Iterator[Figure]:
    for task, names in _NAMES.items():
        found = results.get(task, {})
        for key, metric in names.items():
            value = found.get(key)
            if value is None or math.isnan(value):
                continue
            error = found.get(f"{key}_standard_error")
            spread = "" if error is None else f"±{error:.1f}, the binomial standard error"
            yield Figure(metric, round(float(value), 2), "%", data, spread)


def _name_losses(results: Mapping[str, Mapping[str, Any]], data: str) -> Iterator[Figure]:
    """The held-out loss of pre-training, and that of each view."""
    found = results.get("reconstruction", {})
    if "loss" not in found:
        return
    views = {
        key.removeprefix("loss_"): value
        for key, value in found.items()
        if key.startswith("loss_") and not key.endswith("_standard_error")
    }
    note = ", ".join(f"{view} {value:.4f}" for view, value in views.items())
    error = found.get("loss_standard_error", math.nan)
    spread = "" if math.isnan(error) else f"±{error:.4f}, the standard error"
    yield Figure("held-out loss", round(float(found["loss"]), 4), "", data, spread, note)
