# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of classifiers: maps that sum to the logits, steady heat, the confusion matrix."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from detectron2.modeling import build_model
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis.class_activation import (
    FloatMap,
    compute_class_activation,
    correlate_inside,
    draw_heat,
    solve_steady_heat,
)
from qbheat_det.analysis.confusion_matrix import draw_classes, draw_confusion, plot_confusion
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.run import Run
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable
from qbheat_det.evaluation import ClassificationEvaluator
from qbheat_det.modeling.classification import ImageClassifier

from .conftest import check_files
from .tiny_runs import TinyRuns, classifier_config, truncate


def make_model(decoder: str = "linear", *, tokens: bool = True, **keys: Any) -> ImageClassifier:
    torch.manual_seed(0)
    cfg = classifier_config(decoder, **keys)
    if not tokens:
        cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s16_expanded"]
    model: ImageClassifier = build_model(cfg).eval()
    nn.init.normal_(model.decoder.classifier.weight)
    nn.init.normal_(model.decoder.classifier.bias)
    if isinstance(model.decoder.norm, nn.BatchNorm1d):
        nn.init.normal_(model.decoder.norm.running_mean)
        nn.init.uniform_(model.decoder.norm.running_var, 0.5, 2.0)
    return model


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_the_mean_of_a_map_and_the_rest_are_the_logit(normalize: bool, tokens: bool) -> None:
    model = make_model(tokens=tokens, NORMALIZE=normalize)
    images = torch.randn(3, 3, 80, 80)
    with torch.no_grad():
        logits = model.classify(images)
    predicted = compute_class_activation(model, images)
    assert_close(predicted.classes, logits.argmax(dim=1))
    assert_close(predicted.scores, logits.softmax(dim=1).amax(dim=1))
    for found, expected in (
        (predicted, logits.amax(dim=1)),
        (compute_class_activation(model, images, 2), logits[:, 2]),
    ):
        assert found.maps.shape == (3, 5, 5)
        sums = found.maps.mean(dim=(1, 2)) + found.rest
        assert_close(sums, expected, atol=1e-4, rtol=1e-4)


def relax(values: FloatMap, sweeps: int = 4000) -> FloatMap:
    """Gauss–Seidel: each position inside in turn becomes the mean of its neighbours."""
    u = values.copy()
    rows, columns = u.shape
    for _ in range(sweeps):
        before = u.copy()
        for i in range(1, rows - 1):
            for j in range(1, columns - 1):
                u[i, j] = (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1]) / 4
        if np.abs(u - before).max() < 1e-14:
            break
    return u


def test_steady_heat_is_where_gauss_and_seidel_end_and_compared_inside_the_border() -> None:
    values = np.random.default_rng(0).normal(size=(2, 6, 8))
    found = solve_steady_heat(values)
    for one, expected in zip(found, values, strict=True):
        np.testing.assert_allclose(one, relax(expected), atol=1e-10)
    x, y = np.meshgrid(np.arange(11.0), np.arange(7.0))
    harmonic = x**3 - 3 * x * y**2
    border = harmonic.copy()
    border[1:-1, 1:-1] = np.nan
    np.testing.assert_allclose(solve_steady_heat(border), harmonic, atol=1e-9)
    with pytest.raises(NotApplicable, match="border"):
        solve_steady_heat(np.zeros((2, 5)))

    true = np.random.default_rng(3).normal(size=(4, 5))
    other = 2 - 3 * true
    other[0] = 99
    assert correlate_inside(other, true) == pytest.approx(-1)
    assert np.isnan(correlate_inside(true, np.full((4, 5), 0.1)))


def test_the_figure_compares_the_map_of_each_image_with_steady_heat(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    run, options = tiny.get("classifier"), FigureOptions(images=photos, num_images=2)
    runs = [tiny.get("untrained"), tiny.get("transformer"), run, truncate(run, tmp_path)]
    figure = draw_heat(runs, options, heat_class="dog")
    check_files(figure, tmp_path)
    names = ("untrained", "transformer", "cut")
    assert all(name in t for name, t in zip(names, figure.data["left_out"], strict=True))
    entries = run.load_images(2, photos)
    with torch.no_grad():
        scores = [float(output["scores"][1]) for output in run.model(entries)]
    rows = figure.data["runs"]["classifier"]
    assert [row["class"] for row in rows] == ["dog"] * 2
    assert [row["score"] for row in rows] == pytest.approx(scores)
    with pytest.raises(UserError, match="cow"):
        draw_heat([run], options, heat_class="cow")
    with pytest.raises(NotApplicable, match="border"):
        draw_heat([run], options, heat_size=32)


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
    draw_confusion(folder / "classification.json", tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 1000
    (folder / "classification.json").unlink()
    with pytest.raises(NotApplicable, match=r"'run' has no .*classification\.json"):
        draw_classes([Run.open(tmp_path / "run")], FigureOptions())
