#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predict boxes or classes on images, videos and folders with trained weights.

examples:
  # draw the boxes on all images in a folder, and write them as COCO results
  qbheat predict --weights output/run --images photos/ --output drawn/ --json boxes.json

  # override config keys: here, larger test images
  qbheat predict --weights output/run --images photo.jpg INPUT.MIN_SIZE_TEST 1000

  # use the fastest equivalent form
  qbheat predict --weights output/run --images photos/ --json boxes.json --fast

  # run a classifier, and write the five most likely classes of each image
  qbheat predict --weights output/classifier --images photos/ --json classes.json

  # run an ONNX file written by qbheat export in onnxruntime
  qbheat predict --weights detector.onnx --images photos/

  # share the files among four processes
  torchrun --standalone --nproc-per-node 4 tools/predict.py \\
      --weights output/run --images photos/ --json boxes.json

  # predict on a Ray cluster, from an object store; writes Parquet files to the folder of --output
  qbheat predict --engine ray --weights retinanet/285M_bccd \\
      --images s3://bucket/photos --output s3://bucket/boxes

exit code: 0 on success; 1 if a file was skipped or not drawn; 2 if there are no results.
Under torchrun, the code is 0 if a file was skipped, because torchrun regards 1 as a crash.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import (
    WEIGHTS,
    add_engine,
    check_inputs,
    hide_foreign_warnings,
    make_parser,
    print_ray_report,
)

if TYPE_CHECKING:  # ``main`` imports it after parsing the arguments
    from qbheat_det.inference.results import Predictions


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--weights", required=True, help=f"{WEIGHTS}, or an exported file")
    add("--config-file", help="config of the model (default: the one in or next to the weights)")
    add("--images", nargs="+", required=True, metavar="PATH", help="images, videos, folders")
    add(
        "--output",
        metavar="DIR",
        help="folder for the drawn images and videos (default: output/predict); with --engine ray, "
        "for the Parquet files",
    )
    add("--json", type=Path, metavar="FILE", help="write the boxes or classes to a JSON file")
    add(
        "--format",
        choices=["coco", "cvat", "label-studio"],
        default="coco",
        help="format of --json: COCO results (default), CVAT or Label Studio",
    )
    add("--threshold", type=float, default=0.3, help="lowest score of the boxes (default: 0.3)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if a GPU is available")
    add(
        "--fast",
        action="store_true",
        help="use the model's fastest equivalent form on this device (MODEL.DEPLOY.ENABLED)",
    )
    add_engine(parser)
    add(
        "--tile",
        type=int,
        metavar="PX",
        help="also predict on overlapping square tiles, for small objects in large images "
        "(default: as in training; 0: whole images only)",
    )
    add(
        "--max-megapixels",
        type=float,
        metavar="N",
        help="skip images and videos with more million pixels per image (default: 179)",
    )
    add(
        "--max-seconds",
        type=float,
        metavar="N",
        help="skip files of which an image takes longer to decode (default: 60)",
    )
    parser.add_overrides("overrides of the config, such as INPUT.MIN_SIZE_TEST 1000")
    args = parser.parse_args(argv)
    if args.engine == "ray":
        is_json = args.json or args.format != "coco"
        is_limited = args.max_megapixels is not None or args.max_seconds is not None
        if is_json or is_limited or args.config_file or args.fast or not args.output:
            parser.error(
                "--engine ray takes --output, but not --json, --format, --config-file, --fast, "
                "--max-megapixels and --max-seconds"
            )
    elif not (args.output or args.json):
        args.output = "output/predict"
    if args.output and args.output.lower().endswith((".jpg", ".jpeg", ".png", ".mp4")):
        parser.error(f"--output is a folder, not '{args.output}'")
    if not 0 <= args.threshold <= 1:
        parser.error("--threshold must be a score from 0 to 1")
    for name in ("max_megapixels", "max_seconds"):
        limit = getattr(args, name)
        if limit is not None and not 0 < limit < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and finite")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(*args.images, weights=[args.weights], config_file=args.config_file)
    hide_foreign_warnings()
    from qbheat_det.core.errors import exit_on_user_error
    from qbheat_det.core.sharing import run_sharing_files

    if args.engine == "ray":
        return exit_on_user_error(run_on_cluster)(args)
    return exit_on_user_error(run_sharing_files)(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Predicts as specified by the arguments, and returns the exit code."""
    from qbheat_det.api import PREDICTION_LIMITS, predict_files
    from qbheat_det.core.sharing import get_world_size, is_main_process

    limits = PREDICTION_LIMITS
    if args.max_megapixels is not None:
        limits = replace(limits, max_pixels=args.max_megapixels * 1e6)
    if args.max_seconds is not None:
        limits = replace(limits, seconds=args.max_seconds)
    report = predict_files(
        args.weights,
        args.images,
        output=Path(args.output) if args.output else None,
        json_file=args.json,
        json_format=args.format,
        score_threshold=args.threshold,
        config_file=args.config_file,
        device=args.device,
        fast=args.fast,
        tile=args.tile,
        opts=args.opts,
        limits=limits,
    )
    if not is_main_process():
        return 0
    print_report(report, args)
    if report.skipped and not report.num_images:
        return 2
    if get_world_size() > 1:
        return 0
    return int(bool(report.skipped or report.undrawn))


def run_on_cluster(args: argparse.Namespace) -> int:
    """Predicts with Ray, and returns the exit code."""
    from qbheat_det.api import find_weights
    from qbheat_det.core.errors import UserError

    try:
        from qbheat_det.inference.ray_engine import DetectionActor, run_on_ray
    except ImportError as error:
        raise UserError(f"--engine ray needs Ray ({error}): pip install 'ray[data]'") from error

    arguments = {
        "weights": find_weights(args.weights),
        "device": args.device,
        "threshold": args.threshold,
        "tile": args.tile,
        "opts": args.opts,
    }
    return print_ray_report(run_on_ray(DetectionActor, arguments, args.images, args.output), args)


def explain_nothing(report: "Predictions", threshold: float) -> str:
    """Returns what the detector knows and what to do, if no box reaches the threshold."""
    lines = [f"no box reaches --threshold {threshold}; highest score: {report.best_score:.2f}"]
    if report.class_names:
        lines.append(f"This detector only knows {', '.join(report.class_names)}.")
    lines.append("If these are in your images, lower --threshold.")
    lines.append("For other objects, train on your own boxes: qbheat train --data DATA")
    return "\n".join(lines)


def print_report(report: "Predictions", args: argparse.Namespace) -> None:
    """Prints the counts, the paths of the results, and the skipped files."""
    from qbheat_det.core.text import escape_controls

    files = "file" if report.num_images == 1 else "files"
    found = f"{len(report.results)} results"
    if report.images:  # those of a detector
        boxes = "box" if len(report.results) == 1 else "boxes"
        found = (
            f"{len(report.results)} {boxes} with a score of at least --threshold {args.threshold}"
        )
    print(f"{report.num_images} {files}: {found}")
    if report.num_images and not report.results:
        print(explain_nothing(report, args.threshold))
    if args.output and report.num_images:
        print(f"images:  {args.output}")
    if args.json:
        print(f"results: {args.json}")
    for path, reason in report.skipped:
        print(escape_controls(f"skipped {path}: {reason}"), file=sys.stderr)
    for path, reason in report.undrawn:
        print(escape_controls(f"not drawn {path}: {reason}"), file=sys.stderr)
    if report.skipped:
        print(f"could not be read: {len(report.skipped)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
