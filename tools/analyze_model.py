#!/usr/bin/env python
# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Count multiply-adds and parameters of the paper's models, or of the detector in a config.

The paper is Self-Supervised Learning based on Heat Equation, arXiv:2211.13228, with Tables 1, 5, 6,
7, 14 and 15. It does not state its counting rules. Two rules (CountingRule in the package) give
most of the printed numbers: EXT for detectors and linear classifiers, and CORE for transformer
classifiers. Parameters of detection backbones exclude BatchNorm's scale and offset, which are
buffers in frozen backbones.

examples:
  python tools/analyze_model.py --all
  python tools/analyze_model.py --config-file coco/mf_detr_211_285M_probe.yaml --size 640 640
"""

import argparse
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from math import ceil
from pathlib import Path

import torch
from arguments import make_parser
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from fvcore.nn import parameter_count
from tabulate import tabulate
from torch import nn

from qbheat_det.config import get_cfg, load_config
from qbheat_det.core.errors import exit_on_user_error
from qbheat_det.core.files import write_atomically
from qbheat_det.evaluation.complexity import (
    CountingRule,
    count_detector_madds,
    count_madds,
    count_parameters,
)
from qbheat_det.modeling.backbone import (
    MOBILE_FORMER_ARCHS,
    MobileFormer,
    build_mobile_former_fpn_backbone,
)
from qbheat_det.modeling.classification import LinearDecoder, TransformerDecoder
from qbheat_det.modeling.detr import MFDecoder

DETECTION_SIZE = (800, 1333)
CLASSIFICATION_SIZE = (224, 224)
DECODER_DIMS = {"3.7G": 768, "1.0G": 384, "285M": 192}
"""Widths of the "tran" classifiers (Table 11)."""

# The numbers that the paper prints. They are strings, because a count matches if it is equal after
# rounding to the printed digits. Pairs are multiply-adds in G and parameters in M, by variant.
_LINEAR_MADDS = {"285M": ("285", "M"), "1.0G": ("1.0", "G"), "3.7G": ("3.7", "G")}
_LINEAR_PARAMS = {"285M": "5.8", "1.0G": "13.5"}
_BACKBONE = {"3.7G": ("77.5", "25.0"), "1.0G": ("20.4", "11.7"), "285M": ("5.6", "4.9")}
# By the numbers of blocks at the three scales.
_MF_DECODER = {
    (5, 2, 2): {"3.7G": ("34.6", "19.4"), "1.0G": ("32.3", "18.6"), "285M": ("31.1", "18.2")},
    (2, 1, 1): {"3.7G": ("15.7", "9.2"), "1.0G": ("13.4", "8.4"), "285M": ("12.2", "8.0")},
}
# By (number of the table, depth).
_TRANSFORMER = {
    (6, 1): {"285M": ("0.4", "6"), "1.0G": ("1.4", "15"), "3.7G": ("5.5", "35")},
    (15, 4): {"285M": ("0.7", "7"), "1.0G": ("2.6", "20"), "3.7G": ("9.9", "57")},
}
# RetinaNet: multiply-adds including the backbone, parameters, and the input of P6 for which
# multiply-adds match. No single input matches for all three sizes.
_RETINANET = {
    "3.7G": ("237.7", "61.4", "s16_expanded"),
    "1.0G": ("178.1", "17.2", None),
    "285M": ("163.1", "9.5", "s16"),
}
_ALL = "all parameters"
_NO_BN = "parameters of the backbone without BatchNorm's scale and offset"
_EXT = "MAdds by EXT"
_CORE = "MAdds by CORE"


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters and multiply-adds of a model.

    Attributes:
        params: all parameters.
        params_no_bn: parameters without BatchNorm's scale and offset.
        core, ext: multiply-adds by the rules CORE and EXT.
    """

    params: int
    params_no_bn: int
    core: int
    ext: int


@cache
def backbone_counts(variant: str) -> Counts:
    """Counts the detection backbone at 800x1333, up to the last 1x1 convolution."""
    return count(build_backbone(variant), torch.zeros(1, 3, *DETECTION_SIZE))


