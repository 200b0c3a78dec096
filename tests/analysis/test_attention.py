# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention of tokens."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis.attention import (
    choose_blocks,
    draw_attention,
    find_mobile_former,
    list_blocks,
    read_bridges,
)
from qbheat_det.analysis.run import FigureOptions
from qbheat_det.core.figures import NotApplicable
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer

from .conftest import check_files
from .tiny_runs import TinyRuns


@pytest.fixture(scope="module")
def backbone(tiny: TinyRuns) -> MobileFormer:
    return find_mobile_former(tiny.get("mf_detr").model)


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


def test_the_paper_s_blocks_are_chosen_of_its_networks_and_the_last_of_each_stage_of_others(
    backbone: MobileFormer,
) -> None:
    with torch.device("meta"):
        paper = MobileFormer(arch=MOBILE_FORMER_ARCHS["285M"], out_features=["s16"])
    assert choose_blocks(paper) == [3, 6, 10, 12]
    assert list(list_blocks(backbone).values())[1:] == [
        ("stages.2.0", 4, 8), ("stages.3.0", 8, 16),
    ]  # fmt: skip
    assert choose_blocks(backbone) == [2, 3, 4]
    assert find_mobile_former(nn.Linear(1, 1)) is None


def test_attention_of_several_models_is_drawn_in_the_same_images(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    runs = [tiny.get(name) for name in ("resnet", "untrained", "mf_detr")]
    options = FigureOptions(images=photos, num_images=1)
    figure = draw_attention(runs, options, attention_heads="apart")
    check_files(figure, tmp_path)
    assert "resnet" in figure.data["left_out"][0]
    assert figure.data["blocks"] == {"untrained": [2, 3, 4], "mf_detr": [2, 3, 4]}
    with pytest.raises(NotApplicable, match="resnet"):
        draw_attention(runs[:1], options)
