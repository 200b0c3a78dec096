#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Select the images to label next.

examples:
  # the first round: images that represent the whole folder
  qbheat select --images photos/ --budget 50 --output next/

  # later rounds: images that the detector is uncertain about, with its boxes as pre-annotations
  qbheat select --images photos/ --budget 50 --weights output/mine --data data.yaml --output next/

The folder gets selected.txt (one path a line), index.html (a contact sheet), and tasks for Label
Studio (label_studio.json) and CVAT (cvat.json, for its import "COCO 1.0"). docs/labelling.md has
the whole loop.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import WEIGHTS, check_inputs, hide_foreign_warnings, make_parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--images", nargs="+", required=True, metavar="PATH", help="images and folders to search")
    add("--budget", type=int, required=True, metavar="N", help="number of images to select")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--weights", help=f"a trained detector, for later rounds: {WEIGHTS}")
    add("--data", metavar="SRC", help="the images that have labels already, in any format that "
        "qbheat train takes; they and near-duplicates of them are left out")  # fmt: skip
    add("--encoder", default="distill/285M", metavar="NAME",
        help="encoder that compares images (default: %(default)s)")  # fmt: skip
    add("--strategy", choices=["typiclust", "prob_cover", "k_center", "uncertainty"],
        help="default: uncertainty with --weights, else typiclust")  # fmt: skip
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--seed", type=int, default=0, help="of the clustering (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(*args.images)
    hide_foreign_warnings()
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(run)(args)


def run(args: argparse.Namespace) -> int:
    from qbheat_det.labelling import select, write_selection

    selection = select(
        args.images,
        args.budget,
        weights=args.weights,
        data=args.data,
        encoder=args.encoder,
        strategy=args.strategy,
        device=args.device,
        seed=args.seed,
    )
    paths = write_selection(selection, args.output)
    pool = selection.pool
    for path, reason in pool.unreadable.items():
        print(f"left out: '{path}': {reason}", file=sys.stderr)
    print(
        f"Selected {len(selection.files)} of {len(pool.free)} images "
        f"({len(pool.repeated)} more repeat others): {', '.join(map(str, paths))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
