# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What every objective stands on: the way of images into the backbone, and which map is learned."""

from typing import Any

import pytest
import torch

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain.base import PretrainingModel, find_map
from tests.modeling.tiny_pretraining import MEAN, STD, PatchesAsMap, make_inputs


def make_model(
    kind: type[PretrainingModel] = PretrainingModel, /, **changes: Any
) -> PretrainingModel:
    values = {
        "backbone": PatchesAsMap(),
        "in_feature": "map",
        "head_in_features": ["map"],
        "image_size": 32,
        "pixel_mean": MEAN,
        "pixel_std": STD,
    }
    return kind(**{**values, **changes})


def test_images_are_normalised_by_channel() -> None:
    inputs = make_inputs(3, 32)
    found = make_model().preprocess_image(inputs)
    assert found.shape == (3, 3, 32, 32)
    for channel in range(3):
        expected = (inputs[1]["image"][channel].float() - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(found[1, channel], expected)


def test_an_image_of_another_size_or_none_is_named_with_the_mapper_that_makes_it() -> None:
    class TwoViews(PretrainingModel):
        mapper_name = "two_views"

    model = make_model(TwoViews)
    entry = {"image": torch.zeros(3, 32, 16, dtype=torch.uint8), "file_name": "a.jpg"}
    with pytest.raises(UserError, match="a\\.jpg"):
        model.preprocess_image([entry])
    with pytest.raises(UserError, match="a\\.jpg"):
        model.preprocess_image([entry], key="image_key")


@pytest.mark.parametrize(
    ("multiple", "sizes"), [(None, [1, 40, 64]), (1, [16, 48]), (4, [64, 128])]
)
def test_an_image_falls_into_as_many_positions_as_the_objective_needs(
    multiple: int | None, sizes: list[int]
) -> None:
    shapes = PatchesAsMap().output_shape()
    for size in sizes:
        assert find_map(shapes, "map", size, multiple=multiple).stride == 16
    for size in (0, 72) if multiple else (0,):
        side = 16 * (multiple or 1)
        with pytest.raises(ValueError, match=rf"multiple of {side}, not {size}: set .* to \d+"):
            find_map(shapes, "map", size, multiple=multiple)
