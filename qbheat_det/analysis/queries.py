# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figure "queries": cross-attention of MF-DETR's object queries for the boxes they predict.

Papers: QB-Heat, arXiv:2211.13228, Sec. B.2; attention of decoder queries is shown as in DETR,
arXiv:2005.12872, Fig. 6, here at each of the three scales, of the last block of a scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np
import torch
from detectron2.structures import Instances
from torch import Tensor, nn
from tqdm import tqdm

from qbheat_det.core.figures import Figure, Image, NotApplicable, register_figure
from qbheat_det.data import build_mapper
from qbheat_det.engine.data_sources import read_spread
from qbheat_det.layers import read_attention
from qbheat_det.modeling.detr.mf_detr import MFDETR

from .attention import find_top
from .figure import FigureOptions, run_on_images
from .plotting import RGBImage, chart_image, overlay_map, plot_grid, shrink, to_rgb, to_text
from .run import Run

_COARSEST = 32  # stride of the first level; each next one has half of it
_STRIDES = (32, 16, 8)
_CELL = 200  # pixels
_EXPLANATION = (
    "A row is a predicted box; the colours are the attention of its query in the last block of "
    "each scale, the mean over heads.",
)


@dataclass(frozen=True)
class QueryAttention:
    """The n most confident predictions of one image, and the attention of their queries.

    Boxes are of the model's input; ``maps`` by stride (n, heads, H, W) sum to 1 over the pixels.
    """

    found: Instances
    maps: Mapping[int, Tensor]


@torch.no_grad()
def read_queries(model: MFDETR, entry: Mapping[str, Any], count: int) -> QueryAttention:
    """Returns the attention of the ``count`` most confident queries in one mapped image."""
    names = {
        _COARSEST >> i: f"levels.{i}.{len(cast(nn.ModuleList, level)) - 1}.query_layer"
        ".cross_attention"
        for i, level in enumerate(model.decoder.levels)
    }
    images = model.preprocess_image([dict(entry)])
    features, padding = model.extract_features(images)
    with read_attention(model.decoder, names.values()) as record:
        outputs = model.decoder(features, padding)
    (found,) = model.inference(outputs, images.image_sizes)
    chosen = found.scores.argsort(descending=True, stable=True)[:count]
    maps = {}
    for stride, name in names.items():
        # Each level halves the map above it, rounding up, from stride 8 on.
        height, width = (-(-length * 8 // stride) for length in features[0].shape[-2:])
        (read,) = record[name]
        maps[stride] = read.unflatten(-1, (height, width))[0].transpose(0, 1)[chosen].cpu()
    return QueryAttention(found=found[chosen].to("cpu"), maps=maps)


_Detected = list[tuple[RGBImage, QueryAttention, list[str]]]
"""Of one run, for each image: pixels, attention, names of the predicted classes."""


@register_figure("queries")
def draw_queries(runs: Sequence[Run], options: FigureOptions, *, query_boxes: int = 3) -> Figure:
    """Draws the attention of the queries of the most confident ``query_boxes`` of each image.

    Raises:
        NotApplicable: no run is an MF-DETR.
        UserError: no run is left, one because of an error.
    """
    results = run_on_images(
        runs,
        lambda run, files: _detect(run, files, query_boxes),
        options,
        nothing="no object queries",
    )
    data = {
        label: [
            [
                {"class": name, "score": float(score), "box": box}
                for name, score, box in zip(
                    names, attention.found.scores, attention.found.pred_boxes.tensor, strict=True
                )
            ]
            for _, attention, names in one
        ]
        for label, one in results.found.items()
    }
    images = {f"image_{i + 1}": _draw_image(results.found, i) for i in range(len(results.files))}
    title = "Cross-attention of object queries"
    return results.draw("queries", title, _EXPLANATION, images, runs=data)


def _detect(run: Run, files: Sequence[str], count: int) -> _Detected:
    cfg = run.cfg
    if cfg.MODEL.META_ARCHITECTURE != "MFDETR":
        raise NotApplicable(f"'{run.label}' is a {cfg.MODEL.META_ARCHITECTURE}, not an MFDETR")
    records = [{"file_name": name} for name in files]
    entries = read_spread(records, build_mapper(cfg, is_train=False), len(records))
    model = cast(MFDETR, run.model)
    bar = tqdm(entries, unit="image", desc=f"queries, {run.label}", delay=2, leave=False)
    names, detected = dict(enumerate(cfg.MODEL.CLASS_NAMES)), []
    for entry in bar:
        attention = read_queries(model, entry, count)
        classes = [names.get(k, f"class {k}") for k in attention.found.pred_classes.tolist()]
        pixels = to_rgb(entry["image"], cfg.INPUT.FORMAT).astype(np.uint8)
        detected.append((pixels, attention, classes))
    return detected


def _draw_image(found: Mapping[str, _Detected], index: int) -> Image:
    """Draws the boxes of one image, those of all runs below each other."""
    grid, names = [], []
    for label, one in found.items():
        pixels, attention, classes = one[index]
        image = shrink(pixels, _CELL)
        factor = image.shape[1] / pixels.shape[1]
        for i, name in enumerate(classes):
            box = attention.found.pred_boxes.tensor[i] * factor
            row = [_draw_box(image, box)]
            for stride, maps in attention.maps.items():
                values = maps[i].mean(dim=0).numpy()
                top = find_top([values])
                overlay = overlay_map(image, values, stride=stride * factor, high=top)
                row.append(_draw_box(overlay, box))
            grid.append(row)
            prefix = f"{to_text(label)}\n" if len(found) > 1 else ""
            names.append(f"{prefix}{to_text(name)}\n{float(attention.found.scores[i]):.2f}")
    columns = ["prediction", *(f"stride {stride}" for stride in _STRIDES)]
    chart = plot_grid(grid, column_names=columns, row_names=names)
    return chart_image(chart, caption=f"Queries of image {index + 1}.", format="jpg")


def _draw_box(image: RGBImage, box: Tensor) -> RGBImage:
    """Returns a copy with a box (4,), XYXY in pixels, black and white to be seen on all colours."""
    x0, y0, x1, y1 = (round(value) for value in box.tolist())
    picture = cv2.rectangle(image.copy(), (x0, y0), (x1 - 1, y1 - 1), (0, 0, 0), 3)
    return np.asarray(cv2.rectangle(picture, (x0, y0), (x1 - 1, y1 - 1), (255, 255, 255), 1))
