#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Select the images to label next.

examples:
  # first round: select random images, without near-duplicates
  qbheat select --images photos/ --budget 50 --output next/

  # later rounds: select images with objects of all classes; the boxes become pre-annotations
  qbheat select --images photos/ --budget 50 --weights output/mine --data data.yaml --output next/

  # simulate how many labels each strategy saves, on a labelled data set
  qbheat select --simulate 50 100 200 --data data.yaml --output curve/ SOLVER.EPOCHS 40

The output folder contains selected.txt (one path per line), index.html (a contact sheet), and tasks
for Label Studio (label_studio.json) and CVAT (cvat.json, for its import "COCO 1.0").
docs/labelling.md describes the whole procedure.
"""

import argparse
import sys
from pathlib import Path

from arguments import WEIGHTS, add_fault_flags, check_inputs, hide_foreign_warnings, make_parser

_ONLY_TO_SIMULATE = ("strategies", "seeds")
_NOT_TO_SIMULATE = ("budget", "weights", "strategy", "device", "seed")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--images", nargs="+", default=[], metavar="PATH", help="images and folders to select from")
    add("--budget", type=int, metavar="N", help="number of images to select")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--weights", help=f"trained detector for later rounds: {WEIGHTS}")
    add(
        "--data",
        metavar="SRC",
        help="labelled images, in any format of qbheat train; they and "
        "their near-duplicates are not selected",
    )
    add(
        "--val",
        default="",
        metavar="SRC",
        help="validation images, which are not selected "
        "either; with --simulate: needed if --data has no validation part",
    )
    add_fault_flags(parser)
    add(
        "--encoder",
        default="distill/285M",
        metavar="NAME",
        help="encoder that compares images (default: %(default)s)",
    )
    add(
        "--strategy",
        choices=["random", "k_center", "balanced"],
        help="default: balanced with --weights, else random",
    )
    add("--device", choices=["cpu", "cuda"], help="default: cuda if a GPU is available")
    add(
        "--simulate",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="for each strategy, train on N images of --data that it selects, and plot AP50 over N",
    )
    add(
        "--strategies",
        nargs="+",
        metavar="NAME",
        help="with --simulate: strategies to compare (default: random balanced)",
    )
    add(
        "--seeds",
        type=int,
        nargs="+",
        metavar="SEED",
        help="with --simulate: seeds of selection and training (default: 1 2 3)",
    )
    add("--seed", type=int, help="seed of random (default: 0)")
    parser.add_overrides("with --simulate: overrides of the training config")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(*args.images, args.data, args.val, weights=[args.weights, args.encoder])
    hide_foreign_warnings()
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(run)(args)


def run(args: argparse.Namespace) -> int:
    """Selects images or simulates the selection. Returns the exit code."""
    if args.simulate:
        run_simulation(args)
    else:
        run_selection(args)
    return 0


def run_simulation(args: argparse.Namespace) -> None:
    """Trains detectors, and prints where the results are."""
    from qbheat_det.core.errors import UserError
    from qbheat_det.labelling import simulate

    for name in _NOT_TO_SIMULATE:
        if vars(args)[name] is not None:
            raise UserError(f"--{name} is not for --simulate")
    if not args.data:
        raise UserError("--simulate needs --data, a data set with boxes")
    if len(args.images) > 1:
        raise UserError(f"--images of --simulate is one folder, not {len(args.images)}")
    points = simulate(
        args.data,
        args.simulate,
        args.output,
        val=args.val,
        images="".join(args.images),
        strategies=args.strategies or ("random", "balanced"),
        seeds=args.seeds or (1, 2, 3),
        encoder=args.encoder,
        opts=args.opts,
        max_left_out=args.max_left_out,
    )
    print(f"{len(points)} detectors: '{args.output / 'points.json'}' and 'curve.svg'")


def run_selection(args: argparse.Namespace) -> None:
    """Selects images. Prints their number, and the paths of the results."""
    from qbheat_det.core.errors import UserError
    from qbheat_det.core.text import escape_controls
    from qbheat_det.labelling import check_selection_folder, select, write_selection

    for name in _ONLY_TO_SIMULATE:
        if vars(args)[name] is not None:
            raise UserError(f"--{name} is only for --simulate")
    if args.opts:
        raise UserError(f"'{args.opts[0]}' is a config override, which needs --simulate")
    if not args.images:
        raise UserError("--images DIR is missing")
    if args.budget is None:
        raise UserError("--budget N, the number of images to select, is missing")
    check_selection_folder(args.output, args.data, args.val)
    selection = select(
        args.images,
        args.budget,
        weights=args.weights,
        data=args.data,
        val=args.val,
        encoder=args.encoder,
        strategy=args.strategy,
        device=args.device,
        seed=args.seed or 0,
        max_left_out=args.max_left_out,
    )
    paths = write_selection(selection, args.output)
    pool = selection.pool
    if pool.account.used:
        print(f"Labelled: {pool.account.summarize()}")
    for path, reason in pool.unreadable.items():
        print(escape_controls(f"left out: '{path}': {reason}"), file=sys.stderr)
    print(
        f"Selected {len(selection.files)} of {len(pool.free)} images "
        f"({len(pool.repeated)} near-duplicates left out): {', '.join(map(str, paths))}"
    )


if __name__ == "__main__":
    sys.exit(main())
