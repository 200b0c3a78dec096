# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention of bridges and queries: measures by hand, maps against naive sums, and figures."""

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis.attention import (
    choose_blocks,
    describe_block,
    find_mobile_former,
    find_top,
    list_blocks,
    measure_overlap,
    measure_spread,
    read_bridges,
)
from qbheat_det.analysis.attention_figure import draw_attention
from qbheat_det.analysis.figure import FigureOptions, batch_images, crop_squares
from qbheat_det.analysis.queries import draw_queries, measure_inside, read_queries
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.modeling.backbone.mobile_former_archs import BlockSpec, MobileFormerArch
from qbheat_det.modeling.detr import MFDETR

from .conftest import check_files
from .tiny_runs import CLASSES, TinyRuns, mf_detr_config, truncate


@pytest.fixture(scope="module")
def detector() -> MFDETR:
    torch.manual_seed(0)
    model: MFDETR = build_model(mf_detr_config()).eval()
    # Otherwise all boxes are the same: the last layer starts with zeros.
    nn.init.normal_(model.decoder.bbox_embed.last.weight)
    return model


@pytest.fixture(scope="module")
def backbone(detector: MFDETR) -> MobileFormer:
    found = find_mobile_former(detector)
    assert found is not None
    return found


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
    assert list_blocks(paper)[10] == ("stages.3.3", 16, 16)
    tiny = find_mobile_former(detector)
    assert tiny is detector.backbone
    assert [(*list_blocks(tiny)[number],) for number in (2, 3, 4)] == [
        ("stages.1.0", 2, 4), ("stages.2.0", 4, 8), ("stages.3.0", 8, 16),
    ]  # fmt: skip
    assert choose_blocks(tiny) == [2, 3, 4]
    assert find_mobile_former(nn.Linear(1, 1)) is None


def test_the_bridges_of_an_image_sum_to_one_over_pixels_and_over_tokens(
    backbone: MobileFormer,
) -> None:
    found = read_bridges(backbone, torch.randn(1, 3, 40, 56))
    assert [block.number for block in found] == [2, 3, 4]
    for block, stride in zip(found, (2, 4, 8), strict=True):
        size, half = (40 // stride, 56 // stride), (-(-20 // stride), -(-28 // stride))
        assert (block.to_former_stride, block.to_mobile_stride) == (stride, 2 * stride)
        assert block.to_former.shape == (1, 2, 6, *size)
        assert block.to_mobile.shape == (1, 2, 6, *half)
        assert_close(block.to_former.sum(dim=(3, 4)), torch.ones(1, 2, 6))
        assert_close(block.to_mobile.sum(dim=2), torch.ones(1, 2, *half))


def test_spread_is_the_normalised_entropy() -> None:
    even, one = torch.full((10,), 0.1), torch.eye(10)[3]
    half = torch.tensor([0.5, 0.5] + [0.0] * 8)
    spread = measure_spread(torch.stack([even, one, half]), dim=1)
    assert_close(spread, torch.tensor([1.0, 0.0, math.log(2) / math.log(10)]).double())


def test_equal_tokens_overlap_fully_and_disjoint_ones_not_at_all() -> None:
    same = torch.rand(2, 3).softmax(dim=0).expand(4, 2, 3) / 3
    assert float(measure_overlap(same)) == pytest.approx(float(same[0].sum()))
    assert float(measure_overlap(torch.eye(6).view(6, 2, 3))) == 0
    three = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]]).view(3, 1, 2)
    # Pairs: min(1, .5) = .5; min(1, .25) = .25; .25 + .5 = .75.
    assert float(measure_overlap(three)) == pytest.approx((0.5 + 0.25 + 0.75) / 3)
    weights = torch.rand(2, 3, 5, 4, 6).flatten(3).softmax(dim=-1).unflatten(3, (4, 6))
    naive = [
        torch.minimum(weights[:, :, i], weights[:, :, j]).sum(dim=(2, 3))
        for i in range(5)
        for j in range(i)
    ]
    assert_close(measure_overlap(weights).float(), torch.stack(naive).mean(dim=0))


def test_the_measures_of_a_block_are_means_over_images_and_heads(backbone: MobileFormer) -> None:
    block = read_bridges(backbone, torch.randn(2, 3, 32, 32))[2]
    measures = describe_block(block)
    assert measures["number"] == 4
    assert sum(measures["to_mobile"]["share"]) == pytest.approx(1)
    assert len(measures["to_former"]["spread"]) == 6
    one = block.to_former[..., 2, :, :]
    expected = -(one * one.log()).sum(dim=(2, 3)).mean() / math.log(16)
    assert measures["to_former"]["spread"][2] == pytest.approx(float(expected), rel=1e-4)


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


