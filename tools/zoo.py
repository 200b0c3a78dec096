#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""List, download, verify and add trained weights by name.

Wherever tools and configs accept a file of weights, they also accept the address qbheat://NAME, and
download the file if necessary. Use "fetch" to copy files to machines without a network.

examples:
  # names with metrics, size, and the source of each file
  qbheat zoo list
  qbheat zoo list 'retinanet/*'
  qbheat zoo list --json

  # download weights, check their SHA-256, and print their paths
  qbheat zoo fetch 'retinanet/*'

  # collect files for a machine without a network, and use them there
  qbheat zoo fetch '*' --output zoo_weights
  QBHEAT_ZOO=zoo_weights qbheat zoo list

  # check that weights, pre-processing and code agree on this machine
  qbheat zoo verify

  # add an entry: writes weights in half precision, and computes fingerprint, costs and hash
  qbheat zoo add --weights output/model_final.safetensors --name retinanet/285M_shapes \\
      --config custom/retinanet_285M_probe.yaml --summary 'Frozen RetinaNet on drawn shapes' \\
      --data 'drawn shapes' --data-licence CC0-1.0 --command 'qbheat train …' \\
      --metric AP 41.2±0.6 % 'shapes val'

  # add an entry to your own folder, for $QBHEAT_ZOO or for the hub ("hf upload me/zoo my_zoo")
  qbheat zoo add --output my_zoo --weights … --name … --config … --summary … --data … \\
      --data-licence … --command …

weights are searched in this order: folders in $QBHEAT_ZOO, files shipped with the package, earlier
downloads, and Python's package index (for some timm networks); see docs/zoo.md.

exit code: 0 on success, 1 if "verify" finds a difference, 2 if a file cannot be found, downloaded
or written.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import make_parser

if TYPE_CHECKING:  # --help does not need the package
    from qbheat_det.model_zoo import ZooEntry


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (description, add_arguments, _) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=description, description=description))
    given = sys.argv[1:] if argv is None else argv
    return parser.parse_args(given or ["list"])


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="pattern, as in 'retinanet/*'")
    parser.add_argument("--json", action="store_true", help="print all fields except fingerprints")


def run_list(args: argparse.Namespace) -> int:
    from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

    from qbheat_det.core.text import format_bytes
    from qbheat_det.model_zoo import list_entries
    from qbheat_det.model_zoo.sources import describe_source

    entries = list_entries(args.pattern)
    if args.json:
        plain = [{**_to_plain(entry), "from": describe_source(entry)} for entry in entries]
        print(json.dumps(plain, indent=1, ensure_ascii=False))
        return 0
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


def _to_plain(entry: "ZooEntry") -> dict[str, object]:
    from qbheat_det.model_zoo.index import to_plain

    return {key: value for key, value in to_plain(entry).items() if key != "fingerprint"}


def add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="name, or pattern of names")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="also copy the files to this folder"
    )


def run_fetch(args: argparse.Namespace) -> int:
    from qbheat_det.core.files import write_atomically
    from qbheat_det.model_zoo.sources import fetch

    for entry in choose_entries(args.names):
        path = fetch(entry)
        copy = args.output / entry.file if args.output else path
        if copy != path:
            content = path.read_bytes()
            write_atomically(copy, lambda stream, content=content: stream.write(content))
        print(copy)
    return 0


def choose_entries(names: Sequence[str]) -> "list[ZooEntry]":
    """Returns the entries that match names or patterns, without duplicates.

    Raises:
        UserError: a name does not exist, or a pattern matches no entry.
    """
    from qbheat_det.core.errors import UserError
    from qbheat_det.model_zoo import find_entry, list_entries

    chosen: dict[str, ZooEntry] = {}
    for name in names:
        is_pattern = any(letter in name for letter in "*?[")
        found = list_entries(name) if is_pattern else (find_entry(name),)
        if not found:
            raise UserError(f"the model zoo has no name that matches '{name}'")
        chosen |= {entry.name: entry for entry in found}
    return list(chosen.values())


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", default=["*"], metavar="NAME", help="name or pattern (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")


def run_verify(args: argparse.Namespace) -> int:
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    from qbheat_det.model_zoo.verify import format_verdicts, verify_entry

    entries = tqdm(choose_entries(args.names), unit="entry", disable=not sys.stderr.isatty())
    verdicts = [verify_entry(entry) for entry in entries]
    print(json.dumps(verdicts, indent=1) if args.json else format_verdicts(verdicts))
    return int(any(verdict["error"] for verdict in verdicts))


def add_add(parser: argparse.ArgumentParser) -> None:
    for flag, metavar, text in (
        ("--weights", "FILE", "weights of a trained model or a bare backbone"),
        ("--name", "NAME", "name of the entry: task/variant_data, as in retinanet/285M_bccd"),
        ("--config", "PATH", "config of the training, a path below configs/"),
        ("--summary", "TEXT", "description of the entry in one line"),
        ("--data", "TEXT", "description of the training data"),
        ("--data-licence", "TEXT", "licence of the training data"),
        ("--command", "TEXT", "command of the training"),
    ):
        dest = {"--command": "trained_by"}.get(flag, flag.removeprefix("--").replace("-", "_"))
        parser.add_argument(flag, required=True, dest=dest, metavar=metavar, help=text)
    add = parser.add_argument
    add(
        "--licence",
        default="Apache-2.0",
        metavar="TEXT",
        help="licence of the weights (Apache-2.0)",
    )
    add(
        "--metric",
        nargs=4,
        action="append",
        default=[],
        metavar=("NAME", "VALUE", "UNIT", "DATA"),
        help="a measured metric, such as AP 41.2±0.6 %% 'shapes val'; repeatable",
    )
    add(
        "--encoder",
        default="",
        metavar="NAME",
        help="name of the entry whose encoder was frozen in training; it is not stored again",
    )
    add("--output", type=Path, metavar="DIR", help="a folder with its own index")
    add("--replace", action="store_true", help="replace an existing entry with this name")


def run_add(args: argparse.Namespace) -> int:
    from qbheat_det.core.errors import UserError
    from qbheat_det.model_zoo import Metric
    from qbheat_det.model_zoo.add import add_entry

    metrics = []
    for name, number, unit, data in args.metric:
        value, sign, spread = number.partition("±")
        try:
            metrics.append(Metric(name, float(value), unit, data, sign + spread))
        except ValueError as error:
            raise UserError(f"--metric {name}: '{number}' is not a number") from error
    names = ("name", "summary", "config", "data", "data_licence", "licence")
    description = {name: getattr(args, name) for name in names}
    entry = add_entry(
        args.weights,
        {**description, "command": args.trained_by},
        metrics=metrics,
        encoder=args.encoder,
        output=args.output,
        replace=args.replace,
    )
    print(json.dumps(_to_plain(entry), indent=1, ensure_ascii=False))
    return 0


# Maps a command to its help, and functions that add its arguments, and run it (returns exit code).
COMMANDS = {
    "list": ("list names with metrics, sizes and sources", add_list, run_list),
    "fetch": ("download weights", add_fetch, run_fetch),
    "verify": ("check that weights and code agree on this machine", add_verify, run_verify),
    "add": ("add an entry for trained weights", add_add, run_add),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("qbheat_det").setLevel(logging.INFO)
    _, _, run = COMMANDS[args.command]
    return exit_on_user_error(run)(args)


if __name__ == "__main__":
    sys.exit(main())
