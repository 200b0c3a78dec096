# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where the object queries of MF-DETR look for the boxes that they predict.

Papers: QB-Heat, arXiv:2211.13228, Sec. B.2; attention of decoder queries is shown as in DETR,
arXiv:2005.12872, Fig. 6, here at each of the three scales, of the last block of a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from detectron2.structures import Instances
from torch import Tensor, nn

from qbheat_det.layers import read_attention
from qbheat_det.modeling.detr.mf_detr import MFDETR

_COARSEST = 32  # stride of the first level; each next one has half of it


@dataclass(frozen=True)
class QueryAttention:
    """What one image's most confident queries found, and where they looked.

    Attributes:
        found: n predictions, most confident first, absolute XYXY of the image that the model got;
            ``query`` holds the number of each one's query.
        maps: by stride (32, 16, 8): (n, heads, H, W) of the last block's cross-attention, which
            sums to 1 over the pixels. Its positions lie ``stride`` pixels apart, from the top left.
    """

    found: Instances
    maps: Mapping[int, Tensor]


@torch.no_grad()
def read_queries(model: MFDETR, entry: Mapping[str, Any], count: int) -> QueryAttention:
    """Detects in one image and returns the attention of its ``count`` most confident queries.

    Args:
        model: in evaluation mode.
        entry: of the dataset mapper, "image" (3, H, W).
        count: how many; all where there are fewer.
    """
    last = {
        _COARSEST >> i: f"levels.{i}.{len(cast(nn.ModuleList, level)) - 1}"
        for i, level in enumerate(model.decoder.levels)
    }
    names = {stride: f"{name}.query_layer.cross_attention" for stride, name in last.items()}
    images = model.preprocess_image([dict(entry)])
    features, padding = model.extract_features(images)
    with read_attention(model.decoder, names.values()) as record:
        outputs = model.decoder(features, padding)
    (found,) = model.inference(outputs, images.image_sizes)
    chosen = found.scores.argsort(descending=True, stable=True)[:count]
    found.query = torch.arange(len(found), device=chosen.device)
    fine = features[0]
    maps = {}
    for stride, name in names.items():
        # Each level halves the map above it, rounding up, from stride 8 on.
        size = tuple(-(-length * 8 // stride) for length in fine.shape[-2:])
        (read,) = record[name]
        maps[stride] = read.unflatten((size[0], size[1]))[0].transpose(0, 1)[chosen].cpu()
    return QueryAttention(found=found[chosen].to("cpu"), maps=maps)


def measure_inside(maps: Tensor, boxes: Tensor, stride: int) -> Tensor:
    """Returns the share of attention on positions whose centres lie inside a box.

    Args:
        maps: (n, heads, H, W), sum to 1 over the pixels.
        boxes: (n, 4) XYXY, in pixels of the image.
        stride: pixels between two positions.

    Returns:
        (n,), the mean over heads. A box between the centres of positions has 0.
    """
    height, width = maps.shape[-2:]
    y = (torch.arange(height) + 0.5) * stride
    x = (torch.arange(width) + 0.5) * stride
    x0, y0, x1, y1 = (side[:, None] for side in boxes.unbind(dim=1))
    rows, columns = (y >= y0) & (y < y1), (x >= x0) & (x < x1)
    inside = rows[:, None, :, None] & columns[:, None, None, :]  # (n, 1, H, W)
    return (maps * inside).sum(dim=(2, 3)).mean(dim=1)