def test_attention_inside_a_box_is_that_of_the_positions_with_centres_in_it() -> None:
    maps = torch.arange(12.0).view(1, 1, 3, 4).expand(2, 2, 3, 4) / 66
    # Centres at 4, 12, 20 and 4, 12, 20, 28: the first box holds rows 0, 1 and columns 1, 2.
    boxes = torch.tensor([[4.5, 0.0, 21.0, 13.0], [5.0, 5.0, 6.0, 6.0]])
    inside = measure_inside(maps, boxes, stride=8)
    assert_close(inside, torch.tensor([(1 + 2 + 5 + 6) / 66, 0.0]))


def test_the_last_colour_ignores_small_peaks_and_keeps_a_lone_one() -> None:
    lone = np.zeros((5, 5), np.float32)
    lone[2, 2] = 1.0
    assert find_top([lone]) == 1.0
    mostly_even = np.full((10, 10), 0.96 / 99, np.float32)
    mostly_even[0, 0] = 0.04
    assert find_top([mostly_even]) == pytest.approx(0.96 / 99)
    assert find_top([mostly_even, lone]) == 1.0


def test_attention_of_several_models_is_drawn_in_the_same_images(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    runs = [tiny.get(name) for name in ("untrained", "resnet", "mf_detr")]
    runs.insert(0, truncate(runs[0], tmp_path))
    options = FigureOptions(images=photos, num_images=1)
    figure = draw_attention(runs, options, attention_images=3, attention_size=48)
    check_files(figure, tmp_path)
    assert list(figure.images) == [
        "to_former_blocks", "to_former_1", "to_mobile_blocks", "to_mobile_1",
    ]  # fmt: skip
    assert [name in text for name, text in zip(("cut", "resnet"), figure.data["left_out"],
                                               strict=True)]  # fmt: skip
    assert [Path(name).name for name in figure.data["images"]] == ["0.png", "1.png", "2.png"]
    assert [row["number"] for row in figure.data["runs"]["mf_detr"]] == [2, 3, 4]
    run = runs[1]
    (images,) = batch_images(run.model, crop_squares(run.cfg, figure.data["images"], 48), "")
    own = find_mobile_former(run.model)
    assert own is not None
    block = read_bridges(own, images)[1]
    found = figure.data["runs"]["untrained"][1]["to_former"]["overlap"]
    assert found == pytest.approx(float(measure_overlap(block.to_former).mean()))
    assert figure.table is not None
    assert [row[0] for row in figure.table.rows] == [
        "untrained, overlap", "untrained, spread", "mf_detr, overlap", "mf_detr, spread",
    ]  # fmt: skip


def test_heads_and_blocks_are_chosen(tiny: TinyRuns, photos: Path) -> None:
    options = FigureOptions(images=photos, num_images=1)
    run = tiny.get("untrained")
    draw_attention(
        [run], options, attention_images=1, attention_blocks=[4], attention_heads="apart"
    )
    with pytest.raises(UserError, match="block 1"):
        draw_attention([run], options, attention_blocks=[1])
    with pytest.raises(NotApplicable, match="resnet"):
        draw_attention([tiny.get("resnet")], options)


def test_queries_of_two_detectors_are_drawn_in_the_same_images(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    runs = [tiny.get(name) for name in ("untrained", "mf_detr", "mf_detr_1")]
    options = FigureOptions(images=photos, num_images=2)
    figure = draw_queries([*runs, truncate(runs[1], tmp_path)], options, query_boxes=2)
    check_files(figure, tmp_path)
    assert list(figure.images) == ["image_1", "image_2"]
    assert [name in text for name, text in zip(("untrained", "cut"), figure.data["left_out"],
                                               strict=True)]  # fmt: skip
    for images in figure.data["runs"].values():
        assert [len(boxes) for boxes in images] == [2, 2]
        for box in (box for boxes in images for box in boxes):
            assert box["class"] in CLASSES
            for stride in ("32", "16", "8"):
                assert 0 <= box["attention_inside"][stride] <= 1
                assert 0 < box["attention_spread"][stride] <= 1 + 1e-6
    assert figure.table is not None
    assert [row[0] for row in figure.table.rows] == ["mf_detr", "mf_detr_1"]
    with pytest.raises(NotApplicable, match="untrained"):
        draw_queries(runs[:1], options)
