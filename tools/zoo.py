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

  # prove that weights, pre-processing and code still agree on this machine
  python tools/zoo.py verify

  # add an entry: the file in half precision, its fingerprint, costs and hash
  python tools/zoo.py add --weights output/model_final.safetensors --name retinanet/285M_shapes \\
      --config custom/retinanet_285M_probe.yaml --summary 'Frozen RetinaNet on drawn shapes' \\
      --data 'drawn shapes' --data-licence CC0-1.0 --command 'python tools/train_net.py …' \\
      --figure 'AP=41.2±0.6%:shapes val:3 seeds'

  # an entry of a folder of your own, its figures measured from the file as written
  python tools/zoo.py add --output my_zoo --evaluate 'my val' --val-json val.json \\
      --val-images images/ --weights … --name … --config … --summary … --data … \\
      --data-licence … --command …

  # to a repository of the Hugging Face hub (log in with 'hf auth login'), and from one
  python tools/zoo.py push 'retinanet/*' --repo me/detectors
  python tools/zoo.py pull --repo me/detectors --output their_zoo
  QBHEAT_ZOO=their_zoo python tools/zoo.py verify

  # write MODEL_ZOO.md from the index
  python tools/zoo.py table

where weights come from, in this order: the folders that $QBHEAT_ZOO names, what is shipped with
the package, what was fetched before, $QBHEAT_ZOO_URL, the repositories of $QBHEAT_ZOO_HUB; see
docs/zoo.md.

exit code: 0; 1 if an entry does not verify; 2 if something could not be found, fetched or written.
"""

import argparse
import functools
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

# What the imports of Detectron2 say is of no use to people who look for weights.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]  # noqa: E402

from qbheat_det.core.errors import UserError, exit_on_user_error  # noqa: E402
from qbheat_det.core.files import write_atomically  # noqa: E402
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


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", default=["*"], metavar="NAME", help="name, or pattern; all by default"
    )
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")


def run_verify(args: argparse.Namespace) -> int:
    from qbheat_det.engine.zoo.verify import describe, verify_entry

    entries = tqdm(choose_entries(args.names), unit="entry", disable=not sys.stderr.isatty())
    verdicts = [verify_entry(entry) for entry in entries]
    plain = [verdict.to_dict() for verdict in verdicts]
    print(json.dumps(plain, indent=1, ensure_ascii=False) if args.json else describe(verdicts))
    return 0 if all(verdict.is_sound for verdict in verdicts) else 1


def add_add(parser: argparse.ArgumentParser) -> None:
    from arguments import add_data_flags, add_image_flags

    need = functools.partial(parser.add_argument, required=True)
    need("--weights", metavar="FILE", help="of a trained model or a bare backbone")
    need("--name", help="of the entry: task/variant_data, such as retinanet/285M_aquarium")
    need("--config", metavar="PATH", help="the recipe it was trained by, below configs/")
    need("--summary", metavar="TEXT", help="one line")
    need("--data", metavar="TEXT", help="what it was trained on")
    need("--data-licence", metavar="TEXT", help="of that data")
    need("--command", dest="trained_by", metavar="TEXT", help="what trained it")
    add = parser.add_argument
    add("--licence", default="Apache-2.0", metavar="TEXT", help="of the weights (Apache-2.0)")
    add("--commit", default="", help="that trained it; by default what the file says")
    add("--date", default="", metavar="YYYY-MM-DD", help="today by default")
    add(
        *("--figure", "--figures"), dest="figures", action="append", default=[],
        metavar="METRIC=VALUE[±SPREAD][UNIT]:DATA[:NOTE]", help="measured by hand; repeatable",
    )  # fmt: skip
    add("--figures-json", type=Path, metavar="FILE", help="more of them, as the index has them")
    add(
        *("--evaluate",), metavar="DATA", help="measure figures from the file as written, on the "
        "test set of its config or of the flags below; DATA is what the figures call it",
    )  # fmt: skip
    add("--output", type=Path, metavar="DIR", help="a folder with an index of its own")
    add("--replace", action="store_true", help="the entry of this name, if there is one")
    add_data_flags(parser)
    add_image_flags(parser)


def run_add(args: argparse.Namespace) -> int:
    from qbheat_det.engine.zoo.add import Origin, add_entry
    from qbheat_det.engine.zoo.figures import measure_figures, parse_figure, read_figures

    names = ("summary", "config", "data", "data_licence", "licence", "commit", "date")
    given = {name: getattr(args, name) for name in names}
    figures = [parse_figure(text) for text in args.figures]
    figures += read_figures(args.figures_json) if args.figures_json else []
    measure = functools.partial(measure_figures, data=args.evaluate, args=args)
    entry = add_entry(
        args.weights,
        args.name,
        Origin(command=args.trained_by, **given),
        figures=figures,
        measure=measure if args.evaluate else None,
        output=args.output,
        replace=args.replace,
    )
    plain = {key: value for key, value in to_plain(entry).items() if key != "fingerprint"}
    print(json.dumps(plain, indent=1, ensure_ascii=False))
    return 0


def add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of MODEL_ZOO.md")


def run_table(args: argparse.Namespace) -> int:
    from qbheat_det.engine.zoo.table import write_zoo

    print(write_zoo(args.output))
    return 0


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="name, or pattern of names")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="made if missing")
    parser.add_argument("--private", action="store_true", help="if it is made, for its owner alone")
    parser.add_argument("--message", default="", metavar="TEXT", help="of the commit")


def run_push(args: argparse.Namespace) -> int:
    from qbheat_det.engine.zoo.hub import push_entries

    entries = choose_entries(args.names)
    print(push_entries(entries, args.repo, private=args.private, message=args.message))
    return 0


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="of names; all by default")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME[@REVISION]", help="which")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="which $QBHEAT_ZOO can name then"
    )


def run_pull(args: argparse.Namespace) -> int:
    from qbheat_det.engine.zoo.hub import pull_entries

    for path in pull_entries(args.repo, args.output, args.pattern):
        print(path)
    return 0


# By name: its help, what adds its arguments, what runs it and returns the exit code.
COMMANDS = {
    "list": ("show what there is", add_list, run_list),
    "fetch": ("bring weights to this machine", add_fetch, run_fetch),
    "verify": ("prove that weights and code agree on this machine", add_verify, run_verify),
    "add": ("make an entry of trained weights", add_add, run_add),
    "push": ("upload weights to the Hugging Face hub, with a model card", add_push, run_push),
    "pull": ("bring a repository of the hub with its index", add_pull, run_pull),
    "table": ("write MODEL_ZOO.md from the index", add_table, run_table),
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


@exit_on_user_error
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("qbheat_det").setLevel(logging.INFO)
    _, _, run = COMMANDS[args.command]
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
