# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures "attention", of the global tokens of a Mobile-Former, and "queries", of MF-DETR.

Paper: QB-Heat, arXiv:2211.13228, Appendix E, Fig. 13 and 14. It draws four blocks and names 10 and
12 of them; 3 and 6 are the last blocks at strides 4 and 8 in Table 8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import cv2
import numpy as np
import numpy.typing as npt
import torch
from detectron2.structures import Instances
from torch import Tensor, nn
from tqdm import tqdm

from qbheat_det.core.figures import Figure, Image, NotApplicable, register_figure
from qbheat_det.data import build_mapper
from qbheat_det.engine.data_sources import read_spread
from qbheat_det.inference.drawing import RGBImage
from qbheat_det.layers import MobileFormerBlock, read_attention
from qbheat_det.modeling.backbone import MobileFormer
from qbheat_det.modeling.detr.mf_detr import MFDETR

from . import plotting
from .figure import FigureOptions, batch_images, crop_squares, find_size, run_on_images
from .run import Run

Bridge = Literal["to_former", "to_mobile"]
Heads = Literal["mean", "apart"]

PAPER_BLOCKS = (3, 6, 10, 12)
"""Blocks of the paper's figures; its networks have twelve."""
_PAPER_SIZE = 256  # image side in pre-training, Table 9
_ABOVE = 0.05  # share of a map's attention above the last color
_CELL = 104  # pixels
_BRIDGES: dict[Bridge, str] = {"to_former": "Mobile→Former", "to_mobile": "Mobile←Former"}
_EXPLANATION = (
    "Mobile→Former shows where each token attends (Fig. 13 of the paper), in multiples of uniform "
    "attention. Mobile←Former shows which tokens each pixel attends to (Fig. 14). Identical tokens "
    "have identical maps. Tokens of an untrained network attend everywhere.",
)
_COARSEST = 32  # stride of the first level; each next level halves it
_STRIDES = (32, 16, 8)
_QUERY_CELL = 200  # pixels
_QUERY_EXPLANATION = (
    "Each row is a predicted box. Colors show the attention of its query in the last block of each "
    "scale, averaged over heads.",
)


@dataclass(frozen=True)
class BlockAttention:
    """The attention of both bridges of one block, numbered from 1 as in Table 8.

    ``to_former`` (N, heads, M, H, W) belongs to Mobile→Former and sums to 1 over the pixels;
    ``to_mobile`` (N, heads, M, H', W') belongs to Mobile←Former and sums to 1 over the M tokens.
    """

    number: int
    to_former: Tensor
    to_mobile: Tensor
    to_former_stride: int
    to_mobile_stride: int


def find_mobile_former(model: nn.Module) -> MobileFormer | None:
    """Returns the Mobile-Former of a model, or None."""
    return next((part for part in model.modules() if isinstance(part, MobileFormer)), None)


def list_blocks(backbone: MobileFormer) -> dict[int, tuple[str, int, int]]:
    """Returns name, input and output stride of each block with tokens, by number from 1."""
    found = {}
    stride = 2  # of the stem
    blocks = [
        (f"stages.{i}.{j}", block)
        for i, stage in enumerate(backbone.stages)
        for j, block in enumerate(cast(nn.ModuleList, stage))
    ]
    for number, (name, block) in enumerate(blocks, start=1):
        before, stride = stride, stride * cast(int, block.stride)
        if isinstance(block, MobileFormerBlock):
            found[number] = (name, before, stride)
    return found


def choose_blocks(backbone: MobileFormer) -> list[int]:
    """Returns the paper's blocks for a network of twelve, else the last at each resolution."""
    blocks = list_blocks(backbone)
    if sum(len(cast(nn.ModuleList, stage)) for stage in backbone.stages) == max(PAPER_BLOCKS):
        return [number for number in PAPER_BLOCKS if number in blocks]
    return list({stride: number for number, (_, _, stride) in blocks.items()}.values())


