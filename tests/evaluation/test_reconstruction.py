# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The held-out loss, averaged by hand."""

import math
from typing import Any

import pytest
import torch

from qbheat_det.core.errors import UserError
from qbheat_det.evaluation.build import HeldOutLossEvaluator


def entry(image: int) -> dict[str, Any]:
    return {"image_id": image, "file_name": f"{image}.jpg"}


def output(place: str, loss: float) -> dict[str, Any]:
    return {"place": place, "loss_reconstruction": torch.tensor(loss)}


def test_means_are_those_of_the_views_and_the_error_is_over_images() -> None:
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


def test_without_places_the_mean_is_over_images_and_stands_alone() -> None:
    evaluator = HeldOutLossEvaluator("held_out")
    for image, loss in enumerate((1.0, 2.0, 6.0)):
        evaluator.process([entry(image)], [{"loss_reconstruction": torch.tensor(loss)}])
    found = evaluator.evaluate()["reconstruction"]
    # Variance (4 + 1 + 9) / 2 = 7.
    assert found == pytest.approx({"loss": 3.0, "loss_standard_error": math.sqrt(7 / 3)})


def test_without_any_image_or_with_a_loss_that_is_not_finite_the_mean_is_nan() -> None:
    evaluator = HeldOutLossEvaluator("held_out")
    assert math.isnan(evaluator.evaluate()["reconstruction"]["loss"])
    evaluator.process([entry(1)], [output("centre", math.nan)])
    assert math.isnan(evaluator.evaluate()["reconstruction"]["loss"])
    with pytest.raises(UserError, match="held_out"):
        evaluator.process([entry(1)], [{"instances": None}])
