# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Multiply-adds and parameters: of the paper's components beside its tables, or of a config.

python tools/analyze_model.py --all [--json FILE]
python tools/analyze_model.py --config-file F [--size H W] [--depth N] [KEY VALUE …]
"""

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from detectron2.modeling import build_model
from fvcore.nn import parameter_count

import qbheat_det  # noqa: F401  (registers the models)
from qbheat_det.analysis import CountingRule, count_detector_madds
from qbheat_det.analysis.paper_tables import PaperCell, compare_with_paper
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.modeling.contracts import train_only_modules


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the flags and prints one of the two reports.

    Raises:
        UserError: neither or both of ``--all`` and ``--config-file``, or a bad config or size.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="the paper's tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables' cells there")
    parser.add_argument("--config-file", metavar="F", help="a detector of one's own")
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1333), metavar=("H", "W"))
    parser.add_argument("--depth", type=int, default=2, help="levels of modules (default: 2)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="overrides of the config")
    args = parser.parse_args(argv)
    if args.all == bool(args.config_file):
        raise UserError("give either --all or --config-file F")
    if args.json and not args.all:
        raise UserError("--json belongs to --all")
    warnings.filterwarnings("ignore")  # of the tracer, which meets Python numbers in every model
    for rule in CountingRule:
        print(f"{rule.name}: {rule.value}")
    if args.all:
        _report_paper(args.json)
    else:
        _report_config(args.config_file, args.opts, tuple(args.size), args.depth)


def _report_paper(path: Path | None) -> None:
    cells = compare_with_paper()
    print(format_cells(cells))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        rows = [cell.as_json() for cell in cells]
        partial.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)


def format_cells(cells: Sequence[PaperCell]) -> str:
    """Returns the cells as aligned tables with a summary below."""
    width = max(len(cell.cell) for cell in cells)
    lines: list[str] = []
    for table, group in groupby(cells, key=lambda cell: cell.table):
        lines += ["", f"Table {table}", f"    {'':<{width}}  {'paper':>6}  {'ours':>9}"]
        lines += [
            f"  {'✓' if c.match else '✗'} {c.cell:<{width}}  {c.paper:>6}  {c.ours:>9.4f} {c.unit}"
            f"  {c.rule}"
            for c in group
        ]
    matched = [cell for cell in cells if cell.match]
    others = [f"{cell.cell} (Table {cell.table})" for cell in cells if not cell.match]
    first = [cell for cell in cells if cell.table != 14]
    lines += [
        "",
        f"Without RetinaNet (Table 14): {sum(c.match for c in first)} of {len(first)}; "
        f"{sum(c.match_one_rule for c in first)} with one rule for all cells, MAdds by EXT and "
        "all parameters.",
        f"{len(matched)} of {len(cells)} printed cells matched"
        + (f"; the others are: {'; '.join(others)}." if others else "."),
    ]
    return "\n".join(lines)


def _report_config(file: str, opts: Sequence[str], size: tuple[int, int], depth: int) -> None:
    if min(size) < 32:
        raise UserError(f"--size wants a height and a width of at least 32, not {size}")
    cfg = load_config(file, ["MODEL.DEVICE", "cpu", *opts])
    model = build_model(cfg).eval()
    for name in train_only_modules(model):
        setattr(model, name, None)  # counted is the network of inference
    madds = count_detector_madds(model, *size)
    params = parameter_count(model)
    rows: list[tuple[str, ...]] = [("module", "params", "CORE", "EXT")]
    for name in madds.by_module:
        counts = [madds.total(rule, name) for rule in CountingRule]
        level = name.count(".") + 1 if name else 0
        if level <= depth and (params[name] or any(counts)):
            millions = f"{params[name] / 1e6:.3f} M"
            giga = [f"{count / 1e9:.3f} G" for count in counts]
            rows.append((f"{'  ' * level}{name or 'whole model'}", millions, *giga))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{cfg.MODEL.META_ARCHITECTURE} at {size[0]}x{size[1]}, padding included")
    for name, *figures in rows:
        cells = (f"{f:>{w}}" for f, w in zip(figures, widths[1:], strict=True))
        print(f"{name:<{widths[0]}}  {'  '.join(cells)}")


if __name__ == "__main__":
    main()