@torch.no_grad()
def read_bridges(backbone: MobileFormer, images: Tensor) -> list[BlockAttention]:
    """Returns the attention of each block with tokens, on the CPU, for images (N, 3, H, W)."""
    blocks = list_blocks(backbone)
    bridges = [
        f"{name}.{bridge}"
        for name, _, _ in blocks.values()
        for bridge in ("mobile_to_former", "former_to_mobile")
    ]
    with read_attention(backbone, bridges) as record:
        backbone(images)
    return [
        BlockAttention(
            number=number,
            to_former=record[f"{name}.mobile_to_former"][-1].cpu(),
            to_mobile=record[f"{name}.former_to_mobile"][-1].cpu(),
            to_former_stride=before,
            to_mobile_stride=after,
        )
        for number, (name, before, after) in blocks.items()
    ]


def find_top(maps: Sequence[npt.NDArray[np.float32]]) -> float:
    """Returns the value of the last color; at most 5 % of a map's attention lies above it."""
    tops = []
    for values in maps:
        falling = np.sort(values, axis=None)[::-1]
        mass = np.cumsum(falling, dtype=np.float64)
        tops.append(float(falling[np.searchsorted(mass, _ABOVE * mass[-1])]))
    return max(tops)


_Attention = list[tuple[RGBImage, list[BlockAttention]]]
"""For each image of one run: its pixels and the blocks to draw."""


@register_figure("attention")
def draw_attention(
    runs: Sequence[Run], options: FigureOptions, *, attention_heads: Heads = "mean"
) -> Figure:
    """Draws both bridges of the blocks of ``choose_blocks`` over images.

    ``attention_heads`` selects the mean over heads, or one row per head. Raises ``NotApplicable``
    if no run has a Mobile-Former with tokens.
    """
    size = find_size(runs, _PAPER_SIZE)
    results = run_on_images(
        runs,
        lambda run, files: _attend(run, files, size),
        options,
        nothing="no attention of tokens",
    )
    found = results.found
    blocks = {label: [block.number for block in one[0][1]] for label, one in found.items()}
    images = {
        f"{bridge}_{index + 1}": _draw_image(found, bridge, index, attention_heads)
        for bridge in _BRIDGES
        for index in range(len(results.files))
    }
    title = "Attention between tokens and pixels"
    return results.draw("attention", title, _EXPLANATION, images, size=size, blocks=blocks)


def _attend(run: Run, files: Sequence[str], size: int) -> _Attention:
    backbone = find_mobile_former(run.model)
    numbers = choose_blocks(backbone) if backbone is not None else []
    if backbone is None or not numbers:
        name = run.cfg.MODEL.BACKBONE.NAME
        raise NotApplicable(f"'{run.label}' has no Mobile-Former with tokens, but '{name}'")
    entries = crop_squares(run.cfg, files, size)
    drawn = []
    for entry in tqdm(entries, unit="image", desc=f"attention, {run.label}", delay=2, leave=False):
        # One by one, because the maps of all blocks take much memory for large images.
        (image,) = batch_images(run.model, [entry], "")
        found = [one for one in read_bridges(backbone, image) if one.number in numbers]
        pixels = plotting.to_rgb(entry["image"], run.cfg.INPUT.FORMAT).astype(np.uint8)
        drawn.append((pixels, found))
    return drawn


def _draw_image(found: Mapping[str, _Attention], bridge: Bridge, index: int, heads: Heads) -> Image:
    """Draws one image with the rows of all runs below each other."""
    grid, names = [], []
    for label, one in found.items():
        pixels, blocks = one[index]
        image = plotting.shrink(pixels, _CELL)
        factor = image.shape[1] / pixels.shape[1]
        for block in blocks:
            for name, maps, stride in _list_maps(block, bridge, heads):
                # Uniform attention gets the middle color.
                top = min(1.0, 2 / len(maps))
                if bridge == "to_former":
                    top = max(2.0, find_top(maps))
                overlays = [
                    plotting.overlay_map(image, m, stride=stride * factor, high=top) for m in maps
                ]
                grid.append([image, *overlays])
                prefix = f"{plotting.to_text(label)}\n" if len(found) > 1 else ""
                names.append(f"{prefix}{name}\n0 to {top:.2g}")
    columns = ["image", *(f"token {i + 1}" for i in range(max(map(len, grid)) - 1))]
    chart = plotting.plot_grid(grid, column_names=columns, row_names=names)
    return plotting.chart_image(
        chart, caption=f"{_BRIDGES[bridge]}, image {index + 1}.", format="jpg"
    )


