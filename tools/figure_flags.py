# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The command-line flags of figures, for visualize.py and report.py.

This module does not import the package, so that ``--help`` is fast. Each flag is a keyword argument
of the figure's function, which defines the default.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIGURES = {
    "curves": "losses, scores and learning rate of runs on one axis",
    "reconstructions": "images reconstructed from a corner and from the center",
    "correlation": "histograms over images of the spatial correlation of feature maps",
    "attention": "attention between global tokens and pixels, both ways",
    "detections": "AP by size and class, curves, missed and wrong boxes",
    "classes": "confusion matrix of a classifier",
    "probes": "accuracies of probes by decoder, by its width and by images seen",
    "spectrum": "eigenvalues of A and B at both scales, and Table 3",
}
"""Descriptions by figure name, in the order of the report."""


def number(
    kind: type[int] | type[float], least: float, most: float = math.inf
) -> Callable[[str], float]:
    """Returns an argparse type for numbers from ``least`` to ``most``."""
    meant = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # nan is in no range
            raise argparse.ArgumentTypeError(f"a number {meant}, not '{text}'")
        return value

    return read


FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "curves": {
        "axis": {
            "choices": ("epochs", "images", "steps"),
            "help": "x axis: epochs (default); images, for different batches or data; steps",
        },
    },
    "correlation": {
        "correlated_images": {
            "type": number(int, 1),
            "help": "number of images in the histograms (default: 64; the paper uses 1000)",
        },
        "map": {
            "help": "feature map, such as s16 (default: the one that each model reads)",
        },
    },
    "attention": {
        "attention_heads": {
            "choices": ("mean", "apart"),
            "help": "mean: average over heads (default); apart: a row per head, as in the paper",
        },
    },
    "detections": {
        "data": {
            "metavar": "SRC",
            "help": "annotated images; if they have a validation part, only this part is used; "
            "--images can be their folder (default: the test set of each run)",
        },
        "threshold": {
            "type": number(float, 0, 1),
            "help": "lowest score of boxes that are drawn and counted as errors (default: the "
            "score with the best F1, for each run); AP and curves use all boxes",
        },
    },
}
"""Arguments of ``add_argument``, by figure name and keyword argument."""


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every figure: runs, images, and how models are built."""
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (OUTPUT_DIR), checkpoint (.safetensors, .pth, qbheat://NAME), or "
        "results of probes (.json); LABEL=PATH sets the label",
    )
    add(
        "--images",
        type=Path,
        metavar="DIR",
        help="folder of images, with subfolders (default: the run's test set, else training set)",
    )
    add(
        "--num-images",
        type=number(int, 1),
        default=6,
        metavar="N",
        help="number of images to draw (default: 6)",
    )
    add(
        "--config-file",
        metavar="FILE",
        help="YAML config for all models (default: that of each run)",
    )
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add("--opts", nargs="+", default=[], metavar="KEY VALUE", help="overrides of all configs")


def add_figure_flags(name: str, parser: argparse.ArgumentParser) -> None:
    """Adds the flags of one figure. Flags that are not given are absent in the parsed arguments."""
    group = parser.add_argument_group(f"of '{name}'")
    for keyword, settings in FLAGS.get(name, {}).items():
        flag = f"--{keyword.replace('_', '-')}"
        metavar = {} if "choices" in settings else {"metavar": settings.get("metavar", "N")}
        group.add_argument(flag, default=argparse.SUPPRESS, **{**settings, **metavar})


def read_keywords(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of one figure that the command line sets."""
    return {keyword: vars(args)[keyword] for keyword in FLAGS.get(name, {}) if keyword in args}
