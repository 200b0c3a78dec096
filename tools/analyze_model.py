# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Count multiply-adds and parameters of the paper's models, or of the detector of a config.

python tools/analyze_model.py --all [--json FILE]
python tools/analyze_model.py --config-file F [--size H W] [--depth N] [KEY VALUE …]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported below after the arguments are parsed
    from qbheat_det.analysis.paper_tables import PaperCell


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all models of the paper's tables")
    which.add_argument("--config-file", metavar="F", help="YAML of a detector")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells of the tables")
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1333), metavar=("H", "W"))
    parser.add_argument("--depth", type=int, default=2, help="levels of modules (default: 2)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="overrides of the config")
    args = parser.parse_args(argv)
    if min(args.size) < 32:
        parser.error("--size is at least 32 x 32 pixels")
    if args.json and not args.all:
        parser.error("--json needs --all")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(analyze)(args)


def analyze(args: argparse.Namespace) -> None:
    """Prints one of the two reports. Raises a ``UserError`` if the config is invalid."""
    import warnings

    from qbheat_det.evaluation.complexity import CountingRule

    warnings.filterwarnings("ignore")  # the tracer warns of Python numbers in every model
    for rule in CountingRule:
        print(f"{rule.name}: {rule.value}")
    if args.all:
        report_paper(args.json)
    else:
        report_config(args.config_file, args.opts, args.size, args.depth)


def report_paper(path: Path | None) -> None:
    """Prints the numbers of the paper's tables and our counts, and writes them to ``path``."""
    import json
    from dataclasses import asdict

    from qbheat_det.analysis.paper_tables import compare_with_paper
    from qbheat_det.core.files import write_atomically

    cells = compare_with_paper()
    print(format_cells(cells))
    if path is not None:
        text = json.dumps([asdict(cell) for cell in cells], indent=2) + "\n"
        write_atomically(path, text.encode())


def format_cells(cells: "Sequence[PaperCell]") -> str:
    """Returns the cells as aligned tables with a summary below."""
    from itertools import groupby

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
        f"Without RetinaNet (Table 14): {sum(c.match for c in first)} of {len(first)}.",
        f"{len(matched)} of {len(cells)} printed cells matched"
        + (f"; the others are: {'; '.join(others)}." if others else "."),
    ]
    return "\n".join(lines)


def report_config(file: str, opts: Sequence[str], size: Sequence[int], depth: int) -> None:
    """Prints the counts of a detector's modules in inference."""
    from detectron2.modeling import build_model
    from fvcore.nn import parameter_count
    from tabulate import tabulate

    from qbheat_det.config import load_config
    from qbheat_det.evaluation.complexity import CountingRule, count_detector_madds
    from qbheat_det.modeling.contracts import train_only_modules

    cfg = load_config(file, ["MODEL.DEVICE", "cpu", *opts])
    model = build_model(cfg).eval()
    for name in train_only_modules(model):
        setattr(model, name, None)
    madds = count_detector_madds(model, *size)
    params = parameter_count(model)
    rows = []
    for name in madds.by_module:
        counts = [madds.total(rule, name) for rule in CountingRule]
        level = name.count(".") + 1 if name else 0
        if level <= depth and (params[name] or any(counts)):
            giga = [f"{count / 1e9:.3f} G" for count in counts]
            label = f"{'  ' * level}{name or 'whole model'}"
            rows.append((label, f"{params[name] / 1e6:.3f} M", *giga))
    print(f"\n{cfg.MODEL.META_ARCHITECTURE} at {size[0]}x{size[1]}, padding included")
    header = ("module", "params", "CORE", "EXT")
    print(tabulate(rows, header, colalign=("left", *3 * ["right"]), preserve_whitespace=True))


if __name__ == "__main__":
    main()
