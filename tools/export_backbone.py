#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Write the bare backbone of trained weights to a file of its own (.safetensors).

Any config with the same backbone takes the file as MODEL.WEIGHTS; it takes the checkpoint of a
pre-training run as well. Use this tool for files to keep or to share, without predictor and
decoder, and to recalibrate BatchNorm on whole images.

examples:
  # from a pre-training run; then train a detector on it
  python tools/export_backbone.py --weights output/pretraining/model_final.safetensors \\
      --output backbone.safetensors
  qbheat train --config-file coco/retinanet_285M_finetune.yaml \\
      --weights backbone.safetensors

  # BatchNorm statistics from 1000 whole images of your own, without labels
  python tools/export_backbone.py --weights output/pretraining/model_final.safetensors \\
      --output backbone.safetensors --recalibrate-bn 1000 --images photos/

  # from the images that the weights were trained on, at another size
  python tools/export_backbone.py --weights output/pretraining/model_final.safetensors \\
      --output backbone.safetensors --recalibrate-bn 1000 INPUT.PRETRAIN.SIZE 320
"""

import argparse
import logging
import sys
from pathlib import Path

from arguments import make_parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--weights",
        required=True,
        metavar="FILE",
        help="trained weights (.safetensors, .pth, qbheat://NAME)",
    )
    add("--output", required=True, type=Path, metavar="FILE", help="the new file (.safetensors)")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    add(
        "--recalibrate-bn",
        type=int,
        metavar="N",
        help="recalibrate BatchNorm on N whole images of the config's training set",
    )
    add("--images", action="append", default=[], metavar="DIR", help="on these; repeatable")
    add("opts", nargs="*", metavar="KEY VALUE", help="overrides of the config in the weights")
    args = parser.parse_args(argv)
    if args.recalibrate_bn is not None and args.recalibrate_bn < 1:
        parser.error(f"--recalibrate-bn is a number of images, not {args.recalibrate_bn}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)

    from qbheat_det.core.errors import exit_on_user_error

    exit_on_user_error(export)(args)


def export(args: argparse.Namespace) -> None:
    from qbheat_det.export import export_backbone

    num_tensors, num_images = export_backbone(
        args.weights,
        args.output,
        overwrite=args.overwrite,
        num_images=args.recalibrate_bn or 0,
        image_folders=args.images,
        opts=args.opts,
    )
    recalibrated = f", recalibrated on {num_images} images" if num_images else ""
    print(f"{args.output}: {num_tensors} tensors{recalibrated}")


if __name__ == "__main__":
    main()