@cache
def classifier_counts(variant: str, depth: int) -> Counts:
    """Counts encoder and 1000-class decoder at 224x224. ``depth`` 0 means a linear decoder."""
    backbone = build_backbone(variant)
    shape = backbone.output_shape()
    decoder: nn.Module
    if depth:
        dim = DECODER_DIMS[variant]
        decoder = TransformerDecoder(input_shape=shape, num_classes=1000, dim=dim, depth=depth)
    else:
        decoder = LinearDecoder(input_shape=shape, num_classes=1000)
    model = nn.Sequential(OrderedDict(encoder=backbone, decoder=decoder))
    return count(model, torch.zeros(1, 3, *CLASSIFICATION_SIZE))


@cache
def mf_decoder_counts(variant: str, num_blocks: tuple[int, int, int]) -> Counts:
    """Counts MF-DETR's decoder with 100 queries and 91 classes for an 800x1333 image."""
    outputs = build_backbone(variant).output_shape()
    maps = [outputs["s8"], outputs["s16_expanded"]]
    decoder = MFDecoder(input_shape=maps, num_classes=91, num_blocks=num_blocks)
    features = []
    for spec in maps:
        height, width = map_size(DETECTION_SIZE, spec.stride or 1)
        features.append(torch.zeros(1, spec.channels or 0, height, width))
    return count(decoder, features)


@cache
def retinanet_counts(variant: str) -> Counts:
    """Counts RetinaNet's pyramid and head, without padding and without the multiply-adds of P6."""
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.MOBILE_FORMER.VARIANT = variant
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
    pyramid = build_mobile_former_fpn_backbone(cfg, ShapeSpec(channels=3))
    levels = [ShapeSpec(channels=256)] * 5
    head = RetinaNetHead(input_shape=levels, num_classes=80, num_anchors=9, conv_dims=[256] * 4)
    p3, p4, p5, p6, p7 = pyramid_positions(DETECTION_SIZE)
    to_p5, _, to_p7 = pyramid.top_block.convs
    madds = (
        convolution_madds([pyramid.fpn_lateral3, pyramid.fpn_output3], p3)
        + convolution_madds([pyramid.fpn_lateral4, pyramid.fpn_output4], p4)
        + convolution_madds([to_p5], p5)
        + convolution_madds([to_p7], p7)
        + convolution_madds([head], p3 + p4 + p5 + p6 + p7)
    )
    # The pyramid contains the backbone, which the paper does not count.
    params = count_parameters(pyramid) - count_parameters(pyramid.bottom_up)
    params += count_parameters(head)
    return Counts(params=params, params_no_bn=params, core=madds, ext=madds)


def pyramid_positions(size: tuple[int, int]) -> list[int]:
    """Returns the numbers of positions of P3 … P7 for an image of ``size`` (H, W)."""
    maps = [map_size(size, 2**level) for level in range(3, 8)]
    return [height * width for height, width in maps]


def convolution_madds(modules: Iterable[nn.Module], positions: int) -> int:
    """Returns the multiply-adds of the convolutions in ``modules`` at ``positions`` positions.

    A convolution uses each of its weights once per position.
    """
    num_weights = 0
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                num_weights += layer.weight.numel()
    return positions * num_weights


@dataclass(frozen=True)
class PaperCell:
    """A number in a table of the paper, and our count.

    Attributes:
        table: number of the table.
        cell: what is counted.
        unit: "G" or "M", the unit of both numbers.
        paper: the printed number.
        ours: our count, by ``rule``.
        match: whether our count rounds to the printed number.
        rule: what our count includes.
    """

    table: int
    cell: str
    unit: str
    paper: float
    ours: float
    match: bool
    rule: str


def compare_with_paper() -> list[PaperCell]:
    """Builds all models of the paper and counts them, which takes a minute on one core."""
    cells = [*list_classifiers(), *list_detectors()]
    return [compare(*cell) for cell in sorted(cells, key=lambda cell: cell[0])]


