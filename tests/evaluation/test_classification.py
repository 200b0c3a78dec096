# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accuracy of classifiers against counting by hand and against naive loops."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.utils import comm
from torch.testing import assert_close

from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import ClassificationEvaluator, find_confusions
from qbheat_det.evaluation.classification import predict, rank_true_class

NAMES = [f"class {i}" for i in range(7)]


def evaluate(
    scores: torch.Tensor, labels: list[int], *, output_dir: Path | None = None, batch: int = 4
) -> tuple[dict[str, float], ClassificationEvaluator]:
    folder = None if output_dir is None else str(output_dir)
    evaluator = ClassificationEvaluator("val", class_names=NAMES, output_dir=folder)
    evaluator.reset()
    for start in range(0, len(labels), batch):
        rows = range(start, min(start + batch, len(labels)))
        inputs: list[dict[str, Any]] = [{"image_id": i, "label": labels[i]} for i in rows]
        evaluator.process(inputs, [{"scores": scores[i]} for i in rows])
    return evaluator.evaluate()["classification"], evaluator


def test_figures_are_those_of_counting_image_by_image(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = [int(label) for label in rng.choice(6, 60, p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.05])]
    scores = torch.from_numpy(rng.normal(size=(60, 7)))
    for i, label in enumerate(labels):
        scores[i, label] += 1.0
    found, evaluator = evaluate(scores, labels, output_dir=tmp_path / "out")

    ordered = [sorted(range(7), key=lambda k: -float(row[k])) for row in scores]
    top1 = [order[0] == label for order, label in zip(ordered, labels, strict=True)]
    top5 = [label in order[:5] for order, label in zip(ordered, labels, strict=True)]
    by_class = {
        k: [right for right, label in zip(top1, labels, strict=True) if label == k]
        for k in set(labels)
    }
    shares = {k: np.mean(rights) for k, rights in by_class.items()}
    variances = [s * (1 - s) / len(by_class[k]) for k, s in shares.items()]
    assert 6 not in shares  # a class without images counts nowhere
    assert found == pytest.approx(
        {
            "top1": 100 * np.mean(top1),
            "top5": 100 * np.mean(top5),
            "balanced": 100 * np.mean(list(shares.values())),
            "top1_standard_error": 100 * math.sqrt(np.mean(top1) * (1 - np.mean(top1)) / 60),
            "top5_standard_error": 100 * math.sqrt(np.mean(top5) * (1 - np.mean(top5)) / 60),
            "balanced_standard_error": 100 * math.sqrt(sum(variances)) / len(shares),
        }
    )
    expected = np.zeros((7, 7), int)
    for order, label in zip(ordered, labels, strict=True):
        expected[label, order[0]] += 1
    np.testing.assert_array_equal(evaluator.confusion, expected)

    written = json.loads((tmp_path / "out" / "classification.json").read_text())
    assert written["num_images"] == 60
    assert written["top1"] == pytest.approx(found["top1"])
    tops = {entry["name"]: entry["top1"] for entry in written["classes"]}
    assert tops == pytest.approx(
        {NAMES[k]: 100 * shares[k] if k in shares else None for k in range(7)}
    )
    pairs = {
        (NAMES.index(entry["class"]), NAMES.index(entry["taken_for"])): entry["images"]
        for entry in written["confusions"]
    }
    assert pairs == {(i, j): n for i, j, n in find_confusions(expected)}


def test_neither_batches_nor_processes_nor_images_seen_twice_change_a_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.rand(9, 7, generator=torch.Generator().manual_seed(1))
    labels = [0, 1, 2, 3, 4, 5, 6, 0, 1]
    whole, _ = evaluate(scores, labels, batch=9)
    assert evaluate(scores, labels, batch=2)[0] == whole
    evaluator = ClassificationEvaluator("val", class_names=NAMES)
    for _ in range(2):
        inputs = [{"image_id": i, "label": label} for i, label in enumerate(labels)]
        evaluator.process(inputs, [{"scores": row} for row in scores])
    assert evaluator.evaluate()["classification"] == whole
    parts = [evaluator._seen[1::2], evaluator._seen[::2]]
    with monkeypatch.context() as patch:
        patch.setattr(comm, "gather", lambda own, dst: parts)
        assert evaluator.evaluate()["classification"] == whole
        patch.setattr(comm, "is_main_process", lambda: False)
        assert evaluator.evaluate() == {}
    evaluator.reset()
    assert all(map(math.isnan, evaluator.evaluate()["classification"].values()))


def test_equal_scores_go_to_the_first_class_and_nan_is_wrong_in_every_way() -> None:
    nan = float("nan")
    scores = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [nan, 0.0, 1.0], [0.0, nan, nan]])
    labels = torch.tensor([1, 1, 2, 0])
    assert_close(predict(scores), torch.tensor([0, 1, -1, -1]))
    assert rank_true_class(scores, labels).tolist()[:2] == [1, 0]
    assert int(rank_true_class(scores, labels)[2:].min()) >= 5  # in no top five either
    with_nan = torch.full((2, 7), nan)
    with_nan[1] = torch.arange(7.0)
    found, evaluator = evaluate(with_nan, [6, 6])
    assert (found["top1"], found["top5"], found["balanced"]) == (50.0, 50.0, 50.0)
    assert evaluator.confusion.sum() == 1


def test_confusions_come_by_their_number_and_then_by_class() -> None:
    matrix = np.array([[9, 2, 0], [2, 9, 5], [0, 1, 9]])
    assert find_confusions(matrix) == [(1, 2, 5), (0, 1, 2), (1, 0, 2), (2, 1, 1)]
    assert find_confusions(np.eye(3, dtype=np.int64)) == []


def test_a_model_of_other_outputs_or_other_classes_is_refused() -> None:
    evaluator = ClassificationEvaluator("val", class_names=NAMES)
    inputs = [{"image_id": 0, "label": 0}]
    with pytest.raises(UserError, match="META_ARCHITECTURE"):
        evaluator.process(inputs, [{"instances": 1}])
    with pytest.raises(UserError, match="CLASS_NAMES"):
        evaluator.process(inputs, [{"scores": torch.zeros(3)}])
