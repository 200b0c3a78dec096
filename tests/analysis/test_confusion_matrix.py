# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The confusion matrix: drawn for few and many classes, and equal to the evaluator's."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.analysis.confusion_matrix import draw_classes, draw_confusion, plot_confusion
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.plotting import chart_image
from qbheat_det.analysis.run import Run
from qbheat_det.core.figures import NotApplicable
from qbheat_det.data import register_image_folders
from qbheat_det.evaluation import ClassificationEvaluator
from tests.data.pictures import draw, save

from .run_folders import write_run
from .tiny_runs import CLASSES, classifier_config, retinanet_config


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
    assert 1000 < len(chart_image(figure, format="png").content)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for index, name in enumerate(CLASSES * 3):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        save(tmp_path / "images" / name / f"{index}.png", draw(80, 80, seed=index))
    name = f"confusion {tmp_path}"
    register_image_folders(name, [str(tmp_path / "images")], labelled=True)
    monkeypatch.setattr(Run, "find_set", lambda self, split: name)
    return name


def test_the_matrix_is_that_of_the_evaluator(dataset: str, tmp_path: Path) -> None:
    cfg = classifier_config()
    cfg.DATASETS.TEST = (dataset.replace("/", "_"),)
    cfg.DATALOADER.NUM_WORKERS = 0
    run = Run.open(write_run(tmp_path / "run", cfg))
    figure = draw_classes([run], FigureOptions())
    inferred = figure.data["runs"]["run"]
    counts = inferred["matrix"]
    assert counts.sum(axis=1).tolist() == [3, 3, 3]
    assert figure.table is not None
    top1 = 100 * counts.trace() / 9
    assert figure.table.rows[0][1] == f"{top1:.2f}"

    # The same images through the evaluator that a run uses, and the file that it writes.
    evaluator = ClassificationEvaluator(
        "a set", class_names=cfg.MODEL.CLASS_NAMES, output_dir=str(tmp_path)
    )
    evaluator.reset()
    for entry in run.load_images(9):
        evaluator.process([entry], run.model([entry]))
    evaluator.evaluate()
    np.testing.assert_array_equal(evaluator.confusion, counts)
    draw_confusion(tmp_path / "classification.json", tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 1000
    DatasetCatalog.remove(dataset)
    MetadataCatalog.remove(dataset)


def test_other_models_are_not_applicable(tmp_path: Path) -> None:
    run = Run.open(write_run(tmp_path / "boxes", retinanet_config()))
    with pytest.raises(NotApplicable, match="boxes"):
        draw_classes([run], FigureOptions())
