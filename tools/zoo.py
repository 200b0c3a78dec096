#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained weights by name: what there is, and how to get it.

Wherever a tool or a config takes a file of weights it takes the address qbheat://NAME as well, and
fetches what it stands for: fetching by hand is for machines without a network.

examples:
  # what there is: figures, size, and where each file would come from
  python tools/zoo.py list
  python tools/zoo.py list 'retinanet/*'
  python tools/zoo.py list --json

  # fetch weights now, each checked by its SHA-256; prints the path of each file
  python tools/zoo.py fetch 'retinanet/*'

  # collect files for a machine without a network, and use them there
  python tools/zoo.py fetch '*' --output zoo_weights
  QBHEAT_ZOO=zoo_weights python tools/zoo.py list

where weights come from, in this order: the folders that $QBHEAT_ZOO names, what is shipped with
the package, what was fetched before, $QBHEAT_ZOO_URL, the repositories of $QBHEAT_ZOO_HUB; see
docs/zoo.md.

exit code: 0; 2 if something could not be found, fetched or written.
"""

import argparse
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

# What the imports of Detectron2 say is of no use to people who look for weights.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

from qbheat_det.atomic import write_atomically  # noqa: E402
from qbheat_det.errors import UserError, exit_with_sentence  # noqa: E402
from qbheat_det.model_zoo import Figure, ZooEntry, find_entry, list_entries  # noqa: E402
from qbheat_det.model_zoo.places import describe_place, fetch  # noqa: E402
from qbheat_det.model_zoo.strict_json import to_plain  # noqa: E402


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="of names, such as 'retinanet/*'")
    parser.add_argument("--json", action="store_true", help="print everything but fingerprints")


def run_list(args: argparse.Namespace) -> int:
    entries = list_entries(args.pattern)
    if args.json:
        print(json.dumps([_to_plain(entry) for entry in entries], indent=1, ensure_ascii=False))
        return 0
    if not entries:
        what = "is empty" if args.pattern == "*" else f"has no name that matches '{args.pattern}'"
        print(f"the model zoo {what}", file=sys.stderr)
        return 0
    rows = [("name", "task", "figures", "size", "from"), *(_row(entry) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def _to_plain(entry: ZooEntry) -> dict[str, object]:
    plain = {key: value for key, value in to_plain(entry).items() if key != "fingerprint"}
    return {**plain, "from": describe_place(entry)}


def _row(entry: ZooEntry) -> tuple[str, ...]:
    figures = "; ".join(_figure(figure) for figure in entry.figures) or "none measured"
    return (
        entry.name,
        entry.task,
        figures,
        f"{entry.size / 2**20:.1f} MiB",
        describe_place(entry),
    )


def _figure(figure: Figure) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    return f"{figure.metric} {figure.value:g}{unit} ({figure.data})"


def add_fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="name, or pattern of names")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="copy the files to this folder, too"
    )


def run_fetch(args: argparse.Namespace) -> int:
    for entry in choose_entries(args.names):
        path = fetch(entry)
        if args.output is not None:
            path = _copy(path, args.output / entry.file)
        print(path)
    return 0


def choose_entries(names: Sequence[str]) -> list[ZooEntry]:
    """Returns the entries of names and of patterns, each once.

    Raises:
        UserError: there is no such name, or nothing matches a pattern.
    """
    chosen: dict[str, ZooEntry] = {}
    for name in names:
        is_pattern = any(letter in name for letter in "*?[")
        found = list_entries(name) if is_pattern else (find_entry(name),)
        if not found:
            raise UserError(f"the model zoo has no name that matches '{name}'")
        chosen |= {entry.name: entry for entry in found}
    return list(chosen.values())


def _copy(path: Path, target: Path) -> Path:
    if not (target.is_file() and target.samefile(path)):
        with open(path, "rb") as source:
            write_atomically(target, lambda stream: shutil.copyfileobj(source, stream))
    return target


# By name: its help, what adds its arguments, what runs it and returns the exit code.
COMMANDS = {
    "list": ("show what there is", add_list, run_list),
    "fetch": ("bring weights to this machine", add_fetch, run_fetch),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, add_arguments, _) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=summary, description=summary))
    return parser.parse_args(argv)


@exit_with_sentence
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("qbheat_det").setLevel(logging.INFO)
    _, _, run = COMMANDS[args.command]
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
