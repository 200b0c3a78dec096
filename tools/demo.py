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
import logging
import shlex
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported below after the arguments are parsed
    from qbheat_det.engine import Trainer

NOTE = (
    "One seed, minutes of training and a few hundred images: AP that differs by a point or two "
    "between the backbones may be noise, and so may the order. docs/results.md has longer runs."
)
CONFIGS = ("demo/toy_qb_heat.yaml", "demo/toy_probe.yaml")
FIGURES = ("curves", "reconstructions", "spectrum", "detections")
NUM_RECALIBRATED = 400  # whole images for BatchNorm's statistics
MARKER = ".of_the_demo"  # in folders that the next demo may remove


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
    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(run_demo)(args)


def run_demo(args: argparse.Namespace) -> None:
    """Trains, evaluates, and writes ``report.html``.

    Raises:
        UserError: the folder has something else in it, or an override is not valid.
    """
    from qbheat_det.core.text import format_duration
    from qbheat_det.export import export_backbone

    output, start = args.output, time.monotonic()
    print("1/4  pre-training without boxes", flush=True)
    trainer = start_run(CONFIGS[0], output / "pretraining", args.pretraining)
    trainer.export("model_random")
    trainer.train()
    paths = {"pre-training": trainer.cfg.OUTPUT_DIR}
    metrics: dict[str, dict[str, float]] = {}
    stems = {"QB-Heat": "model_final", "random": "model_random"}
    for number, (name, stem) in enumerate(stems.items(), start=2):
        print(f"{number}/4  a decoder on the frozen backbone: {name}", flush=True)
        backbone = output / f"backbone_{stem}.safetensors"
        export_backbone(str(output / "pretraining" / f"{stem}.safetensors"), backbone,
                        overwrite=True, num_images=NUM_RECALIBRATED)  # fmt: skip
        folder = output / f"probe_{name.lower().replace('-', '_')}"
        probe = start_run(CONFIGS[1], folder, ["MODEL.WEIGHTS", str(backbone), *args.detection])
        paths[name], metrics[name] = probe.cfg.OUTPUT_DIR, probe.train().get("bbox", {})
    print("4/4  drawing the report", flush=True)
    page = write_report(paths, output / "report.html", trainer.cfg.MODEL.DEVICE)
    print("\nCOCO metrics on new images, decoder on a frozen backbone:")
    for name, own in metrics.items():
        ap, ap50 = (own.get(key, float("nan")) for key in ("AP", "AP50"))
        print(f"{name:<8} AP {ap:>5.1f}   AP50 {ap50:>5.1f}")
    took = format_duration(time.monotonic() - start)
    print(f"{NOTE}\ntook  {took}\nopen  {page.resolve()}")


def start_run(config: str, output: Path, opts: Sequence[str]) -> "Trainer":
    """Builds the trainer of a run in an empty folder."""
    from qbheat_det.core.errors import UserError
    from qbheat_det.engine import RunFlags, Trainer, build_config, setup

    if output.exists() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise UserError(f"'{output}' is not of the demo: use another --output")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    (output / MARKER).touch()
    flags = RunFlags(config_file=config, output=str(output), opts=opts)
    cfg = build_config(flags)
    for name in ("detectron2", "fvcore", "qbheat_det"):
        logging.getLogger(name).handlers.clear()  # of the run before
    setup(cfg, flags)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    return trainer


def write_report(paths: dict[str, str], page: Path, device: str) -> Path:
    """Writes the page of tools/report.py with ``FIGURES`` of runs by their labels."""
    from qbheat_det.analysis import load_figures
    from qbheat_det.analysis.figure import FigureOptions
    from qbheat_det.analysis.report import build_report
    from qbheat_det.analysis.run import Run

    load_figures()
    runs = [Run.open(path, label=label, device=device) for label, path in paths.items()]
    words = [f"{label}={path}" for label, path in paths.items()]
    command = shlex.join(["python", "tools/report.py", *words, "--only", *FIGURES])
    build_report(FIGURES, runs, FigureOptions(), {}, output=page, command=command)
    return page


if __name__ == "__main__":
    main()
