#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Export trained weights as an ONNX file, or their bare backbone as weights.

The ONNX file accepts uint8 images (N, H, W, 3) of any number and size. It contains resize,
normalization, network, box decoding, NMS and class names. It is written only if its results agree
with PyTorch at batch sizes 1, 2 and 8 on real images. See docs/export.md.

examples:
  # a detector for onnxruntime, compared on images of yours
  qbheat export --weights output/run/model_final.safetensors --images photos/ \\
      --output detector.onnx
  qbheat predict --weights detector.onnx --images photos/ --output output/pictures

  # with smaller test images, which is faster but less accurate
  qbheat export --weights output/run/model_final.safetensors --output small.onnx \\
      INPUT.MIN_SIZE_TEST 480

  # for images of one size, 800 x 1333 pixels, in 8-bit integers for OpenVINO
  qbheat export --weights output/run/model_final.safetensors --images photos/ \\
      --image-size 800 1333 --int8-images training_photos/ --output camera.onnx

  # the feature maps of a pre-trained backbone
  qbheat export --weights output/pretraining/model_final.safetensors \\
      --images photos/ --output backbone.onnx

  # several heads on one frozen backbone, which runs once per image: writes encoder.onnx,
  # head_fish.onnx and head_boats.onnx
  qbheat export --shared-encoder --output output/shared --images photos/ \\
      --weights fish=output/fish/model_final.safetensors \\
      --weights boats=output/boats/model_final.safetensors

  # the two detectors of the model zoo on its encoder distill/285M
  qbheat export --shared-encoder --output output/cells \\
      --weights retinanet=qbheat://retinanet/285M_bccd \\
      --weights mf_detr=qbheat://mf_detr/211_285M_bccd

  # the bare backbone as weights, to use as MODEL.WEIGHTS in any config with this backbone
  qbheat export --backbone --weights output/pretraining/model_final.safetensors \\
      --output backbone.safetensors

  # the same, with BatchNorm statistics computed on 1000 whole images in photos/
  qbheat export --backbone --weights output/pretraining/model_final.safetensors \\
      --recalibrate-bn 1000 --images photos/ --output backbone.safetensors INPUT.PRETRAIN.SIZE 320