def _list_maps(
    block: BlockAttention, bridge: Bridge, heads: Heads
) -> list[tuple[str, list[npt.NDArray[np.float32]], int]]:
    """Returns name, maps (H, W) of the tokens and their stride, for the mean or for each head."""
    weights, stride = block.to_mobile[0].float(), block.to_mobile_stride
    if bridge == "to_former":
        weights, stride = block.to_former[0].float(), block.to_former_stride
        weights = weights * weights[0, 0].numel()  # multiples of uniform attention
    if heads == "mean":
        weights, rows = weights.mean(dim=0, keepdim=True), [f"stride {stride}"]
    else:
        rows = [f"head {i + 1}" for i in range(len(weights))]
    return [(f"block {block.number}, {row}", list(maps.numpy()), stride)
            for row, maps in zip(rows, weights, strict=True)]  # fmt: skip


@dataclass(frozen=True)
class QueryAttention:
    """The n most confident predictions of one image, and the attention of their queries.

    Boxes are in pixels of the model's input; ``maps`` (n, heads, H, W) by stride sum to 1 over the
    pixels.
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
        # Each level halves the map of the finer level, rounding up, from stride 8.
        height, width = (-(-length * 8 // stride) for length in features[0].shape[-2:])
        (read,) = record[name]
        maps[stride] = read.unflatten(-1, (height, width))[0].transpose(0, 1)[chosen].cpu()
    return QueryAttention(found=found[chosen].to("cpu"), maps=maps)


_Detected = list[tuple[RGBImage, QueryAttention, list[str]]]
"""For each image of one run: pixels, attention, names of the predicted classes."""


@register_figure("queries")
def draw_queries(runs: Sequence[Run], options: FigureOptions, *, query_boxes: int = 3) -> Figure:
    """Draws the attention of the queries of the most confident ``query_boxes`` of each image.

    Raises ``NotApplicable`` if no run is an MF-DETR.
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
    images = {f"image_{i + 1}": _draw_queries(results.found, i) for i in range(len(results.files))}
    title = "Cross-attention of object queries"
    return results.draw("queries", title, _QUERY_EXPLANATION, images, runs=data)


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
        pixels = plotting.to_rgb(entry["image"], cfg.INPUT.FORMAT).astype(np.uint8)
        detected.append((pixels, attention, classes))
    return detected


def _draw_queries(found: Mapping[str, _Detected], index: int) -> Image:
    """Draws the boxes of one image with the rows of all runs below each other."""
    grid, names = [], []
    for label, one in found.items():
        pixels, attention, classes = one[index]
        image = plotting.shrink(pixels, _QUERY_CELL)
        factor = image.shape[1] / pixels.shape[1]
        for i, name in enumerate(classes):
            box = attention.found.pred_boxes.tensor[i] * factor
            row = [_draw_box(image, box)]
            for stride, maps in attention.maps.items():
                values = maps[i].mean(dim=0).numpy()
                top = find_top([values])
                overlay = plotting.overlay_map(image, values, stride=stride * factor, high=top)
                row.append(_draw_box(overlay, box))
            grid.append(row)
            prefix = f"{plotting.to_text(label)}\n" if len(found) > 1 else ""
            names.append(
                f"{prefix}{plotting.to_text(name)}\n{float(attention.found.scores[i]):.2f}"
            )
    columns = ["prediction", *(f"stride {stride}" for stride in _STRIDES)]
    chart = plotting.plot_grid(grid, column_names=columns, row_names=names)
    return plotting.chart_image(chart, caption=f"Queries of image {index + 1}.", format="jpg")


def _draw_box(image: RGBImage, box: Tensor) -> RGBImage:
    """Returns a copy with a box (4,), XYXY in pixels, in black and white for contrast."""
    x0, y0, x1, y1 = (round(value) for value in box.tolist())
    picture = cv2.rectangle(image.copy(), (x0, y0), (x1 - 1, y1 - 1), (0, 0, 0), 3)
    return np.asarray(cv2.rectangle(picture, (x0, y0), (x1 - 1, y1 - 1), (255, 255, 255), 1))
