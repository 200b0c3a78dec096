#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Write weights of torchvision or timm under the names of an encoder here (.safetensors), or back.

What a classifier has behind its last map is left out. The new file says which pixels the weights
were trained on; a file of another network, or half a file, is refused. A detector starts from it
with MODEL.WEIGHTS.

--to is an encoder:
  detectron2:resnet50   Detectron2's ResNet: resnet18 to resnet152, resnext50_32x4d,
                        resnext101_32x8d, wide_resnet50_2, wide_resnet101_2
  timm:<model>          any convolutional network of timm, with its own names or torchvision's
                        where these are the same; timm:<model>.<tag> takes the tag's normalisation
or a change of names alone:
  MobileFormer          what timm has trained of mobile_former_285m and the like, for this package
  timm                  weights of this package (Mobile-Former, or timm:<model>), for
                        timm.create_model(…, checkpoint_path=…)

examples:
  # torchvision's ResNet-50, saved with torch.save(model.state_dict(), "resnet50.pth")
  python tools/convert_weights.py --weights resnet50.pth --to detectron2:resnet50 \\
      --output resnet50.safetensors

  # timm's, from the hub's model.safetensors, trained with another normalisation than usual
  python tools/convert_weights.py --weights model.safetensors --to timm:efficientnet_b0 \\
      --output encoder.safetensors --pixel-mean 127.5 127.5 127.5 --pixel-std 127.5 127.5 127.5

  # a classifier here as a model of timm
  python tools/convert_weights.py --weights output/classifier/model_final.safetensors \\
      --to timm --output classifier.safetensors
"""

import argparse
import logging
import sys
from pathlib import Path

import qbheat_det  # noqa: F401  (registers models)
from qbheat_det.core.errors import exit_on_user_error
from qbheat_det.engine.conversion import convert_weights


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--weights", required=True, metavar="FILE", help="weights (.safetensors, .pth)")
    add("--to", required=True, metavar="TARGET", help="an encoder, or a kind of names; see below")
    add("--output", required=True, type=Path, metavar="FILE", help="the new file (.safetensors)")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    for name, what in (("mean", "means"), ("std", "standard deviations")):
        add(
            f"--pixel-{name}",
            nargs=3,
            type=float,
            default=(),
            metavar=("R", "G", "B"),
            help=f"{what} of the channels in 0 … 255 that the weights were trained with",
        )
    return parser.parse_args(argv)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    done = convert_weights(
        args.weights,
        args.output,
        args.to,
        overwrite=args.overwrite,
        pixel_mean=args.pixel_mean,
        pixel_std=args.pixel_std,
    )
    if done.report is not None:
        print(done.report)
    print(f"{args.output}: {done.num_tensors} tensors")
    if done.target is not None:
        keys = {
            **done.target.keys,
            "INPUT.FORMAT": done.info.pixel_format,
            "MODEL.PIXEL_MEAN": f'"{list(done.info.pixel_mean)}"',
            "MODEL.PIXEL_STD": f'"{list(done.info.pixel_std)}"',
        }
        print("a config for it:", " ".join(f"{key} {value}" for key, value in keys.items()))


if __name__ == "__main__":
    main()
