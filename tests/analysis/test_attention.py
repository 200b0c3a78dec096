# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention of bridges and queries: figures by hand, maps against naive sums, overlays by pixel."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from matplotlib.figure import Figure
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis import attention_chart
from qbheat_det.analysis.attention import (
    choose_blocks,
    describe_block,
    find_mobile_former,
    list_blocks,
    measure_likeness,
    measure_spread,
    measure_top_share,
    normalize_image,
    read_bridges,
)
from qbheat_det.analysis.attention_chart import plot_blocks
from qbheat_det.analysis.attention_pictures import (
    AttentionRow,
    draw_attention,
    find_top,
    overlay_attention,
    stack_sheets,
)
from qbheat_det.analysis.query_attention import measure_inside, read_queries
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.modeling.backbone.mobile_former_archs import BlockSpec, MobileFormerArch
from qbheat_det.modeling.detr import MFDETR
from tests.modeling.tiny_pretraining import make_tiny_config


@pytest.fixture(scope="module")
def detector() -> MFDETR:
    torch.manual_seed(0)
    cfg = make_tiny_config("MFDETR")
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16_expanded"]
    for key, value in {
        "IN_FEATURES": ["s8", "s16_expanded"],
        "NUM_BLOCKS": [2, 1, 1],
        "NUM_OBJECT_QUERIES": 7,
        "HIDDEN_DIM": 16,
        "DIM_FEEDFORWARD": 16,
        "NHEADS": 2,
        "NUM_CLASSES": 3,
    }.items():
        cfg.MODEL.MF_DETR[key] = value
    model: MFDETR = build_model(cfg).eval()
    # Else all boxes are the same: the last layer starts with zeros.
    nn.init.normal_(model.decoder.bbox_embed.last.weight)
    return model


def image(height: int, width: int) -> torch.Tensor:
    return torch.randint(256, (3, height, width), dtype=torch.uint8)


def test_the_paper_s_blocks_are_chosen_of_its_networks_and_the_last_of_each_stage_of_others(
    detector: MFDETR,
) -> None:
    kinds = [block.kind for block in MOBILE_FORMER_ARCHS["3.7G"].blocks]
    narrow = tuple(
        BlockSpec(kind, 8, 4 if kind == "lite" else 8, 8 if kind == "down" else 0) for kind in kinds
    )
    arch = MobileFormerArch(num_tokens=6, token_dim=8, stem=4, blocks=narrow, expanded=8)
    paper = MobileFormer(arch=arch, out_features=["s16"])
    assert choose_blocks(paper) == [3, 6, 10, 12]
    assert list_blocks(paper)[10] == "stages.3.3"
    tiny = find_mobile_former(detector)
    assert tiny is detector.backbone
    assert list_blocks(tiny) == {2: "stages.1.0", 3: "stages.2.0", 4: "stages.3.0"}
    assert choose_blocks(tiny) == [2, 3, 4]
    assert find_mobile_former(nn.Linear(1, 1)) is None