Cell = tuple[int, str, str, str, int, str]
"""(table, name, printed number, unit, our count, rule)."""


def list_classifiers() -> Iterator[Cell]:
    """Yields the cells about classifiers: Tables 1, 6 and 15."""
    for variant, (printed, unit) in _LINEAR_MADDS.items():
        c = classifier_counts(variant, depth=0)
        where = "lin"
        if variant == "3.7G":
            where = "Section 6, not in the table"
        yield 1, f"MF-{variant} MAdds ({where})", printed, unit, c.ext, _EXT
        if variant in _LINEAR_PARAMS:
            params = _LINEAR_PARAMS[variant]
            yield 1, f"MF-{variant} params (lin)", params, "M", c.params, _ALL
    for (table, depth), rows in _TRANSFORMER.items():
        for variant, (madds, params) in rows.items():
            c = classifier_counts(variant, depth)
            name = f"MF-{variant} + tran-{depth}"
            yield table, f"{name} MAdds", madds, "G", c.core, _CORE
            yield table, f"{name} params", params, "M", c.params, _ALL


def list_detectors() -> Iterator[Cell]:
    """Yields the cells about detectors: Tables 5, 7 and 14."""
    for variant, (madds, params) in _BACKBONE.items():
        c = backbone_counts(variant)
        yield 5, f"backbone MF-{variant} MAdds", madds, "G", c.ext, _EXT
        yield 5, f"backbone MF-{variant} params", params, "M", c.params_no_bn, _NO_BN
    for num_blocks, rows in _MF_DECODER.items():
        for variant, (madds, params) in rows.items():
            c = mf_decoder_counts(variant, num_blocks)
            name = f"MF-Dec-{''.join(map(str, num_blocks))} on MF-{variant}"
            yield 5, f"{name} MAdds", madds, "G", c.ext, _EXT
            yield 5, f"{name} params", params, "M", c.params, _ALL
    backbone = backbone_counts("3.7G")
    decoder = mf_decoder_counts("3.7G", (5, 2, 2))
    yield 7, "QB-MF-DETR MAdds", "112", "G", backbone.ext + decoder.ext, _EXT
    yield 7, "QB-MF-DETR params", "44", "M", backbone.params_no_bn + decoder.params, _NO_BN
    for variant, (madds, params, p6_from) in _RETINANET.items():
        c = retinanet_counts(variant)
        total = backbone_counts(variant).ext + c.core
        rule = "no P6"
        if p6_from:
            model = MobileFormer(arch=MOBILE_FORMER_ARCHS[variant], out_features=(p6_from,))
            channels = model.output_shape()[p6_from].channels
            _, _, _, p6_positions, _ = pyramid_positions(DETECTION_SIZE)
            total += 3 * 3 * channels * 256 * p6_positions  # a 3x3 convolution to 256 channels
            rule = f"P6 from {channels} channels"
        name = f"RetinaNet on MF-{variant}"
        yield 14, f"{name} MAdds, backbone included", madds, "G", total, f"{_EXT}, {rule}"
        rule = f"{_ALL}, P6 from 256 channels"
        yield 14, f"{name} params, backbone excluded", params, "M", c.params, rule


def compare(table: int, name: str, printed: str, unit: str, ours: int, rule: str) -> PaperCell:
    """Compares the count ``ours`` with a printed number, to as many digits as are printed."""
    _, _, decimals = printed.partition(".")
    scaled = ours / {"G": 10**9, "M": 10**6}[unit]
    match = f"{scaled:.{len(decimals)}f}" == printed
    paper = float(printed) if decimals else int(printed)
    return PaperCell(table, name, unit, paper, scaled, match, rule)


def build_backbone(variant: str) -> MobileFormer:
    """Builds the backbone with the maps and tokens that decoders read."""
    outputs = ("s8", "s16_expanded", "tokens")
    return MobileFormer(arch=MOBILE_FORMER_ARCHS[variant], out_features=outputs)


