#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Write torchvision's weights under the names of an encoder here (.safetensors).

The classifier's head is left out. The new file holds the pixel statistics of the training; a file
of another network, or an incomplete one, is refused. A detector starts from it with MODEL.WEIGHTS.
timm's own files need no conversion: MODEL.WEIGHTS takes them for the encoder timm:<model>.

--to is Detectron2's ResNet: detectron2:resnet18 to resnet152, resnext50_32x4d, resnext101_32x8d,
wide_resnet50_2, wide_resnet101_2.

examples:
  # torchvision's ResNet-50, saved with torch.save(model.state_dict(), "resnet50.pth")
  python tools/convert_weights.py --weights resnet50.pth --to detectron2:resnet50 \\
      --output resnet50.safetensors
"""

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # --help does without the package
    from detectron2.modeling import Backbone
    from torch import Tensor

    from qbheat_det.checkpoint import LoadReport

D2_PREFIX = "detectron2:"
# torchvision's names of networks that Detectron2's ResNet equals with STRIDE_IN_1X1 off: depth,
# groups and width of a group.
RESNETS: dict[str, tuple[int, int, int]] = {
    "resnet18": (18, 1, 64),
    "resnet34": (34, 1, 64),
    "resnet50": (50, 1, 64),
    "resnet101": (101, 1, 64),
    "resnet152": (152, 1, 64),
    "resnext50_32x4d": (50, 32, 4),
    "resnext101_32x8d": (101, 32, 8),
    "wide_resnet50_2": (50, 1, 128),
    "wide_resnet101_2": (101, 1, 128),
}
# Statistics of ImageNet's channels, RGB in [0, 255].
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_BLOCK = re.compile(r"res(\d+)\.(\d+)\.(conv(\d)|shortcut)\.(norm\.)?(\w+)")
_STEM = re.compile(r"stem\.conv1\.(norm\.)?(\w+)")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--weights", required=True, metavar="FILE", help="weights (.safetensors, .pth)")
    add("--to", required=True, metavar="TARGET", help="an encoder, such as detectron2:resnet50")
    add("--output", required=True, type=Path, metavar="FILE", help="the new file (.safetensors)")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    for name, what in (("mean", "means"), ("std", "standard deviations")):
        add(
            f"--pixel-{name}",
            nargs=3,
            type=float,
            default=(),
            metavar=("R", "G", "B"),
            help=f"{what} of the channels, in [0, 255], that the weights were trained with",
        )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from qbheat_det.core.errors import exit_on_user_error

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    exit_on_user_error(convert)(args)


def convert(args: argparse.Namespace) -> None:
    """Converts the file and prints the account of its tensors and the keys of a config."""
    report, keys = convert_weights(
        args.weights,
        args.output,
        args.to,
        overwrite=args.overwrite,
        pixel_mean=args.pixel_mean,
        pixel_std=args.pixel_std,
    )
    print(report)
    values = {k: f'"{list(v)}"' if isinstance(v, tuple) else v for k, v in keys.items()}
    print("a config for it:", " ".join(f"{key} {value}" for key, value in values.items()))


def convert_weights(
    weights: str,
    output: Path,
    to: str,
    *,
    overwrite: bool = False,
    pixel_mean: Sequence[float] = (),
    pixel_std: Sequence[float] = (),
) -> "tuple[LoadReport, dict[str, Any]]":
    """Writes torchvision's weights under the names of an encoder.

    Args:
        weights: ``.safetensors``, or PyTorch's format with tensors only.
        output: a ``.safetensors``.
        to: ``D2_PREFIX`` and one of ``RESNETS``.
        overwrite: whether ``output`` may exist.
        pixel_mean: of the training images, RGB in [0, 255]; empty for ImageNet's.
        pixel_std: as ``pixel_mean``.

    Returns:
        The account of the tensors, and the keys of a config that build the encoder.

    Raises:
        UserError: the file cannot be read, is of another network, or cannot be written.
    """
    from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
    from qbheat_det.core.errors import UserError

    if output.suffix != ".safetensors" or output.is_dir():
        raise UserError(f"'{output}' is no name for the new file: it must end in .safetensors")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: name another file, or ask for it with --overwrite")
    if pixel_mean and 0 <= min(pixel_mean) and max(pixel_mean) <= 1:
        raise UserError(f"--pixel-mean {list(pixel_mean)} is of images in [0, 1]: multiply by 255")
    if to not in {D2_PREFIX + name for name in RESNETS}:
        raise UserError(
            f"'{to}' is no encoder to convert weights for, such as {D2_PREFIX}resnet50 or one of "
            f"{', '.join(RESNETS)}; timm's files fit the encoder timm:<model> as they are"
        )
    encoder, keys = build_resnet(to.removeprefix(D2_PREFIX))
    fitting, report = _fit(weights, read_weights(weights)[0], encoder, to)
    mean, std = tuple(pixel_mean) or _MEAN, tuple(pixel_std) or _STD
    info = WeightsInfo(pixel_format="RGB", pixel_mean=mean, pixel_std=std)
    save_weights(str(output), fitting, info)
    pixels = {"INPUT.FORMAT": "RGB", "MODEL.PIXEL_MEAN": mean, "MODEL.PIXEL_STD": std}
    return report, {**keys, **pixels}


def torchvision_name(name: str) -> str:
    """Returns "layer1.0.bn1.weight" for "res2.0.conv1.norm.weight" of Detectron2's ResNet."""
    if found := _STEM.fullmatch(name):
        norm, kind = found.groups()
        return f"{'bn1' if norm else 'conv1'}.{kind}"
    found = _BLOCK.fullmatch(name)
    assert found, name
    stage, block, _, number, norm, kind = found.groups()
    convolution = f"{'bn' if norm else 'conv'}{number}"
    part = convolution if number else f"downsample.{1 if norm else 0}"
    return f"layer{int(stage) - 1}.{block}.{part}.{kind}"


def build_resnet(name: str) -> "tuple[Backbone, dict[str, Any]]":
    """Builds one of ``RESNETS`` without values; returns it with the keys of its config."""
    import torch
    from detectron2.modeling import build_backbone

    from qbheat_det.config import get_cfg

    depth, groups, width = RESNETS[name]
    keys = {
        "MODEL.BACKBONE.NAME": "build_resnet_backbone",
        "MODEL.RESNETS.DEPTH": depth,
        "MODEL.RESNETS.NUM_GROUPS": groups,
        "MODEL.RESNETS.WIDTH_PER_GROUP": width,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 64 if depth < 50 else 256,
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
    }
    cfg = get_cfg()
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    with torch.device("meta"):  # only names and shapes are needed
        return build_backbone(cfg), keys


def _fit(
    weights: str, state: "Mapping[str, Tensor]", encoder: "Backbone", to: str
) -> "tuple[dict[str, Tensor], LoadReport]":
    from qbheat_det.checkpoint import fit_weights
    from qbheat_det.core.errors import UserError

    own = encoder.state_dict()
    foreign = {name: torchvision_name(name) for name in own}
    theirs = {foreign[name]: tensor for name, tensor in own.items()}
    fitting, report = fit_weights(state, theirs, file=weights, optional_modules=["fc"])
    empty = [name for name, group in report.groups.items() if group.num_tensors and group.is_new]
    errors = report.find_errors(new_parts=True) + ([f"no {', '.join(empty)}"] if empty else [])
    if errors:
        raise UserError(f"'{weights}' is no {to}: {'; '.join(errors)}")
    return {name: fitting[key] for name, key in foreign.items() if key in fitting}, report


if __name__ == "__main__":
    main()
