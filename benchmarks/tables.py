# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes the measured tables of docs/performance.md from the files of ``output/bench``.

python benchmarks/tables.py [--bench DIR] [--check]

Between ``<!-- bench NAME PREFIX -->`` and ``<!-- end -->`` stand the rows of ``NAME.json`` whose
names begin with ``NAME/PREFIX`` (PREFIX may be left out), with the line of the machine that they
were measured on. A benchmark that has not been run keeps the table that is there. ``growth.json``
is also drawn, as docs/growth.svg.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import ENVIRONMENTS, ROOT, Result
from qbheat_det.core.errors import UserError, exit_on_user_error

PAGE = ROOT / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- bench (\S+)(?: (\S+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_HEADS = "| measured | ours | peer | unit | ratio |\n| --- | ---: | ---: | --- | ---: |\n"


def read_results(folder: Path, name: str) -> list[dict[str, Any]] | None:
    """Returns the rows of a benchmark; None where it has not been run.

    Raises:
        UserError: the file is not what ``make bench`` writes.
    """
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        format_table(rows, "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no file of make bench: remove it, or run it again") from error
    return list(rows)


def format_table(rows: Sequence[Mapping[str, Any]], environment: str) -> str:
    """Returns a Markdown table and, below it, on what machine it was measured.

    Args:
        rows: of ``output/bench/*.json``; those with a spread show it beside their ratio.
        environment: a line; may be empty.
    """
    lines = []
    for row in rows:
        ratio = f"{row['ratio']:.2f}"
        if "ratio_least" in row:
            ratio += f" ({row['ratio_least']:.2f} to {row['ratio_greatest']:.2f})"
        name = row["name"].split("/", 1)[1]
        lines.append(
            f"| `{name}` | {row['ours']:.4g} | {row['peer']:.4g} | {row['unit']} | {ratio} |\n"
        )
    said = f"\nMeasured on: {environment}.\n" if environment else ""
    return f"\n{_HEADS}{''.join(lines)}{said}\n"


def fill(page: str, folder: Path) -> str:
    """Returns a page with the tables of all benchmarks that have been run.

    Raises:
        UserError: a table of the page names rows that its benchmark has not.
    """
    environments = {}
    if (folder / ENVIRONMENTS).is_file():
        try:
            environments = dict(json.loads((folder / ENVIRONMENTS).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{folder / ENVIRONMENTS} is no file of make bench: remove it, or run it again"
            ) from error

    def table(match: re.Match[str]) -> str:
        start, name, prefix, old, end = match.groups()
        rows = read_results(folder, name)
        if not rows:
            return f"{start}{old}{end}"
        chosen = [row for row in rows if row["name"].startswith(f"{name}/{prefix or ''}")]
        if not chosen:
            raise UserError(f"{folder / name}.json has no row that begins with '{name}/{prefix}'")
        return f"{start}{format_table(chosen, environments.get(name, ''))}{end}"

    return _BLOCK.sub(table, page)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Fills the page, or says with ``--check`` whether it is filled.

    Raises:
        UserError: ``--check``, and the page shows other figures than the files.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", type=Path, default=ROOT / "output" / "bench")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    if not args.bench.is_dir():
        raise UserError(f"there is no folder {args.bench}: make bench makes it")
    try:
        before = args.page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the page {args.page} cannot be read: {error}") from error
    after = fill(before, args.bench)
    if args.check:
        if after != before:
            raise UserError(f"{args.page} is not of {args.bench}: python benchmarks/tables.py")
        return
    args.page.write_text(after, encoding="utf-8")
    rows = read_results(args.bench, "growth")
    if rows:
        from benchmarks.growth import draw

        picture = draw([_result_of(row) for row in rows])
        args.page.with_name("growth.svg").write_bytes(picture)
    print(f"written to {args.page}")


def _result_of(row: Mapping[str, Any]) -> Result:
    return Result(*(row[key] for key in ("name", "ours", "peer", "unit", "ratio")))


if __name__ == "__main__":
    main()
