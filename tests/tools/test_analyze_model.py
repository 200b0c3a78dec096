# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Counting against hand arithmetic, the exact counts of the paper's components, and the tool."""

import json
from dataclasses import astuple

import pytest
import torch
from detectron2.layers import ShapeSpec
from torch import nn
from torch.nn import functional as F

from qbheat_det.config import get_cfg
from qbheat_det.evaluation.complexity import CountingRule, count_madds, count_parameters
from qbheat_det.modeling.backbone import build_mobile_former_fpn_backbone
from tests.analysis.tiny_runs import mf_detr_config
from tests.tool_modules import load_tool

TOOL = load_tool("analyze_model")
CORE, EXT = CountingRule
LARGER = [pytest.param(variant, marks=pytest.mark.slow) for variant in ("1.0G", "3.7G")]


class Attention(nn.Module):
    """Attention through PyTorch's fused operator or through two products."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, query, key, value):
        if self.kind == "fused":
            return F.scaled_dot_product_attention(query, key, value)
        query, key, value = (entry.flatten(0, 1) for entry in (query, key, value))
        logits = torch.baddbmm(torch.zeros(1, 1, 1), query, key.transpose(-2, -1))
        return F.softmax(logits, dim=-1) @ value


@pytest.mark.parametrize("kind", ["fused", "products"])
def test_attention_counts_its_two_products_however_it_is_written(kind):
    query, key, value = torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 11, 8), torch.zeros(2, 4, 11, 16)
    madds = count_madds(Attention(kind), query, key, value)
    assert madds.total(CORE) == 2 * 4 * (7 * 11 * 8 + 7 * 11 * 16)


def test_parameters_count_once_and_the_affine_of_batch_norm_on_request():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.BatchNorm1d(4), shared, nn.LayerNorm(4))
    assert count_parameters(model) == 20 + 8 + 8
    assert count_parameters(model, batch_norm_affine=False) == 20 + 8


# Components of the QB-Heat paper, from the tables of Mobile-Former's and MF-DETR's widths.
# Backbone at 800x1333: params, params without BatchNorm's affine, core, ext.
BACKBONES = {
    "3.7G": (25_041_040, 24_968_880, 76_756_697_984, 77_532_842_624),
    "1.0G": (11_778_952, 11_742_872, 20_054_429_120, 20_442_628_160),
    "285M": (4_946_580, 4_928_348, 5_454_511_456, 5_649_480_736),
}
# Linear classifier at 224x224: params, core, ext.
LINEAR = {
    "3.7G": (28_178_040, 3_644_129_536, 3_681_312_512),
    "1.0G": (13_475_952, 977_942_656, 996_660_864),
    "285M": (5_859_580, 275_166_592, 284_626_688),
}
# Params of the classifiers with one and four transformer blocks.
TRANSFORMER = {
    "3.7G": {1: 35_368_056, 4: 56_631_672},
    "1.0G": {1: 14_748_528, 4: 20_071_920},
    "285M": {1: 5_915_260, 4: 7_249_852},
}
# Decoder at 800x1333: params, core, ext.
DECODERS = {
    ("3.7G", (5, 2, 2)): (19_413_216, 34_545_179_776, 34_638_216_576),
    ("1.0G", (5, 2, 2)): (18_635_520, 32_185_792_576, 32_275_805_376),
    ("285M", (5, 2, 2)): (18_246_672, 31_006_098_976, 31_094_599_776),
    ("3.7G", (2, 1, 1)): (9_214_560, 15_636_491_392, 15_719_544_192),
    ("1.0G", (2, 1, 1)): (8_436_864, 13_277_104_192, 13_357_132_992),
    ("285M", (2, 1, 1)): (8_048_016, 12_097_410_592, 12_175_927_392),
}
# C of the expanded map, D of the tokens, width of the transformer classifier.
WIDTHS = {"3.7G": (2880, 256, 768), "1.0G": (1440, 256, 384), "285M": (720, 192, 192)}


def transformer_core(variant, depth):
    """Core multiply-adds of a transformer classifier at 224x224: 196 positions."""
    channels, token_dim, dim = WIDTHS[variant]
    encoder = LINEAR[variant][1] - 1000 * (channels + token_dim)
    block = 196 * 12 * dim * dim + 2 * 196 * 196 * dim
    return encoder + 196 * channels * dim + depth * block + 1000 * (dim + token_dim)


@pytest.mark.parametrize("variant", ["285M", *LARGER])
def test_backbones_and_classifiers_have_the_exact_counts(variant):
    assert astuple(TOOL.backbone_counts(variant)) == BACKBONES[variant]
    linear = TOOL.classifier_counts(variant, 0)
    assert (linear.params, linear.core, linear.ext) == LINEAR[variant]
    for depth, params in TRANSFORMER[variant].items():
        counts = TOOL.classifier_counts(variant, depth)
        assert (counts.params, counts.core) == (params, transformer_core(variant, depth))


@pytest.mark.parametrize(
    ("variant", "num_blocks"),
    [
        pytest.param(*key, marks=() if key == ("285M", (2, 1, 1)) else pytest.mark.slow)
        for key in DECODERS
    ],
)
def test_decoders_have_the_exact_counts(variant, num_blocks):
    counts = TOOL.mf_decoder_counts(variant, num_blocks)
    assert (counts.params, counts.core, counts.ext) == DECODERS[variant, num_blocks]


def test_every_printed_cell_matches_except_the_known_five(monkeypatch):
    """On the counts above; that models have them is another test."""

    def classifier(variant, depth):
        params, core, ext = LINEAR[variant]
        if depth:
            params, core = TRANSFORMER[variant][depth], transformer_core(variant, depth)
        return TOOL.Counts(params, params, core, ext)

    def decoder(variant, num_blocks):
        params, core, ext = DECODERS[variant, num_blocks]
        return TOOL.Counts(params, params, core, ext)

    monkeypatch.setattr(TOOL, "backbone_counts", lambda v: TOOL.Counts(*BACKBONES[v]))
    monkeypatch.setattr(TOOL, "classifier_counts", classifier)
    monkeypatch.setattr(TOOL, "mf_decoder_counts", decoder)
    cells = TOOL.compare_with_paper()
    unmatched = {(cell.table, cell.paper, round(cell.ours, 3)) for cell in cells if not cell.match}
    assert unmatched == {
        (1, 5.8, 5.860), (6, 1.4, 1.462), (14, 178.1, 178.170), (14, 17.2, 9.500),
        (14, 61.4, 9.586),
    }  # fmt: skip
    assert len(cells) == 43


def test_the_closed_form_of_the_pyramid_equals_a_trace_where_nothing_is_padded():
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
    pyramid = build_mobile_former_fpn_backbone(cfg, ShapeSpec(channels=3))
    traced = count_madds(pyramid, torch.zeros(1, 3, 128, 256))
    positions = TOOL.pyramid_positions((128, 256))
    assert positions == [16 * 32, 8 * 16, 4 * 8, 2 * 4, 1 * 2]
    levels = [[pyramid.fpn_lateral3, pyramid.fpn_output3],
              [pyramid.fpn_lateral4, pyramid.fpn_output4],
              *([conv] for conv in pyramid.top_block.convs)]  # fmt: skip
    closed = sum(map(TOOL.convolution_madds, levels, positions))
    assert traced.total(CORE) - traced.total(CORE, "bottom_up") == closed


CELLS = [
    TOOL.PaperCell(1, "net MAdds", "M", 285, 284.627, True, "MAdds by EXT"),
    TOOL.PaperCell(14, "pyramid params", "M", 61.4, 9.586, False, "all parameters"),
]


def test_all_cells_are_printed_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(TOOL, "compare_with_paper", lambda: CELLS)  # has its own test
    TOOL.main(["--all", "--json", str(tmp_path / "cells.json")])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[2:3] in ("✓", "✗")]
    assert [row[:2] for row in rows] == [["✓", "net"], ["✗", "pyramid"]]
    assert [row["match"] for row in json.loads((tmp_path / "cells.json").read_text())] == [
        True, False
    ]  # fmt: skip


def test_a_config_gives_a_table_of_the_modules_of_inference(tmp_path, capsys):
    (tmp_path / "detector.yaml").write_text(mf_detr_config().dump())
    words = ["--config-file", str(tmp_path / "detector.yaml"), "--size", "64", "96"]
    TOOL.main([*words, "--depth", "1", "MODEL.MF_DETR.NHEADS", "4"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {"backbone", "decoder"} <= {row[0] for row in rows if row}

    for words in ("", "--all --config-file x", "--config-file missing.yaml"):
        with pytest.raises(SystemExit, match="2"):
            TOOL.main(words.split())
