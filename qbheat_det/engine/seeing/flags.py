# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The flags that all sights share, for ``tools/see.py`` and ``tools/report.py``."""

import argparse
from pathlib import Path

from .options import Sight, SightOptions


def add_subject_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what names runs, weights and pictures: ``runs``, ``images`` and what builds a model."""
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (OUTPUT_DIR) or weights (.safetensors, .pth); LABEL=PATH names it",
    )
    add(
        "--images",
        type=Path,
        metavar="DIR",
        help="pictures to look at, with all below this folder (default: those of the run's test "
        "set, or else its training set)",
    )
    add("--num-images", type=_positive, default=6, metavar="N",
        help="how many are drawn (default: 6)")  # fmt: skip
    add("--seed", type=int, default=0, help="of what is random, such as controls (default: 0)")
    add("--config-file", metavar="FILE", help="YAML of all the models (default: the runs' own)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--opts", nargs="+", default=[], metavar="KEY VALUE", help="overrides of all configs")


def read_options(args: argparse.Namespace, sight: Sight) -> SightOptions:
    """Returns what was asked for; of the sight's own flags the defaults where they are not there.

    Args:
        args: parsed by a parser with the flags above.
        sight: whose own flags may be there too.
    """
    extra = {name: getattr(args, name, value) for name, value in sight.default_flags().items()}
    return SightOptions(args.images, args.num_images, args.seed, extra)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
