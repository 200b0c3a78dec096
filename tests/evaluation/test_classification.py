# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accuracy, nearest neighbours and the held-out loss, by hand and against naive loops."""

import json
import math

import numpy as np
import pytest
import torch
from detectron2.utils import comm
from torch.testing import assert_close

from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import (
    ClassificationEvaluator,
    HeldOutLossEvaluator,
    find_confusions,
    measure_ranks,
)
from qbheat_det.evaluation.classification import predict, rank_true_class, rank_true_classes

NAMES = [f"class {i}" for i in range(7)]


def evaluate(scores, labels, *, output_dir=None, batch=4):
    folder = None if output_dir is None else str(output_dir)
    evaluator = ClassificationEvaluator("val", class_names=NAMES, output_dir=folder)
    evaluator.reset()
    for start in range(0, len(labels), batch):
        rows = range(start, min(start + batch, len(labels)))
        inputs = [{"image_id": i, "label": labels[i]} for i in rows]
        evaluator.process(inputs, [{"scores": scores[i]} for i in rows])
    return evaluator.evaluate()["classification"], evaluator


def test_figures_are_those_of_counting_image_by_image(tmp_path):
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


def test_neither_batches_nor_processes_nor_images_seen_twice_change_a_figure(monkeypatch):
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


def test_equal_scores_go_to_the_first_class_and_nan_is_wrong_in_every_way():
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


def test_confusions_come_by_their_number_and_then_by_class():
    matrix = np.array([[9, 2, 0], [2, 9, 5], [0, 1, 9]])
    assert find_confusions(matrix) == [(1, 2, 5), (0, 1, 2), (1, 0, 2), (2, 1, 1)]
    assert find_confusions(np.eye(3, dtype=np.int64)) == []


def test_a_model_of_other_outputs_or_other_classes_is_refused():
    evaluator = ClassificationEvaluator("val", class_names=NAMES)
    inputs = [{"image_id": 0, "label": 0}]
    with pytest.raises(UserError, match="META_ARCHITECTURE"):
        evaluator.process(inputs, [{"instances": 1}])
    with pytest.raises(UserError, match="CLASS_NAMES"):
        evaluator.process(inputs, [{"scores": torch.zeros(3)}])


def entry(image):
    return {"image_id": image, "file_name": f"{image}.jpg"}


def output(place, loss):
    return {"place": place, "loss_reconstruction": torch.tensor(loss)}


def test_means_are_those_of_the_views_and_the_error_is_over_images():
    evaluator = HeldOutLossEvaluator("held_out")
    evaluator.process([entry(1), entry(1)], [output("top_left", 1.0), output("centre", 3.0)])
    evaluator.process([entry(10)], [output("bottom_right", 5.0)])
    evaluator.process([entry(10)], [output("centre", 4.0)])
    found = evaluator.evaluate()["reconstruction"]
    # Of image 1 the mean is 2, of image 10 it is 4.5; their deviation is 2.5 / sqrt(2).
    assert found == pytest.approx(
        {"loss_corner": 3.0, "loss_centre": 3.5, "loss": 3.25, "loss_standard_error": 1.25}
    )
    evaluator.reset()
    evaluator.process([entry(1)], [output("centre", 2.0)])
    found = evaluator.evaluate()["reconstruction"]
    assert math.isnan(found.pop("loss_standard_error"))
    assert found == {"loss_centre": 2.0, "loss": 2.0}


def test_without_places_the_mean_is_over_images_and_stands_alone():
    evaluator = HeldOutLossEvaluator("held_out")
    for image, loss in enumerate((1.0, 2.0, 6.0)):
        evaluator.process([entry(image)], [{"loss_reconstruction": torch.tensor(loss)}])
    found = evaluator.evaluate()["reconstruction"]
    # Variance (4 + 1 + 9) / 2 = 7.
    assert found == pytest.approx({"loss": 3.0, "loss_standard_error": math.sqrt(7 / 3)})

    evaluator = HeldOutLossEvaluator("held_out")
    assert math.isnan(evaluator.evaluate()["reconstruction"]["loss"])
    evaluator.process([entry(1)], [output("centre", math.nan)])
    assert math.isnan(evaluator.evaluate()["reconstruction"]["loss"])
    with pytest.raises(UserError, match="held_out"):
        evaluator.process([entry(1)], [{"instances": None}])


def draw(number, *, classes, dim=6, seed=0):
    """Features that are small whole numbers, so that many are equal or of equal direction."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randint(-1, 2, (number, dim), generator=generator).float()
    features[:, 0] += 2  # else some would be zero
    return features, torch.randint(classes, (number,), generator=generator)


def naive_ranks(train, val, *, k, temperature):
    """One image and one neighbour at a time."""
    ranks = []
    for feature, truth in zip(val[0].double().numpy(), val[1].tolist(), strict=True):
        similarities = []
        for other in train[0].double().numpy():
            cosine = feature @ other / math.sqrt(feature @ feature) / math.sqrt(other @ other)
            similarities.append(float(np.float32(cosine)))
        order = sorted(range(len(similarities)), key=lambda i: (-similarities[i], i))
        votes = {}
        for i in sorted(order[:k]):
            label = int(train[1][i])
            votes[label] = votes.get(label, 0.0) + math.exp(similarities[i] / temperature)
        ranking = sorted(votes, key=lambda label: (-votes[label], label))
        ranks.append(ranking.index(truth) if truth in ranking else 99)
    return ranks


def score_of(ranks):
    hits = [100 * sum(rank < top for rank in ranks) / len(ranks) for top in (1, 5)]
    return hits[0], hits[1]


@pytest.mark.parametrize("chunk", [200, 10**6])
@pytest.mark.parametrize(("k", "classes"), [(1, 3), (20, 12), (500, 4)])
def test_ranks_are_those_of_a_double_loop_however_the_work_is_cut(k, classes, chunk):
    train, val = draw(90, classes=classes), draw(30, classes=classes, seed=1)
    # A tie decides which neighbours vote.
    assert len(train[0].unique(dim=0)) < len(train[0])
    ranks = rank_true_classes(train, val, k=k, temperature=0.07, chunk=chunk)
    expected = naive_ranks(train, val, k=k, temperature=0.07)
    capped = [rank if rank < 99 else classes for rank in expected]
    assert [min(rank, classes) for rank in ranks.tolist()] == capped
    score = measure_ranks(ranks)
    assert (score["top1"], score["top5"]) == pytest.approx(score_of(expected))


def test_at_a_very_low_temperature_the_nearest_decides():
    train = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), torch.tensor([0, 1, 2])
    val = torch.tensor([[0.1, 1.0], [1.0, 0.1]]), torch.tensor([2, 0])
    # exp(1 / 0.001) is infinite in float64: all would tie, and the first class win.
    ranks = rank_true_classes(train, val, k=3, temperature=0.001)
    torch.testing.assert_close(ranks, torch.tensor([0, 0]))
    ranks = rank_true_classes(train, (val[0], torch.tensor([0, 2])), k=3, temperature=0.001)
    assert int(ranks.max()) < 3  # they have votes, however small


def test_errors_are_those_of_binomial_counts():
    error = 100 * math.sqrt(0.75 * 0.25 / 4)
    expected = {"top1": 50.0, "top5": 75.0, "top1_standard_error": 25.0}
    assert measure_ranks(torch.tensor([0, 0, 3, 9])) == {**expected, "top5_standard_error": error}
    assert all(map(math.isnan, measure_ranks(torch.tensor([])).values()))
