# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention of tokens and queries; the confusion matrix."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from detectron2.modeling import build_model
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis.accuracy import draw_classes, plot_confusion
from qbheat_det.analysis.attention import (
    choose_blocks,
    draw_attention,
    draw_queries,
    find_mobile_former,
    list_blocks,
    read_bridges,
    read_queries,
)
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.run import Run
from qbheat_det.core.figures import NotApplicable
from qbheat_det.evaluation import ClassificationEvaluator
from qbheat_det.layers import read_attention
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.modeling.detr import MFDETR

from .conftest import check_files
from .tiny_runs import TinyRuns, mf_detr_config


def make_matrix(num_classes: int) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng(0)
    matrix = rng.poisson(0.05, (num_classes, num_classes))
    matrix[np.diag_indices(num_classes)] = 8
    matrix[0, -1] = 40
    return matrix.astype(np.int64)


@pytest.mark.parametrize("num_classes", [1, 12, 300])
def test_the_chart_lists_the_most_frequent_confusions(num_classes: int) -> None:
    matrix = make_matrix(num_classes)
    figure = plot_confusion(matrix, [f"kind {i}" for i in range(num_classes)], title="val")
    text = figure.axes[1].texts[0].get_text()
    wrong = matrix.sum() - matrix.trace()
    assert f"({wrong:,} of {matrix.sum():,} images are wrong)" in text
    if num_classes == 12:
        assert f"kind 0 → kind {num_classes - 1}:  40 of {matrix[0].sum()}" in text


def test_the_matrix_is_that_of_the_evaluator(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "inference" / "flowers"
    evaluator = ClassificationEvaluator(
        "flowers", class_names=["cat", "dog", "bird"], output_dir=str(folder)
    )
    evaluator.reset()
    for index, scores in enumerate(torch.rand(20, 3, generator=torch.Generator().manual_seed(0))):
        entry = {"image_id": index, "label": min(index % 4, 2)}
        evaluator.process([entry], [{"scores": scores.softmax(0)}])
    evaluator.evaluate()
    (tmp_path / "run" / "metrics.json").touch()
    figure = draw_classes([Run.open(tmp_path / "run")], FigureOptions())
    found = figure.data["runs"]["run"]
    assert found["classes"] == ["cat", "dog", "bird"]
    np.testing.assert_array_equal(found["matrix"], evaluator.confusion)
    assert figure.table.rows[0][1] == f"{100 * evaluator.confusion.trace() / 20:.2f}"
    (folder / "classification.json").unlink()
    with pytest.raises(NotApplicable, match=r"'run' has no .*classification\.json"):
        draw_classes([Run.open(tmp_path / "run")], FigureOptions())


@pytest.fixture(scope="module")
def detector() -> MFDETR:
    torch.manual_seed(0)
    model: MFDETR = build_model(mf_detr_config()).eval()
    # Otherwise all boxes are the same: the last layer starts with zeros.
    nn.init.normal_(model.decoder.bbox_embed.last.weight)
    return model


@pytest.fixture(scope="module")
def backbone(detector: MFDETR) -> MobileFormer:
    return find_mobile_former(detector)


def image(height: int, width: int) -> torch.Tensor:
    return torch.randint(256, (3, height, width), dtype=torch.uint8)


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


def test_queries_are_those_of_the_most_confident_boxes(detector: MFDETR) -> None:
    """That what is read is the attention is a test of ``read_attention``."""
    entry: dict[str, Any] = {"image": image(72, 100)}
    with torch.no_grad(), read_attention(detector) as record:
        (expected,) = detector([entry])
        seen = read_queries(detector, entry, 4)
    scores, order = expected["instances"].scores.sort(descending=True, stable=True)
    assert_close(seen.found.scores, scores[:4])
    assert_close(seen.found.pred_boxes.tensor, expected["instances"].pred_boxes.tensor[order[:4]])
    sizes = {32: (3, 4), 16: (5, 7), 8: (9, 13)}
    assert list(seen.maps) == list(sizes)
    for level, (stride, size) in enumerate(sizes.items()):
        last = len(cast(Any, detector.decoder.levels)[level]) - 1
        read = record[f"decoder.levels.{level}.{last}.query_layer.cross_attention"][0]
        expected_maps = read.unflatten(-1, size)[0].transpose(0, 1)[order[:4]]
        assert_close(seen.maps[stride], expected_maps)


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


def test_queries_of_two_detectors_are_drawn_in_the_same_images(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    runs = [tiny.get(name) for name in ("untrained", "mf_detr", "mf_detr_1")]
    options = FigureOptions(images=photos, num_images=1)
    figure = draw_queries(runs, options, query_boxes=2)
    check_files(figure, tmp_path)
    assert list(figure.data["runs"]) == ["mf_detr", "mf_detr_1"]
    for (boxes,) in figure.data["runs"].values():
        assert len(boxes) == 2
        assert boxes[0]["score"] >= boxes[1]["score"]
    with pytest.raises(NotApplicable, match="untrained"):
        draw_queries(runs[:1], options)
