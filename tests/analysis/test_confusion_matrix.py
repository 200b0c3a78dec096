# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The confusion matrix: drawn for few and many classes, and equal to the evaluator's."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from qbheat_det.analysis.confusion_matrix import draw_classes, draw_confusion, plot_confusion
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.run import Run
from qbheat_det.core.figures import NotApplicable
from qbheat_det.evaluation import ClassificationEvaluator


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
    assert figure.table is not None
    assert figure.table.rows[0][1] == f"{100 * evaluator.confusion.trace() / 20:.2f}"
    draw_confusion(folder / "classification.json", tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 1000
    (folder / "classification.json").unlink()
    with pytest.raises(NotApplicable, match=r"'run' has no .*classification\.json"):
        draw_classes([Run.open(tmp_path / "run")], FigureOptions())
