#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-train a backbone without labels, freeze it, train a decoder on it, and report the results.

QB-Heat on the toy set's images without their boxes; then RetinaNet's decoder on the frozen
backbone, and the same on the frozen random backbone that pre-training began with. BatchNorm's
statistics of both are estimated on the same whole images. Ends with an illustrated report.

The set is drawn on first use, so nothing is downloaded. It takes minutes on two cores, and running
the demo again trains again. It uses the training of tools/train_net.py and the page of
tools/report.py.

examples:
  python tools/demo.py
  python tools/demo.py --output output/longer --pretraining SOLVER.EPOCHS 40
"""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/demo"), help="folder (default: output/demo)"
    )
    for stage in ("pretraining", "detection"):
        parser.add_argument(
            f"--{stage}",
            nargs="+",
            default=[],
            metavar="KEY VALUE",
            help=f"config overrides of {stage}",
        )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    # Warnings of Detectron2's imports would be the first thing that the demo prints.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", message="torch.meshgrid")
    from qbheat_det.analysis.demo import run_demo
    from qbheat_det.core.errors import exit_on_user_error
    from qbheat_det.export import export_backbone

    exit_on_user_error(run_demo)(
        args.output, export_backbone, pretraining=args.pretraining, detection=args.detection
    )


if __name__ == "__main__":
    main()
