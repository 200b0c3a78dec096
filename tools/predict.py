#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predict on images, videos and folders with trained weights: boxes, or classes of images.

examples:
  # the weights of a run hold the config and the names of the classes
  qbheat predict --weights output/demo/training/model_final.safetensors \\
      --images photo.jpg --output output/pictures

  # a folder, searched recursively; boxes as a COCO results file, too
  qbheat predict --weights output/run/model_final.pth \\
      --images photos/ --output output/pictures --json output/boxes.json

  # config keys can be overridden: here, larger test images
  qbheat predict --weights output/run/model_final.pth --images photo.jpg \\
      --output output/pictures INPUT.MIN_SIZE_TEST 1000

  # the fastest equal form; MODEL.DEPLOY.IMAGE_SIZES [[H,W]] at the end compiles for that size
  qbheat predict --weights output/run/model_final.pth --images photos/ \\
      --json output/boxes.json --fast

  # with the weights of a classifier: the five likeliest classes of each image
  qbheat predict --weights output/run/model_final.pth --images photos/ \\
      --json output/classes.json

  # an ONNX file of qbheat export, in onnxruntime
  qbheat predict --weights output/model.onnx --images photos/ --output output/pictures

  # millions: results as Parquet files, by all cores and machines of a cluster of Ray
  qbheat predict --weights output/run/model_final.pth --images s3://bucket/shards \\
      --parquet results/ --engine ray --fast --resume

exit code: 0; 1 if a file could not be used and was skipped; 2 if nothing could be done.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import (
    WEIGHTS,
    add_batch_flags,
    check_batch_flags,
    check_inputs,
    hide_foreign_warnings,
    make_parser,
    run_batch,
)

if TYPE_CHECKING:  # imported by main, after the arguments were parsed
    from qbheat_det.inference.predict import Predictions


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--weights", required=True, help=f"{WEIGHTS}, or an exported file")
    add("--config-file", help="YAML of the model (default: the one inside the weights, or beside)")
    add("--images", nargs="+", required=True, metavar="PATH", help="images, videos, folders")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the drawn images, small ones enlarged (default: output/predict)",
    )
    add(
        "--json", type=Path, metavar="FILE", help="write boxes in COCO's results format, or classes"
    )
    add(
        "--format",
        choices=["coco", "cvat", "label-studio"],
        default="coco",
        help="of --json: COCO's results (default), or boxes that CVAT or Label Studio import",
    )
    add("--threshold", type=float, default=0.3, help="leave out boxes below (default 0.3)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add(
        "--fast",
        action="store_true",
        help="predict by the model's fastest equal form on this device (MODEL.DEPLOY.ENABLED)",
    )
    add(
        "--tile",
        type=int,
        metavar="PX",
        help="also predict on overlapping square tiles, for small objects in large images",
    )
    add_batch_flags(parser)
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides, last")
    args = parser.parse_args(argv)
    check_batch_flags(parser, args)
    if not (args.output or args.json or args.parquet):
        args.output = Path("output/predict")
    if args.output and args.output.suffix.lower() in (".jpg", ".jpeg", ".png", ".mp4"):
        parser.error(f"--output is a folder, not '{args.output}'")
    if args.parquet and (args.output or args.format != "coco" or args.tile):
        parser.error("--parquet goes without --output, --format and --tile")
    if not 0 <= args.threshold <= 1:
        parser.error("--threshold is a probability: from 0 to 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_inputs(*args.images, weights=args.weights)
    hide_foreign_warnings()
    from qbheat_det.core.errors import exit_on_user_error

    return exit_on_user_error(run)(args)


def run(args: argparse.Namespace) -> int:
    """Predicts as the arguments ask, and returns the exit code."""
    if args.parquet:
        chosen = {"threshold": args.threshold, "opts": tuple(args.opts)}
        return run_batch(args, config_file=args.config_file, **chosen)
    from qbheat_det.api import predict_files

    report = predict_files(
        args.weights,
        args.images,
        output=args.output,
        json_file=args.json,
        json_format=args.format,
        score_threshold=args.threshold,
        config_file=args.config_file,
        device=args.device,
        fast=args.fast,
        tile=args.tile,
        opts=args.opts,
    )
    print_report(report, args)
    return (1 if report.num_images else 2) if report.skipped else 0


def print_report(report: "Predictions", args: argparse.Namespace) -> None:
    """Prints counts, where the results are, and which files were skipped."""
    files = "file" if report.num_images == 1 else "files"
    print(f"{report.num_images} {files}: {len(report.results)} results")
    if report.num_images and not report.results:
        print(
            f"no box reaches --threshold {args.threshold}; the best score {report.best_score:.2f}"
        )
    if args.output and report.num_images:
        print(f"images:  {args.output}")
    if args.json:
        print(f"results: {args.json}")
    for path, reason in report.skipped:
        print(f"skipped {path}: {reason}", file=sys.stderr)
    if report.skipped:
        print(f"could not be read: {len(report.skipped)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
