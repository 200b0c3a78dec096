#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draw every figure of runs on one page that needs no other file.

examples:
  # a pre-training, and a detector on its frozen encoder, beside one on random weights
  qbheat report output/pretraining output/probe output/probe_random \\
      --output output/report.html

  # with labels, on other images
  qbheat report ours=output/pretraining random=output/random \\
      --images photos/ --output output/report.html

  # some figures only (qbheat visualize --help lists all)
  qbheat report output/pretraining --only curves spectrum --output output/report.html

The folder report/ next to report.html contains each image as a file, and its numbers as JSON. The
end of the page lists missing figures with the reason. The page is rewritten after each figure, so
after Ctrl-C it has the figures that were drawn before.

exit code: 0 on success; 1 if a figure failed (the page has all other figures); 2 if a run or flag
is invalid; 130 after Ctrl-C.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import make_parser
from figure_flags import FIGURES, add_figure_flags, add_run_flags, read_keywords


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_run_flags(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/report.html"),
        metavar="FILE",
        help="the page (default: output/report.html); its files are in the folder of the same name",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        metavar="FIGURE",
        help="draw only these figures (default: all)",
    )
    for name in FIGURES:
        add_figure_flags(name, parser)
    args = parser.parse_args(argv)
    if args.output.suffix not in (".html", ".htm"):
        parser.error(f"--output is a page, so it ends in .html, unlike '{args.output}'")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.command = shlex.join(["qbheat", "report", *(argv or sys.argv[1:])])
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(write_report)(args)


def write_report(args: argparse.Namespace) -> int:
    """Writes the page. Returns the exit code."""
    from qbheat_det.analysis import load_figures
    from qbheat_det.analysis.report import build_report
    from qbheat_det.analysis.run import FigureOptions, open_runs

    load_figures()
    results = build_report(
        [name for name in FIGURES if name in args.only],
        open_runs(args.runs, config_file=args.config_file, device=args.device, opts=args.opts),
        FigureOptions(args.images, args.num_images),
        {name: read_keywords(name, args) for name in args.only},
        output=args.output,
        command=args.command,
    )
    for result in results:
        if result.figure is None:
            print(f"{result.name}: {result.reason}", file=sys.stderr)
    print(f"report: {args.output}\nfiles:  {args.output.with_suffix('')}")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
