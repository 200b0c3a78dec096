#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draw a figure of runs or checkpoints, and write the numbers behind it as JSON.

examples:
  # losses, AP and learning rate of two runs on one axis
  qbheat visualize curves output/run_a output/run_b --axis images --output output/figures

  # the flags of one figure
  qbheat visualize curves --help

A run is the output folder of a training (OUTPUT_DIR), or a checkpoint (.safetensors, .pth). Several
runs are drawn side by side. LABEL=PATH sets a label. --images is a folder of images. By default,
images of the run's test set are drawn.

exit code: 0 on success; 1 if the figure cannot be drawn for these runs (the message explains why);
2 if a run or a flag is invalid.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import make_parser
from figure_flags import FIGURES, add_figure_flags, add_run_flags, read_keywords


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    figures = parser.add_subparsers(dest="figure", metavar="FIGURE", title="figures", required=True)
    for name, description in FIGURES.items():
        own = figures.add_parser(name, help=description, description=f"{description}.")
        add_run_flags(own)
        own.add_argument(
            "--output",
            type=Path,
            default=Path("output/figures"),
            metavar="DIR",
            help="folder for the images and the JSON (default: output/figures)",
        )
        add_figure_flags(name, own)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(visualize)(args)


def visualize(args: argparse.Namespace) -> int:
    """Draws the figure and prints the paths of its files. Returns the exit code."""
    from qbheat_det.analysis import load_figures
    from qbheat_det.analysis.run import FigureOptions, open_runs
    from qbheat_det.core.figures import NotApplicable, write_figure
    from qbheat_det.core.files import check_writable

    check_writable(args.output / f"{args.figure}.json")
    draw = load_figures()[args.figure]
    runs = open_runs(args.runs, config_file=args.config_file, device=args.device, opts=args.opts)
    options = FigureOptions(args.images, args.num_images)
    try:
        figure = draw(runs, options, **read_keywords(args.figure, args))
    except NotApplicable as reason:
        print(f"no figure: {reason}", file=sys.stderr)
        return 1
    for path in write_figure(figure, args.output):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
