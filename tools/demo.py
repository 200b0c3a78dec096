#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Train detectors of blood cells on a pre-trained and a random frozen encoder, and compare them.

Each encoder encodes 48 microscope images once. RetinaNet's other layers are trained on the
features. The BatchNorm statistics of both encoders are estimated on these images. A report shows
predictions on 40 test images.

The images come with the package; nothing is downloaded. The demo takes two minutes on two cores.

examples:
  qbheat demo
  qbheat demo --output output/longer SOLVER.EPOCHS 40
"""

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import make_parser

if TYPE_CHECKING:  # imported below after the arguments are parsed
    from qbheat_det.engine import RunFlags

CONFIG = "demo/cells_probe.yaml"
ENCODERS = ("pretrained", "random")
UNTRAINED = "untrained"
FIGURES = ("detections", "curves")
NUM_IMAGES = 8  # number of images in the report
NUM_RECALIBRATED = 48  # number of images for BatchNorm statistics


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

    from qbheat_det.api.training import train_afresh
    from qbheat_det.config import get_config_path, load_config
    from qbheat_det.core.files import replace_folders
    from qbheat_det.core.text import format_duration

    output = args.output
    start = time.monotonic()
    shipped = load_config(get_config_path(CONFIG), args.opts).MODEL.WEIGHTS
    replace_folders(*(output / name for name in (*ENCODERS, UNTRAINED)))
    runs: dict[str, str] = {}
    seconds: dict[str, float] = {}  # of training, by encoder
    result: dict[str, dict[str, float] | float] = {}  # AP and AP50 by encoder, and "seconds"
    for step, name in enumerate(ENCODERS, start=1):
        print(f"{step}/3  a head on the frozen encoder: {name}", flush=True)
        backbone = write_encoder(name, output, args.opts)
        begun = time.monotonic()
        flags = make_flags(output / name, [*args.opts, "MODEL.WEIGHTS", str(backbone)])
        trainer, results = train_afresh(flags)
        seconds[name] = time.monotonic() - begun
        cfg = trainer.cfg
        runs[name] = cfg.OUTPUT_DIR
        metrics = results.get("bbox", {})
        result[name] = {key: round(metrics.get(key, float("nan")), 2) for key in ("AP", "AP50")}
    print("3/3  drawing the report", flush=True)
    number = len(DatasetCatalog.get(cfg.DATASETS.TEST[0]))
    pretrained, random = (f"{result[name]['AP50']:.0f} %" for name in ENCODERS)
    lead = (
        f"In {format_duration(seconds[ENCODERS[0]])}, the head of a RetinaNet learned from "
        f"{trainer.data_loader.num_images} images to find blood cells with the frozen encoder "
        f"{shipped.removeprefix('qbheat://')}. Its AP50 on {number} other images is {pretrained}. "
        f"With a random encoder, it is {random}. The annotators missed some cells, so some "
        "detections that count as wrong are right."
    )
    page = write_report(runs, output / "report.html", cfg.MODEL.DEVICE, lead)
    result["seconds"] = round(time.monotonic() - start, 1)
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\nCOCO metrics on {number} images that were not trained on, frozen encoders:")
    for name in ENCODERS:
        metrics = result[name]
        print(f"{name:<10}  AP {metrics['AP']:>5.1f}   AP50 {metrics['AP50']:>5.1f}")
    print(f"took  {format_duration(result['seconds'])}\nopen  {page.resolve()}")


def write_encoder(name: str, output: Path, opts: Sequence[str]) -> Path:
    """Writes the encoder of the config ("pretrained") or a random one, and returns its path.

    BatchNorm statistics are recalibrated on the training images.
    """
    from qbheat_det.api.training import start_afresh
    from qbheat_det.config import get_config_path, load_config
    from qbheat_det.data.datasets import CELLS
    from qbheat_det.export import export_backbone

    weights = load_config(get_config_path(CONFIG), opts).MODEL.WEIGHTS
    if name == "random":
        opts_of_random = [*opts, "MODEL.WEIGHTS", "", "MODEL.CACHE_FEATURES.ENABLED", "False"]
        start_afresh(make_flags(output / UNTRAINED, opts_of_random)).export("model_random")
        weights = str(output / UNTRAINED / "model_random.safetensors")
    path = output / f"encoder_{name}.safetensors"
    export_backbone(
        weights,
        path,
        overwrite=True,
        num_images=NUM_RECALIBRATED,
        image_folders=[str(CELLS / "train")],
        opts=["INPUT.PRETRAIN.SIZE", "256"],
    )
    return path


def make_flags(output: Path, opts: Sequence[str]) -> "RunFlags":
    """Returns the flags of a run of the demo."""
    from qbheat_det.engine import RunFlags

    return RunFlags(config_file=CONFIG, output=str(output), opts=opts)


def write_report(paths: dict[str, str], page: Path, device: str, lead: str) -> Path:
    """Writes a page with ``FIGURES`` of the runs. ``paths`` are their folders by label."""
    from qbheat_det.analysis.report import build_report
    from qbheat_det.analysis.run import FigureOptions, Run

    runs = [Run.open(path, label=label, device=device) for label, path in paths.items()]
    words = [f"{label}={path}" for label, path in paths.items()]
    command = shlex.join(["qbheat", "report", *words, "--only", *FIGURES])
    build_report(
        FIGURES,
        runs,
        FigureOptions(num_images=NUM_IMAGES),
        {},
        output=page,
        command=command,
        title="A detector of blood cells",
        lead=lead,
    )
    return page


if __name__ == "__main__":
    main()
