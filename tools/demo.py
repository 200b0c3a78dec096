#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Train a detector of blood cells on 48 microscope images, and show what it finds in 40 others.

The encoder is frozen: it encodes each image once, and the other layers of a RetinaNet are trained
on its features. The images and the encoder come with the package; nothing is downloaded. The demo
takes about a minute on one core, or half a minute on two.

examples:
  qbheat demo
  qbheat demo --output output/longer SOLVER.EPOCHS 40
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from arguments import make_parser

CONFIG = "demo/cells_probe.yaml"
RUN = "detector"  # folder of the run


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/demo"),
        help="folder (default: output/demo); the runs of an earlier demo in it are replaced",
    )
    parser.add_overrides()
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error
    from qbheat_det.core.files import refuse_second_command

    @exit_on_user_error
    def run() -> None:
        with refuse_second_command(args.output):
            run_demo(args)

    run()


def run_demo(args: argparse.Namespace) -> None:
    """Trains, evaluates, and writes ``report.html`` and ``result.json``.

    Raises:
        UserError: the folder contains other files, or an override is invalid.
    """
    from detectron2.data import DatasetCatalog

    from qbheat_det.api.training import train_afresh, write_run_report
    from qbheat_det.core.text import format_duration
    from qbheat_det.engine import RunFlags

    start = time.monotonic()
    print("1/2  training a head on the features of a frozen encoder", flush=True)
    folder = args.output / RUN
    flags = RunFlags(config_file=CONFIG, output=str(folder), opts=args.opts)
    trainer, results = train_afresh(flags)
    print("2/2  drawing the report", flush=True)
    page = write_run_report(trainer.cfg)
    metrics = results.get("bbox", {})
    result = {key: round(metrics.get(key, float("nan")), 2) for key in ("AP", "AP50")}
    result["seconds"] = round(time.monotonic() - start, 1)
    (args.output / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    number = len(DatasetCatalog.get(trainer.cfg.DATASETS.TEST[0]))
    print(
        f"\nIn {number} images that were not trained on: AP {result['AP']:.1f}, "
        f"AP50 {result['AP50']:.1f}\n"
        f"took  {format_duration(result['seconds'])}\n"
        f"open  {page.resolve()}\n"
        f"try   qbheat predict --weights {folder} --images photos/ --output drawn/"
    )


if __name__ == "__main__":
    main()
