# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The flags that all sights share, for ``tools/see.py`` and ``tools/report.py``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from qbheat_det.core.errors import UserError

from .flag_types import whole
from .options import Sight, SightOptions
from .refusal import NothingToSee
from .subject import Subject, open_subjects

_SEEDS = 2**32  # as many as NumPy and PyTorch both take


def add_subject_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what names runs, weights and pictures: ``runs``, ``images`` and what builds a model."""
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (OUTPUT_DIR), weights (.safetensors, .pth, qbheat://NAME), or "
        "figures of probes (.json); LABEL=PATH names it",
    )
    add(
        "--images",
        type=Path,
        metavar="DIR",
        help="pictures to look at, with all below this folder (default: those of the run's test "
        "set, or else its training set)",
    )
    add("--num-images", type=whole(), default=6, metavar="N",
        help="how many are drawn (default: 6)")  # fmt: skip
    add("--seed", type=whole(least=0, end=_SEEDS), default=0, metavar="N",
        help="of what is random, such as controls (default: 0)")  # fmt: skip
    add("--config-file", metavar="FILE", help="YAML of all the models (default: the runs' own)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--opts", nargs="+", default=[], metavar="KEY VALUE", help="overrides of all configs")


def open_runs(args: argparse.Namespace) -> list[Subject]:
    """Opens what the flags above name.

    Raises:
        UserError: as ``open_subjects``; or none of the runs can take ``--config-file`` and
            ``--opts``, such as where a key is misspelt.
    """
    subjects = open_subjects(
        args.runs, config_file=args.config_file, device=args.device, opts=args.opts
    )
    if args.config_file or args.opts:
        _check_configs(subjects)
    return subjects


def _check_configs(subjects: Sequence[Subject]) -> None:
    # Where one run of several is damaged, the sights go on without it and say so.
    faults, sound = [], 0
    for subject in subjects:
        try:
            _ = subject.cfg
            sound += 1
        except NothingToSee:
            continue
        except UserError as error:
            faults.append(error)
    if faults and not sound:
        raise faults[0]


def read_options(args: argparse.Namespace, sight: Sight) -> SightOptions:
    """Returns what was asked for; of the sight's own flags the defaults where they are not there.

    Args:
        args: parsed by a parser with the flags above.
        sight: whose own flags may be there too.
    """
    extra = {name: getattr(args, name, value) for name, value in sight.default_flags().items()}
    return SightOptions(args.images, args.num_images, args.seed, extra)
