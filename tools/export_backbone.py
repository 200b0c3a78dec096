#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Write the bare backbone of trained weights to a file of its own (.safetensors).

Any config with the same backbone starts from it with MODEL.WEIGHTS, and so it does from the
checkpoint of a pre-training run as it is: this tool is for files to keep and to hand on, without
predictor and decoder, and for statistics of BatchNorm that are estimated anew on whole images.

examples:
  # from a pre-training run; then train a detector on it
  python tools/export_backbone.py --weights output/pretraining/model_final.safetensors \\
      --output backbone.safetensors
  python tools/train_net.py --config-file configs/coco/retinanet_285M_finetune.yaml \\
      MODEL.WEIGHTS backbone.safetensors

  # statistics of BatchNorm from 1000 whole images of one's own, labels not needed
  python tools/export_backbone.py --weights output/pretraining/model_final.safetensors \\
      --output backbone.safetensors --recalibrate-bn 1000 --image-folder photos/

  # from the images that the weights were trained on, at another size
  python tools/export_backbone.py --weights output/pretraining/model_final.safetensors \\
      --output backbone.safetensors --recalibrate-bn 1000 INPUT.PRETRAIN.SIZE 320
"""

import argparse
import logging
import sys
from pathlib import Path

import qbheat_det  # noqa: F401  (registers models and data sets)
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.engine.backbone_export import export_backbone


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        help="estimate BatchNorm's statistics anew on N whole images of the config's training set",
    )
    add("--image-folder", action="append", default=[], metavar="DIR", help="on these; repeatable")
    add("opts", nargs="*", metavar="KEY VALUE", help="overrides of the config in the weights")
    return parser.parse_args(argv)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if args.recalibrate_bn is not None and args.recalibrate_bn < 1:
        raise UserError(f"--recalibrate-bn is a number of images, not {args.recalibrate_bn}")
    num_tensors, num_images = export_backbone(
        args.weights,
        args.output,
        overwrite=args.overwrite,
        num_images=args.recalibrate_bn or 0,
        image_folders=args.image_folder,
        opts=args.opts,
    )
    how = f", statistics from {num_images} images" if num_images else ""
    print(f"{args.output}: {num_tensors} tensors{how}")


if __name__ == "__main__":
    main()