def test_the_bridges_of_an_image_sum_to_one_over_pixels_and_over_tokens(detector: MFDETR) -> None:
    backbone = find_mobile_former(detector)
    assert backbone is not None
    found = read_bridges(backbone, normalize_image(detector, image(40, 56)))
    assert [block.number for block in found] == [2, 3, 4]
    for block, stride in zip(found, (2, 4, 8), strict=True):
        size, half = (40 // stride, 56 // stride), (-(-20 // stride), -(-28 // stride))
        assert (block.to_former_stride, block.to_mobile_stride) == (stride, 2 * stride)
        assert block.to_former.shape == (1, 2, 6, *size)
        assert block.to_mobile.shape == (1, 2, 6, *half)
        assert_close(block.to_former.sum(dim=(3, 4)), torch.ones(1, 2, 6))
        assert_close(block.to_mobile.sum(dim=2), torch.ones(1, 2, *half))
    (third,) = read_bridges(backbone, torch.zeros(1, 3, 16, 16), numbers=[3])
    assert third.number == 3
    with pytest.raises(ValueError, match=r"no block \[1\] with tokens: there are \[2, 3, 4\]"):
        read_bridges(backbone, torch.zeros(1, 3, 16, 16), numbers=[1])


def test_a_padded_batch_gives_each_image_its_own_attention_and_padding_none(
    detector: MFDETR,
) -> None:
    backbone = find_mobile_former(detector)
    assert backbone is not None
    small = normalize_image(detector, image(24, 40))
    batch = torch.zeros(2, 3, 48, 64)
    batch[0, :, :24, :40] = small[0]
    padded = read_bridges(backbone, batch, torch.tensor([(24, 40), (48, 64)]))
    for block, alone in zip(padded, read_bridges(backbone, small), strict=True):
        height, width = alone.to_former.shape[-2:]
        own = block.to_former[:1, ..., :height, :width]
        assert_close(own, alone.to_former)
        assert float(block.to_former[0].sum() - own.sum()) == pytest.approx(0, abs=1e-5)


def test_spread_and_top_share_are_those_by_hand() -> None:
    even, one = torch.full((2, 5), 0.1).flatten(), torch.eye(10)[3]
    half = torch.tensor([0.5, 0.5] + [0.0] * 8)
    spread = measure_spread(torch.stack([even, one, half]), dim=1)
    assert_close(spread, torch.tensor([1.0, 0.0, math.log(2) / math.log(10)]).double())
    maps = torch.stack([even, one, half]).unflatten(1, (2, 5))
    assert_close(measure_top_share(maps), torch.tensor([0.1, 1.0, 0.5]))
    assert_close(measure_top_share(maps, share=0.3), torch.tensor([0.3, 1.0, 1.0]))
    assert_close(measure_top_share(maps, share=0.01), torch.tensor([0.1, 1.0, 0.5]))


def test_tokens_that_look_alike_have_likeness_one_and_those_that_share_no_pixel_zero() -> None:
    same = torch.rand(2, 3).softmax(dim=0).expand(4, 2, 3) / 3
    assert float(measure_likeness(same)) == pytest.approx(float(same[0].sum()))
    assert float(measure_likeness(torch.eye(6).view(6, 2, 3))) == 0
    three = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]]).view(3, 1, 2)
    # Pairs: min(1, .5) = .5; min(1, .25) = .25; .25 + .5 = .75.
    assert float(measure_likeness(three)) == pytest.approx((0.5 + 0.25 + 0.75) / 3)
    weights = torch.rand(2, 3, 5, 4, 6).flatten(3).softmax(dim=-1).unflatten(3, (4, 6))
    naive = [
        torch.minimum(weights[:, :, i], weights[:, :, j]).sum(dim=(2, 3))
        for i in range(5)
        for j in range(i)
    ]
    assert_close(measure_likeness(weights).float(), torch.stack(naive).mean(dim=0))


def test_the_figures_of_a_block_are_means_over_images_and_heads(detector: MFDETR) -> None:
    backbone = find_mobile_former(detector)
    assert backbone is not None
    block = read_bridges(backbone, torch.randn(2, 3, 32, 32), numbers=[4])[0]
    figures = describe_block(block)
    assert figures["number"] == 4
    assert sum(figures["to_mobile"]["share"]) == pytest.approx(1)
    assert len(figures["to_former"]["spread"]) == 6
    one = block.to_former[..., 2, :, :]
    expected = -(one * one.log()).sum(dim=(2, 3)).mean() / math.log(16)
    assert figures["to_former"]["spread"][2] == pytest.approx(float(expected), rel=1e-4)
    svg = plot_blocks({"a": [figures], "b": [figures]}, "to_mobile", theme="dark")
    assert b"<svg" in svg


def test_axes_of_twelve_runs_are_as_high_as_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []

    def keep(figure: Figure, *args: object) -> bytes:
        figure.draw_without_rendering()
        drawn.append(figure)
        return b""

    monkeypatch.setattr(attention_chart, "encode", keep)
    rows = [{"number": number, "to_mobile": {"spread": 0.5}} for number in (1, 2)]
    for runs in (1, 12):
        plot_blocks({f"_a run with a long name {i}": rows for i in range(runs)}, "to_mobile")
    one, twelve = (figure.axes[0].get_window_extent().height / figure.dpi for figure in drawn)
    assert twelve == pytest.approx(one, rel=0.15)
    assert len(drawn[1].legends[0].get_texts()) == 12


