# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Names of a ResNet's tensors: torchvision's, which timm shares, for each of Detectron2's.

Detectron2 holds the norm of a convolution inside it, and counts stages by "res2" to "res5".
"""

import re

_BLOCK = re.compile(r"res(\d+)\.(\d+)\.(conv(\d)|shortcut)\.(norm\.)?(\w+)")
_STEM = re.compile(r"stem\.conv1\.(norm\.)?(\w+)")


def torchvision_name(name: str) -> str:
    """Returns what torchvision and timm call a tensor of Detectron2's ResNet.

    Args:
        name: such as "res2.0.conv1.norm.weight".

    Returns:
        Such as "layer1.0.bn1.weight".

    Raises:
        ValueError: the name is none of a ResNet with blocks of two or three convolutions.
    """
    if found := _STEM.fullmatch(name):
        norm, kind = found.groups()
        return f"{'bn1' if norm else 'conv1'}.{kind}"
    if not (found := _BLOCK.fullmatch(name)):
        raise ValueError(f"'{name}' is no tensor of Detectron2's ResNet")
    stage, block, _, number, norm, kind = found.groups()
    if number is None:
        part = f"downsample.{1 if norm else 0}"
    else:
        part = f"{'bn' if norm else 'conv'}{number}"
    return f"layer{int(stage) - 1}.{block}.{part}.{kind}"
