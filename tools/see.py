#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Look at what runs and weights have learned, one sight at a time: pictures, and JSON beside them.

examples:
  # what can be seen
  python tools/see.py --list

  # losses, AP and learning rate of two runs on one axis
  python tools/see.py curves output/run_a output/run_b --axis minutes --output output/see

  # the flags of one sight
  python tools/see.py curves --help

A run is the folder that a training wrote (OUTPUT_DIR), or a file of weights (.safetensors, .pth).
Several stand side by side; LABEL=PATH gives one a name of your own. Where pictures are needed,
--images names a folder of them; without it they are those that the run was judged on.

exit code: 0; 1 if there is nothing of that kind in these runs (a sentence says why); 2 if a run or
a flag is wrong.
"""

import argparse
import sys
import warnings
from pathlib import Path

# What Detectron2's own imports and torch.meshgrid say is of no use to people who look.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", message="torch.meshgrid")

import qbheat_det  # noqa: E402, F401  registers models and data
from qbheat_det.analysis.exhibit import write_exhibit  # noqa: E402
from qbheat_det.core.errors import exit_on_user_error  # noqa: E402
from qbheat_det.core.files import check_writable  # noqa: E402
from qbheat_det.engine.seeing.flags import add_subject_flags, open_runs, read_options  # noqa: E402
from qbheat_det.engine.seeing.refusal import NothingToSee  # noqa: E402
from qbheat_det.engine.seeing.sights import SIGHTS  # noqa: E402


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="say what can be seen, and end")
    sights = parser.add_subparsers(dest="sight", metavar="SIGHT", title="sights")
    for sight in SIGHTS.values():
        own = sights.add_parser(
            sight.name, help=sight.summary, description=f"{_begin_large(sight.summary)}."
        )
        add_subject_flags(own)
        own.add_argument(
            "--output",
            type=Path,
            default=Path("output/see"),
            metavar="DIR",
            help="folder for the pictures and the JSON (default: output/see)",
        )
        if sight.add_flags is not None:
            sight.add_flags(own.add_argument_group(f"of '{sight.name}'"))
    args = parser.parse_args(argv)
    if not (args.list or args.sight):
        parser.error(f"name a sight ({', '.join(SIGHTS)}), or --list")
    return args


@exit_on_user_error
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.list:
        width = max(map(len, SIGHTS))
        print("\n".join(f"{name:<{width}}  {sight.summary}" for name, sight in SIGHTS.items()))
        return 0
    sight = SIGHTS[args.sight]
    check_writable(args.output / f"{sight.name}.json")
    subjects = open_runs(args)
    try:
        exhibit = sight.see(subjects, read_options(args, sight))
    except NothingToSee as reason:
        print(f"nothing to see: {reason}", file=sys.stderr)
        return 1
    for path in write_exhibit(exhibit, args.output):
        print(path)
    return 0


def _begin_large(summary: str) -> str:
    return summary[:1].upper() + summary[1:]  # and AP stays AP


if __name__ == "__main__":
    sys.exit(main())
