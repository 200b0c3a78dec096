#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Packs images and their boxes or classes into shards, for training over a network.

examples:
  tools/shards.py annotations.json --images images --output shards
  tools/shards.py class_folders --output shards
  tools/shards.py --images photos --images more --output shards

Then copy the folder to a bucket or a web server, and pass its address to --data or --images:
  tools/train_net.py --data s3://bucket/shards --output output/mine

exit code: 0 if all images were packed; 1 if broken images were left out; 2 if no image was packed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import SOURCES, check_inputs


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", nargs="?", metavar="SRC", help=SOURCES)
    add("--images", action="append", default=[], metavar="DIR", help="folder of the images of a "
        "COCO json; without SRC, a folder of images without labels (repeatable)")  # fmt: skip
    add("--output", type=Path, required=True, metavar="DIR", help="output folder of the shards")
    add("--shard-mb", type=float, default=64, metavar="MB",
        help="size of a shard in MB, 1e6 bytes (default: 64)")  # fmt: skip
    args = parser.parse_args(argv)
    if not (args.data or args.images) or (args.data and len(args.images) > 1):
        parser.error("specify SRC with at most one --images, or one or more --images without SRC")
    if args.shard_mb <= 0:
        parser.error("--shard-mb must be above 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(args.data, *args.images)
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(pack)(args)


def pack(args: argparse.Namespace) -> int:
    """Packs the images, prints the ones that were left out, and returns the exit code."""
    from qbheat_det.data import open_images, open_source, pack_source

    folder = "".join(args.images)
    data = open_source(args.data, folder) if args.data else open_images(args.images)
    errors = pack_source(data, args.output, shard_bytes=1e6 * args.shard_mb)
    for error in errors:
        print(f"left out: {error.message}", file=sys.stderr)
    print(f"{len(list(args.output.glob('*.tar')))} shards in '{args.output}'")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