def count(model: nn.Module, inputs: object) -> Counts:
    """Counts a model for one input."""
    madds = count_madds(model, inputs)
    return Counts(
        params=count_parameters(model),
        params_no_bn=count_parameters(model, batch_norm_affine=False),
        core=madds.total(CountingRule.CORE),
        ext=madds.total(CountingRule.EXT),
    )


def map_size(size: Sequence[int], stride: int) -> tuple[int, int]:
    """Returns the height and width of the map of an image of ``size`` (H, W)."""
    height, width = size
    return ceil(height / stride), ceil(width / stride)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all models of the paper's tables")
    which.add_argument("--config-file", metavar="F", help="YAML of a detector")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells of the tables")
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1333), metavar=("H", "W"))
    parser.add_argument("--depth", type=int, default=2, help="module levels to list (default: 2)")
    parser.add_overrides()
    args = parser.parse_args(argv)
    if min(args.size) < 32:
        parser.error("--size is at least 32 x 32 pixels")
    if args.json and not args.all:
        parser.error("--json needs --all")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    exit_on_user_error(analyze)(args)


def analyze(args: argparse.Namespace) -> None:
    """Prints one of the two reports. Raises a ``UserError`` if the config is invalid."""
    for rule in CountingRule:
        print(f"{rule.name}: {rule.value}")
    if args.all:
        report_paper(args.json)
    else:
        report_config(args.config_file, args.opts, args.size, args.depth)


def report_paper(path: Path | None) -> None:
    """Prints the numbers of the paper's tables and our counts, and writes them to ``path``."""
    cells = compare_with_paper()
    print(format_cells(cells))
    if path is not None:
        text = json.dumps([asdict(cell) for cell in cells], indent=2) + "\n"
        write_atomically(path, text.encode())


def format_cells(cells: Sequence[PaperCell]) -> str:
    """Returns the cells as aligned tables with a summary below."""
    width = max(len(cell.cell) for cell in cells)
    lines: list[str] = []
    for table, group in groupby(cells, key=lambda cell: cell.table):
        lines += ["", f"Table {table}", f"    {'':<{width}}  {'paper':>6}  {'ours':>9}"]
        for c in group:
            mark = "✓" if c.match else "✗"
            numbers = f"{c.paper:>6}  {c.ours:>9.4f} {c.unit}"
            lines.append(f"  {mark} {c.cell:<{width}}  {numbers}  {c.rule}")
    without_retinanet = [cell for cell in cells if cell.table != 14]
    num_without_retinanet = sum(cell.match for cell in without_retinanet)
    num_matched = sum(cell.match for cell in cells)
    summary = f"{num_matched} of {len(cells)} printed cells matched"
    mismatches = [f"{cell.cell} (Table {cell.table})" for cell in cells if not cell.match]
    if mismatches:
        summary += f"; the others are: {'; '.join(mismatches)}"
    lines += [
        "",
        f"Without RetinaNet (Table 14): {num_without_retinanet} of {len(without_retinanet)}.",
        f"{summary}.",
    ]
    return "\n".join(lines)


def report_config(file: str, opts: Sequence[str], size: Sequence[int], depth: int) -> None:
    """Prints the counts of a detector's modules in inference."""
    cfg = load_config(file, ["MODEL.DEVICE", "cpu", *opts])
    model = build_model(cfg).eval()
    madds = count_detector_madds(model, *size)
    params = parameter_count(model)
    rows = []
    for name in madds.by_module:
        counts = [madds.total(rule, name) for rule in CountingRule]
        level = name.count(".") + 1 if name else 0  # the whole model has the name ""
        if level <= depth and (params[name] or any(counts)):
            giga = [f"{count / 1e9:.3f} G" for count in counts]
            label = f"{'  ' * level}{name or 'whole model'}"
            rows.append((label, f"{params[name] / 1e6:.3f} M", *giga))
    print(f"\n{cfg.MODEL.META_ARCHITECTURE} at {size[0]}x{size[1]}, padding included")
    header = ("module", "params", "CORE", "EXT")
    alignment = ("left", "right", "right", "right")
    print(tabulate(rows, header, colalign=alignment, preserve_whitespace=True))


if __name__ == "__main__":
    main()
