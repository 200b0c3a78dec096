#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Write trained weights as one file for other runtimes: ONNX, TorchScript or torch.export.

Resize, normalisation, network, reading of boxes and suppression of overlaps are all in the file,
and so are the names of the classes. It takes images (N, H, W, 3) as bytes, of any number and size.
The file is kept only if it gives what PyTorch gives, at batch sizes 1, 2 and 8 on real images; how
far the two are apart is printed. docs/export.md says what the outputs are and how to run the file.

examples:
  # a detector for onnxruntime, compared on the test set of its config
  python tools/export.py --weights output/run/model_final.safetensors --output detector.onnx
  python tools/predict.py --weights detector.onnx --input photos/ --output output/pictures

  # as TorchScript, or as a program of torch.export, compared on images of one's own
  python tools/export.py --weights output/run/model_final.safetensors --images photos/ \\
      --output detector.ts
  python tools/export.py --weights output/run/model_final.safetensors --images photos/ \\
      --output detector.pt2

  # smaller images inside: less accurate, faster
  python tools/export.py --weights output/run/model_final.safetensors --output small.onnx \\
      INPUT.MIN_SIZE_TEST 480

  # the feature maps of a pre-trained backbone
  python tools/export.py --weights output/pretraining/model_final.safetensors \\
      --images photos/ --output backbone.onnx

  # several heads on one frozen backbone: encoder.onnx, head_fish.onnx and head_boats.onnx, so that
  # the encoder runs once an image
  python tools/export.py --split --output output/shared --images photos/ \\
      --weights fish=output/fish/model_final.safetensors \\
      --weights boats=output/boats/model_final.safetensors
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

# What PyTorch says of its own exporters is of no use to people who export.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", message="torch.meshgrid")

import qbheat_det  # noqa: E402, F401  (registers models and data sets)
from qbheat_det.checkpoint import load_run_config  # noqa: E402
from qbheat_det.core.errors import UserError, exit_on_user_error  # noqa: E402
from qbheat_det.engine.exporting.export import export_model  # noqa: E402
from qbheat_det.engine.exporting.formats import SUFFIXES  # noqa: E402
from qbheat_det.engine.exporting.split_export import export_split, name_heads  # noqa: E402


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--weights",
        required=True,
        action="append",
        metavar="FILE",
        help="trained weights (.safetensors, .pth, qbheat://NAME); with --split again for each "
        "head, as NAME=FILE or FILE",
    )
    add("--split", action="store_true", help="write encoder and heads as files of their own")
    add("--config-file", help="YAML of the model (default: the one inside the weights, or beside)")
    add("--format", choices=list(SUFFIXES), help="default: what the ending of --output says")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help=".onnx, .ts or .pt2, or with --split a folder",
    )
    add("--overwrite", action="store_true", help="replace the file, or an earlier split")
    add(
        "--images",
        nargs="+",
        default=[],
        metavar="PATH",
        help="images and folders to compare on (default: the config's test set, or the toy set)",
    )
    add(
        "--tolerance",
        type=float,
        metavar="T",
        help="how far scores may be from PyTorch's, and boxes in parts of the image's longer side "
        "(default: 1e-4)",
    )
    add("opts", nargs="*", metavar="KEY VALUE", help="config overrides, last")
    args = parser.parse_args(argv)
    if args.tolerance is not None and not args.tolerance > 0:
        parser.error("--tolerance is above 0: files of another runtime never agree to the bit")
    if len(args.weights) > 1 and not args.split:
        parser.error("several --weights are for --split, which exports heads that share an encoder")
    if args.split and args.format not in (None, "onnx"):
        parser.error("--split writes ONNX")
    return args


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if args.split:
        export_parts(args)
        return
    report = export_model(
        load_run_config(args.weights[0], args.config_file, device="cpu", opts=args.opts),
        args.output,
        format=args.format or format_of(args.output),
        images=args.images,
        tolerance=args.tolerance,
        overwrite=args.overwrite,
    )
    print(report)
    print(f"{args.output}: {args.output.stat().st_size / 2**20:.1f} MiB")


def export_parts(args: argparse.Namespace) -> None:
    reports = export_split(
        {
            name: load_run_config(file, args.config_file, device="cpu", opts=args.opts)
            for name, file in name_heads(args.weights).items()
        },
        args.output,
        images=args.images,
        tolerance=args.tolerance,
        overwrite=args.overwrite,
    )
    for name, report in reports.items():
        print(f"{name}:\n{report}\n")
    for path in (args.output / "encoder.onnx", *(args.output / f"head_{n}.onnx" for n in reports)):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def format_of(output: Path) -> str:
    for name, suffixes in SUFFIXES.items():
        if output.suffix.lower() in suffixes:
            return name
    raise UserError(f"--output '{output}' ends in none of .onnx, .ts and .pt2: name --format")


if __name__ == "__main__":
    main()
