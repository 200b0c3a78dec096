#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compute the features of images with an encoder, for example for search or deduplication.

examples:
  qbheat features --weights output/encoder/model_final.safetensors --images photos/ \\
      --parquet features/

  # process millions of images on a Ray cluster
  qbheat features --weights qbheat://distill/285M --images s3://bucket/shards \\
      --parquet features/ --engine ray --resume

exit code: 0 on success; 1 if an image is unreadable (its row has an error); 2 if no image was
processed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import (
    WEIGHTS,
    add_batch_flags,
    check_batch_flags,
    check_inputs,
    hide_foreign_warnings,
    make_parser,
    run_batch,
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--weights", required=True, help=f"encoder or classifier: {WEIGHTS}")
    add("--images", nargs="+", required=True, metavar="PATH", help="images and folders")
    add("--size", type=int, default=0, help="side of the central square that is encoded, in pixels "
        "(default: as in pre-training)")  # fmt: skip
    add("--device", choices=["cpu", "cuda"], help="default: cuda if a GPU is available")
    add("--fast", action="store_true", help="use the encoder's fastest equivalent form")
    add_batch_flags(parser)
    args = parser.parse_args(argv)
    check_batch_flags(parser, args)
    if not args.parquet:
        parser.error("--parquet DIR is required")
    if args.size < 0:
        parser.error("--size must be 0 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(*args.images)
    hide_foreign_warnings()
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(run_batch)(args, features=True, size=args.size)


if __name__ == "__main__":
    sys.exit(main())
