# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes the tables of docs/performance.md from the results in ``output/bench``.

python -m benchmarks.tables [--bench DIR] [--check]

Each table is between ``<!-- bench NAME PREFIX -->`` and ``<!-- end -->``. It has the rows of
``NAME.json`` whose names begin with ``NAME/PREFIX`` or ``PREFIX`` (optional), and a line about the
machine. If a benchmark has not been run, its table does not change.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import ENVIRONMENTS, OUTPUT, ROOT
from qbheat_det.core.errors import UserError, exit_on_user_error

PAGE = ROOT / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- bench (\S+)(?: (\S+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_HEADS = "| measured | ours | peer | unit | ratio |\n| --- | ---: | ---: | --- | ---: |\n"


def format_table(rows: Sequence[Mapping[str, Any]], environment: str) -> str:
    """Returns a Markdown table (with the range of ratios), and a line about the machine."""
    lines = []
    for row in rows:
        ratio = f"{row['ratio']:.2f}"
        if "ratio_least" in row:
            ratio += f" ({row['ratio_least']:.2f} to {row['ratio_greatest']:.2f})"
        name = row["name"].split("/", 1)[1]
        lines.append(
            f"| `{name}` | {row['ours']:.4g} | {row['peer']:.4g} | {row['unit']} | {ratio} |\n"
        )
    machine = ""
    if environment:
        machine = f"\nMeasured on: {environment}.\n"
    return f"\n{_HEADS}{''.join(lines)}{machine}\n"


def fill(page: str, folder: Path) -> str:
    """Returns the page with updated tables of all benchmarks that have been run."""

    def table(match: re.Match[str]) -> str:
        start, name, prefix, old, end = match.groups()
        path = folder / f"{name}.json"
        rows = read_json(path)
        if not rows:
            return f"{start}{old}{end}"
        environments = read_json(folder / ENVIRONMENTS) or {}
        start_of = (f"{name}/{prefix or ''}", prefix or f"{name}/")
        chosen = [row for row in rows if row["name"].startswith(start_of)]
        if not chosen:
            raise UserError(f"{path} has no row that begins with '{name}/{prefix}'")
        return f"{start}{format_table(chosen, environments.get(name, ''))}{end}"

    return _BLOCK.sub(table, page)


def read_json(path: Path) -> Any:
    """Returns the content of a file, or None if there is none."""
    if not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Updates the page; with ``--check``, raises a ``UserError`` if the page is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", type=Path, default=OUTPUT)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    if not args.bench.is_dir():
        raise UserError(f"there is no folder {args.bench}: make bench makes it")
    before = args.page.read_text(encoding="utf-8")
    after = fill(before, args.bench)
    if args.check:
        if after != before:
            raise UserError(
                f"{args.page} does not match {args.bench}: run python -m benchmarks.tables"
            )
        return
    args.page.write_text(after, encoding="utf-8")
    print(f"written to {args.page}")


if __name__ == "__main__":
    main()
