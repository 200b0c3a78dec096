#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draw figures of runs or checkpoints on one page that needs no other file.

examples:
  # a pre-training, a detector on its frozen encoder, and a detector on a random encoder
  qbheat report output/pretraining output/probe output/probe_random \\
      --output output/report.html

  # with labels for the runs, on other images
  qbheat report ours=output/pretraining random=output/random \\
      --images photos/ --output output/report.html

  # some figures only
  qbheat report output/pretraining --only curves spectrum --output output/report.html

figures:
{figures}

A run is the output folder of a training (OUTPUT_DIR), or a checkpoint (.safetensors, .pth). Several
runs are drawn side by side. The folder report/ next to report.html contains each figure as an image
file, and the figure's numbers as JSON. Tables are also printed. The end of the page lists missing
figures with the reason. The page is rewritten after each figure, so after Ctrl-C it has the figures
that were drawn before.

exit code: 0 on success; 1 if a figure failed (the page has all other figures) or none was drawn;
2 if a run or flag is invalid; 130 after Ctrl-C.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arguments import check_inputs, make_parser

FIGURES = {
    "curves": "losses, scores and learning rate of runs on one axis",
    "reconstructions": "images reconstructed from a corner and from the center",
    "correlation": "histograms over images of the spatial correlation of feature maps",
    "attention": "attention between global tokens and pixels, both ways",
    "detections": "AP by size and class, missed and wrong boxes",
    "classes": "confusion matrix of a classifier",
    "spectrum": "eigenvalues and ranks of A and B at both scales, and Table 3",
    "beyond": "error of features that A and B carry beyond the frame",
}
"""Descriptions by figure name, in the order of the page."""
FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "correlation": {
        "correlated_images": {
            "type": int,
            "metavar": "N",
            "help": "number of images in the histograms (default: 64; the paper uses 1000)",
        },
        "map": {
            "metavar": "NAME",
            "help": "feature map, such as s16 (default: the one that each model reads)",
        },
    },
    "attention": {
        "attention_heads": {
            "choices": ("mean", "apart"),
            "help": "mean: average over heads (default); apart: a row per head, as in the paper",
        },
    },
    "detections": {
        "data": {
            "metavar": "SRC",
            "help": "annotated images; if they have a validation part, only this part is used; "
            "--images can be their folder (default: the test set of each run)",
        },
        "threshold": {
            "type": float,
            "metavar": "T",
            "help": "lowest score of boxes that are drawn and counted as errors (default: the "
            "score with the best F1, for each run); AP uses all boxes",
        },
    },
}
"""Arguments of ``add_argument``, by figure name and keyword argument of the figure's function."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    figures = "\n".join(f"  {name:<16} {about}" for name, about in FIGURES.items())
    parser = make_parser(str(__doc__).replace("{figures}", figures))
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (OUTPUT_DIR) or checkpoint "
        "(.safetensors, .pth, qbheat://NAME); LABEL=PATH sets the label",
    )
    add(
        "--images",
        type=Path,
        metavar="DIR",
        help="folder of images, with subfolders (default: the run's test set, else training set)",
    )
    add("--num-images", type=int, default=6, metavar="N", help="images to draw (default: 6)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add(
        "--output",
        type=Path,
        default=Path("output/report.html"),
        metavar="FILE",
        help="the page (default: output/report.html); its files are in the folder of the same name",
    )
    add(
        "--only",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        metavar="FIGURE",
        help="draw only these figures (default: all)",
    )
    for name, flags in FLAGS.items():
        group = parser.add_argument_group(f"flags of the figure '{name}'")
        for keyword, settings in flags.items():
            flag = f"--{keyword.replace('_', '-')}"
            # Without the flag, ``args`` has no such attribute, and the function's default is used.
            group.add_argument(flag, default=argparse.SUPPRESS, **settings)
    args = parser.parse_args(argv)
    if args.output.suffix not in (".html", ".htm"):
        parser.error(f"--output is a page, so it ends in .html, unlike '{args.output}'")
    if min(args.num_images, getattr(args, "correlated_images", 1)) < 1:
        parser.error("--num-images and --correlated-images must be at least 1")
    if not 0 <= getattr(args, "threshold", 0) <= 1:
        parser.error("--threshold is from 0 to 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # As LABEL=PATH, or as a path, which may contain "=".
    paths = [run if os.path.exists(run) else run.split("=", 1)[-1] for run in args.runs]
    check_inputs(args.images, weights=paths)
    args.command = shlex.join(["qbheat", "report", *(argv or sys.argv[1:])])
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(write_report)(args)


def write_report(args: argparse.Namespace) -> int:
    """Draws the figures and writes the page. Returns the exit code."""
    from tabulate import tabulate

    from qbheat_det.analysis.report import build_report
    from qbheat_det.analysis.run import FigureOptions, open_runs
    from qbheat_det.core.text import escape_controls

    # The flags on the command line, by figure.
    keywords: dict[str, dict[str, Any]] = {}
    for name, flags in FLAGS.items():
        keywords[name] = {keyword: vars(args)[keyword] for keyword in flags if keyword in args}
    results = build_report(
        [name for name in FIGURES if name in args.only],
        open_runs(args.runs, device=args.device),
        FigureOptions(args.images, args.num_images),
        keywords,
        output=args.output,
        command=args.command,
    )
    for result in results:
        if result.figure is None:
            print(escape_controls(f"{result.name}: {result.reason}"), file=sys.stderr)
        elif result.figure.table is not None:
            table = result.figure.table
            text = tabulate(table.rows, table.header, disable_numparse=True, maxheadercolwidths=14)
            print(escape_controls(f"{result.figure.title}\n\n{text}\n"))
    print(f"report: {args.output}\nfiles:  {args.output.with_suffix('')}")
    is_empty = all(result.figure is None for result in results)
    return int(is_empty or any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