"""

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import Any

from arguments import WEIGHTS, check_inputs, hide_foreign_warnings, make_parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--weights",
        required=True,
        action="append",
        metavar="FILE",
        help=f"{WEIGHTS}; with --shared-encoder, repeat it for each head, as NAME=FILE",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--shared-encoder", action="store_true", help="write one file for the encoder, one per head"
    )
    kind.add_argument(
        "--backbone", action="store_true", help="write the bare backbone as weights (.safetensors)"
    )
    add("--config-file", help="config of the model (default: inside or next to the weights)")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="an .onnx file; with --backbone, .safetensors; with --shared-encoder, a folder",
    )
    add("--overwrite", action="store_true", help="replace existing files")
    add_image_flags(parser)
    parser.add_overrides("overrides of the config, such as INPUT.MIN_SIZE_TEST 480")
    args = parser.parse_args(argv)
    check_args(parser, args)
    return args


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for images, and for the comparison and calibration on them."""
    add = parser.add_argument
    paths: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "PATH"}
    add(
        "--images",
        **paths,
        help="images and folders for the comparison (default: blood cells), or folders for "
        "--recalibrate-bn (default: the training set)",
    )
    add(
        "--tolerance",
        type=float,
        default=1e-4,
        metavar="T",
        help="maximum difference from PyTorch: of scores, and of boxes relative to the longer side "
        "of the image (default: 1e-4)",
    )
    add(
        "--image-size",
        nargs=2,
        type=int,
        default=(),
        metavar=("H", "W"),
        help="the file then accepts only single images of this size, and is smaller and faster",
    )
    add(
        "--int8-images",
        **paths,
        help="use 8-bit integers, calibrated on up to 32 of these images; choose training images, "
        "not test images",
    )
    add(
        "--recalibrate-bn",
        type=int,
        metavar="N",
        help="with --backbone: compute BatchNorm's statistics on N whole images",
    )


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with an error if flags contradict each other.

    With ``--shared-encoder``, sets ``args.heads``, which maps the name of each head to its weights.
    """
    if not args.tolerance > 0:
        parser.error("--tolerance must be above 0: results are never bit-identical to PyTorch")
    if len(args.weights) > 1 and not args.shared_encoder:
        parser.error("several --weights need --shared-encoder")
    if (args.shared_encoder or args.backbone) and (args.image_size or args.int8_images):
        parser.error("--image-size and --int8-images are for single ONNX files")
    if args.image_size and min(args.image_size) < 1:
        parser.error("--image-size is at least 1 x 1 pixels")
    if args.recalibrate_bn is not None and not (args.backbone and args.recalibrate_bn > 0):
        parser.error("--recalibrate-bn is a positive number of images, and needs --backbone")
    if args.backbone and args.config_file:
        parser.error("--backbone uses the config in the weights, not --config-file")
    if args.backbone and not args.recalibrate_bn and (args.images or args.opts):
        parser.error("--backbone takes --images and config overrides with --recalibrate-bn only")
    if args.shared_encoder:
        args.heads = dict(weights.split("=", 1) for weights in args.weights if "=" in weights)
        names_are_valid = all(re.fullmatch(r"[\w.-]+", name) for name in args.heads)
        if len(args.heads) < len(args.weights) or not names_are_valid:
            parser.error("--shared-encoder needs --weights NAME=FILE with different names")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    weights = args.weights
    if args.shared_encoder:
        weights = args.heads.values()
    check_inputs(*args.images, *args.int8_images, weights=weights, config_file=args.config_file)
    hide_foreign_warnings()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("qbheat_det").setLevel(logging.INFO)

    from qbheat_det.core.errors import exit_on_user_error

    if args.backbone:
        exit_on_user_error(export_backbone)(args)
    elif args.shared_encoder:
        exit_on_user_error(export_heads)(args)
    else:
        exit_on_user_error(export)(args)


def export(args: argparse.Namespace) -> None:
    """Writes one ONNX file. Prints the report of the comparison with PyTorch, and the size."""
    from qbheat_det.checkpoint import load_run_config
    from qbheat_det.config import warn_of_unread
    from qbheat_det.export import export_model

    cfg = load_run_config(args.weights[0], args.config_file, device="cpu", opts=args.opts)
    warn_of_unread([cfg], args.opts[::2])
    report = export_model(
        cfg,
        args.output,
        images=args.images,
        tolerance=args.tolerance,
        overwrite=args.overwrite,
        image_size=tuple(args.image_size),
        int8_images=args.int8_images,
    )
    print(report)
    print_size(args.output)


def export_heads(args: argparse.Namespace) -> None:
    """Writes an ONNX file for the shared encoder and one for each head.

    Prints the report of each head, and the sizes of the files.
    """
    from qbheat_det.checkpoint import load_run_config
    from qbheat_det.config import warn_of_unread
    from qbheat_det.export import export_shared_encoder

    configs = {
        name: load_run_config(file, args.config_file, device="cpu", opts=args.opts)
        for name, file in args.heads.items()
    }
    warn_of_unread(list(configs.values()), args.opts[::2])
    reports = export_shared_encoder(
        configs,
        args.output,
        images=args.images,
        tolerance=args.tolerance,
        overwrite=args.overwrite,
    )
    for name, report in reports.items():
        print(f"{name}:\n{report}\n")
    print_size(args.output / "encoder.onnx")
    for name in configs:
        print_size(args.output / f"head_{name}.onnx")


def print_size(path: Path) -> None:
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def export_backbone(args: argparse.Namespace) -> None:
    """Writes a bare backbone as weights. Prints the number of tensors."""
    import qbheat_det.export

    num_tensors, num_images = qbheat_det.export.export_backbone(
        args.weights[0],
        args.output,
        overwrite=args.overwrite,
        num_images=args.recalibrate_bn or 0,
        image_folders=args.images,
        opts=args.opts,
    )
    text = f"{args.output}: {num_tensors} tensors"
    if num_images:
        text += f", recalibrated on {num_images} images"
    print(text)


if __name__ == "__main__":
    main()
