#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Join detectors of one frozen encoder into one detector with the classes of all.

Nothing is trained. In the new file, the encoder runs once per image, and each detector keeps its
own head. So it finds exactly what the detectors find alone, and classes that you add later take
nothing from earlier ones. See docs/growing.md.

The detectors must have the same encoder and the same size of test images: train the new head from
the weights of the old one with --freeze.

examples:
  # a second head, for new classes, on the frozen encoder of a detector
  qbheat train --data sharks.yaml --weights output/fish --freeze --output output/sharks
  qbheat join --weights output/fish --weights output/sharks --output both.safetensors
  qbheat predict --weights both.safetensors --images photos/ --output drawn/
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from arguments import WEIGHTS, check_inputs, hide_foreign_warnings, make_parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--weights",
        required=True,
        action="append",
        metavar="FILE",
        help=f"{WEIGHTS}; repeat it for each detector. If two detectors have a class of the same "
        "name, the first one finds it",
    )
    add("--output", required=True, type=Path, metavar="FILE", help="the new file (.safetensors)")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_overrides("overrides of all configs, such as INPUT.MIN_SIZE_TEST 480")
    args = parser.parse_args(argv)
    if len(args.weights) < 2:
        parser.error("--weights: name at least two detectors, each with a --weights of its own")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    check_inputs(weights=args.weights)
    hide_foreign_warnings()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(join)(args)


def join(args: argparse.Namespace) -> None:
    """Writes the file. Prints its classes, and which detector finds a class that several have."""
    from qbheat_det.checkpoint import join_detectors

    joined = join_detectors(args.weights, args.output, overwrite=args.overwrite, opts=args.opts)
    for name, weights in joined.found_once.items():
        print(f"'{name}' is a class of several detectors: that of '{weights}' finds it")
    print(f"{args.output}: {len(joined.class_names)} classes ({', '.join(joined.class_names)})")


if __name__ == "__main__":
    main()
