# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The command-line flags of figures, for visualize.py and report.py.

Nothing of the package is imported, so that ``--help`` is fast. A flag is a keyword argument of the
figure's function, which holds its default.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIGURES = {
    "curves": "losses, scores and learning rate of runs on one axis",
    "reconstructions": "images reconstructed from a corner and from the centre",
    "correlation": "histograms over images of the spatial correlation of feature maps",
    "attention": "attention between global tokens and pixels, both ways",
    "queries": "cross-attention of the object queries of MF-DETR",
    "detections": "AP by size and class, curves, errors, missed boxes and false alarms",
    "classes": "confusion matrix of a classifier",
    "probes": "accuracies of probes by decoder, by its width and by images seen",
    "spectrum": "eigenvalues of A and B at both scales, and Table 3 over a run",
}
"""By name, in the order of the report."""


def integer(*, least: int = 1, end: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type: integers from ``least`` to below ``end``."""
    meant = f"from {least} to {end - 1}" if end is not None else f"of at least {least}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (end is not None and number >= end):
            raise argparse.ArgumentTypeError(f"an integer {meant}, not '{text}'")
        return number

    return read


def real(*, highest: float, above: bool = False) -> Callable[[str], float]:
    """Returns an argparse type: numbers from 0 (or ``above`` it) to ``highest``."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number <= highest or (above and number == 0):  # nan is in no range
            meant = f"above 0 and at most {highest:g}" if above else f"from 0 to {highest:g}"
            raise argparse.ArgumentTypeError(f"a number {meant}, not '{text}'")
        return number

    return read


def text(value: str) -> str:
    """An argparse type: text that is not empty."""
    if not value.strip():
        raise argparse.ArgumentTypeError("a name, not ''")
    return value


FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "curves": {
        "axis": {
            "choices": ("epochs", "images", "steps"),
            "help": "x axis: epochs (default); images, for different batches or data; steps",
        },
    },
    "correlation": {
        "correlated_images": {
            "type": integer(),
            "help": "images of the histograms (default: 64; the paper has 1000)",
        },
        "size": {
            "type": integer(),
            "help": "side of the images in pixels, the same for all runs (default: that of the "
            "runs' training if it is one, else the paper's 224)",
        },
        "map": {
            "type": text,
            "help": "feature map, such as s16 (default: one that all encoders have; else the one "
            "that each model reads, in separate charts)",
        },
    },
    "attention": {
        "attention_heads": {
            "choices": ("mean", "apart"),
            "help": "draw the mean over heads (default), or a row for each, as the paper does",
        },
    },
    "queries": {
        "query_boxes": {
            "type": integer(),
            "help": "predictions to draw of each image, most confident first (default: 3)",
        },
    },
    "detections": {
        "data": {
            "metavar": "SRC",
            "help": "annotated images, of which the part to evaluate on is taken if it names one; "
            "--images may be their folder (default: each run's test set)",
        },
        "threshold": {
            "type": real(highest=1),
            "help": "lowest score of boxes that are drawn and counted as errors (default: for each "
            "run, that with the best F1); AP and curves use all boxes",
        },
    },
    "spectrum": {
        "checkpoints": {
            "type": integer(least=0),
            "help": "checkpoints of a run's folder besides the last, spread evenly over training, "
            "as rows of Table 3 (default: 5)",
        },
    },
}
"""By figure and by keyword argument, what ``add_argument`` takes."""


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every figure: runs, images, seed, and how models are built."""
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
        type=integer(),
        default=6,
        metavar="N",
        help="how many to draw (default: 6)",
    )
    add(
        "--seed",
        type=integer(least=0, end=2**32),
        default=0,
        metavar="N",
        help="of everything random, such as controls (default: 0)",
    )
    add("--config-file", metavar="FILE", help="YAML for all models (default: the runs' own)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add("--opts", nargs="+", default=[], metavar="KEY VALUE", help="overrides of all configs")


def add_figure_flags(name: str, parser: argparse.ArgumentParser) -> None:
    """Adds the flags of one figure; without a value they are not in the parsed arguments."""
    group = parser.add_argument_group(f"of '{name}'")
    for keyword, settings in FLAGS.get(name, {}).items():
        flag = f"--{keyword.replace('_', '-')}"
        metavar = {} if "choices" in settings else {"metavar": settings.get("metavar", "N")}
        group.add_argument(flag, default=argparse.SUPPRESS, **{**settings, **metavar})


def read_keywords(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of one figure that the command line sets."""
    return {keyword: vars(args)[keyword] for keyword in FLAGS.get(name, {}) if keyword in args}