def test_query_attention_is_what_the_projections_give(detector: MFDETR) -> None:
    entry: dict[str, Any] = {"image": image(72, 100)}
    inputs: dict[int, tuple[Any, ...]] = {}
    hooks = []
    layers: list[Any] = [level[-1] for level in cast(Any, detector.decoder.levels)]
    layers = [block.query_layer.cross_attention for block in layers]
    for level, layer in enumerate(layers):

        def keep(_: nn.Module, args: tuple[Any, ...], level: int = level) -> None:
            inputs[level] = args

        hooks.append(layer.register_forward_pre_hook(keep))
    with torch.no_grad():
        (expected,) = detector([entry])
        seen = read_queries(detector, entry, 4)
    for hook in hooks:
        hook.remove()
    scores, order = expected["instances"].scores.sort(descending=True, stable=True)
    assert_close(seen.found.scores, scores[:4])
    assert seen.found.query.tolist() == order[:4].tolist()
    assert_close(seen.found.pred_boxes.tensor, expected["instances"].pred_boxes.tensor[order[:4]])
    assert [tuple(maps.shape) for maps in seen.maps.values()] == [
        (4, 2, 3, 4), (4, 2, 5, 7), (4, 2, 9, 13),
    ]  # fmt: skip
    for level, (stride, maps) in enumerate(seen.maps.items()):
        assert stride == 32 >> level
        layer = layers[level]
        query, key = inputs[level][:2]
        weight, bias = layer.in_proj_weight[:32], layer.in_proj_bias[:32]
        q = (query @ weight[:16].T + bias[:16]).unflatten(-1, (2, 8))
        k = (key @ weight[16:].T + bias[16:]).unflatten(-1, (2, 8))
        naive = (torch.einsum("nqhd,nphd->nhqp", q, k) / 8**0.5).softmax(dim=-1)
        assert_close(maps.flatten(2), naive[0].transpose(0, 1)[order[:4]])


def test_attention_inside_a_box_is_summed_over_the_positions_whose_centres_it_holds() -> None:
    maps = torch.arange(12.0).view(1, 1, 3, 4).expand(2, 2, 3, 4) / 66
    # Centres at 4, 12, 20 and 4, 12, 20, 28: the first box holds rows 0, 1 and columns 1, 2.
    boxes = torch.tensor([[4.5, 0.0, 21.0, 13.0], [5.0, 5.0, 6.0, 6.0]])
    inside = measure_inside(maps, boxes, stride=8)
    assert_close(inside, torch.tensor([(1 + 2 + 5 + 6) / 66, 0.0]))


def test_the_overlay_is_brightest_where_attention_is_and_lies_in_the_image_s_own_frame() -> None:
    grey = np.full((24, 40, 3), 128, dtype=np.uint8)
    values = np.zeros((4, 6), dtype=np.float32)  # reaches beyond the image, which is padded to 8s
    values[1, 3] = 1.0
    over = overlay_attention(grey, values, stride=8, top=1.0)
    assert over.shape == grey.shape
    brightness = over.astype(int).sum(axis=2)
    rows, columns = np.nonzero(brightness == brightness.max())
    assert {*rows} == {11, 12}  # the centre of position (1, 3) is (12, 28), between two pixels
    assert {*columns} == {27, 28}
    dark, light = over[0, 0], overlay_attention(grey, np.ones((3, 5), np.float32), 8, 0.5)[0, 0]
    # viridis from (68, 1, 84) to (253, 231, 37), over grey.
    assert np.abs(dark.astype(float) - (0.68 * np.array([68, 1, 84]) + 0.32 * 128)).max() < 1.01
    assert np.abs(light.astype(float) - (0.68 * np.array([253, 231, 37]) + 0.32 * 128)).max() < 1.01


def test_the_top_of_a_scale_leaves_out_small_peaks_and_keeps_a_lone_one() -> None:
    lone = np.zeros((5, 5), np.float32)
    lone[2, 2] = 1.0
    assert find_top([lone]) == 1.0
    mostly_even = np.full((10, 10), 0.96 / 99, np.float32)
    mostly_even[0, 0] = 0.04
    assert find_top([mostly_even]) == pytest.approx(0.96 / 99)
    assert find_top([mostly_even, lone]) == 1.0


def test_a_sheet_has_a_row_for_each_block_and_a_column_for_each_token() -> None:
    picture = np.random.default_rng(0).integers(256, size=(50, 100, 3)).astype(np.uint8)
    maps = list(np.random.default_rng(1).random((3, 4, 7)).astype(np.float32))
    box = np.array([10.0, 10.0, 60.0, 40.0])
    rows = [
        AttentionRow("block 3", maps, [16] * 3, unit="x even", least=2.0),
        AttentionRow("block 6", maps, [16] * 3, together=False, box=box),
    ]
    sheet = draw_attention(picture, rows, ["a", "b", "c"], title="A run\nMobile", cell=80)
    assert sheet.shape[1] == 132 + 3 * (80 + 4)
    # Both rows show the same, but for the box: at its corner one is white.
    width = 80
    cells = [sheet[sheet.shape[0] - 72 * (2 - i) :][:40, 132 : 132 + width] for i in (0, 1)]
    assert (cells[1] == 255).all(axis=2).sum() > (cells[0] == 255).all(axis=2).sum() + 50
    assert stack_sheets([sheet, sheet[:, :200]]).shape[0] == 2 * sheet.shape[0] + 14
    with pytest.raises(ValueError, match="needs 2 maps"):
        draw_attention(picture, rows, ["a", "b"], title="")
