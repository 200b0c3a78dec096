# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Linear prediction against a naive double loop and against the solution of the equations."""

from collections.abc import Mapping
from itertools import product
from typing import cast

import pytest
import torch
from torch import Tensor

from qbheat_det.modeling.pretrain import QUADRANTS, HeatPredictor, VisibleQuarters
from qbheat_det.modeling.pretrain.heat_predictor import DIRECTIONS, LinearModels

GRID = 8
CPU = torch.device("cpu")
# Row and column of the visible block, in halves of the image.
CORNER = {"top_left": (0, 0), "top_right": (0, 1), "bottom_left": (1, 0), "bottom_right": (1, 1)}
PLACE_LISTS = [
    ["centre"],
    ["bottom_left"],
    ["bottom_right", "centre", "top_left", "bottom_right", "centre", "centre", "top_right"],
]


def fill_(predictor: HeatPredictor, scale: float = 0.3) -> HeatPredictor:
    """Gives every explicit matrix random values, in double precision."""
    predictor.double()
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return predictor.requires_grad_(False)


def models_of(predictor: HeatPredictor, scale: str) -> dict[str, Tensor]:
    return cast(LinearModels, predictor.scales[scale]).matrices()


def naive_image(visible: Tensor, place: str, predictor: HeatPredictor) -> Tensor:
    """Predicts (G, G, C) from one visible quarter (G / 2, G / 2, C), position by position."""
    scale, size = ("centre", GRID // 4) if place == "centre" else ("corner", GRID // 2)
    whole = visible.new_zeros(GRID, GRID, visible.shape[-1])
    for row, column in product(range(GRID), range(GRID)):
        block = (row // size, column // size)
        # The visible block that the prediction starts from, and where the visible quarter begins.
        source = CORNER.get(place, tuple(min(max(index, 1), 2) for index in block))
        first = [index * size for index in CORNER.get(place, (1, 1))]
        z = visible[
            source[0] * size + row % size - first[0], source[1] * size + column % size - first[1]
        ]
        signs = (block[1] - source[1], block[0] - source[0])
        if signs != (0, 0):
            name = next(name for name, each in DIRECTIONS.items() if each == signs)
            z = z + models_of(predictor, scale)[name] @ z
        whole[row, column] = z
    return whole


def predict(predictor: HeatPredictor, visible: Tensor, places: list[str]) -> Tensor:
    """Predicts for visible quarters in the order of ``places``."""
    quarters = VisibleQuarters.at(places, device=CPU)
    whole = predictor(visible[quarters.order], quarters.counts)
    return whole[quarters.order.argsort()]


@pytest.mark.parametrize("num_models", [8, 4, 2])
@pytest.mark.parametrize("places", PLACE_LISTS)
def test_every_position_is_what_a_double_loop_predicts(num_models: int, places: list[str]) -> None:
    predictor = fill_(HeatPredictor(dim=3, num_models=num_models))
    visible = torch.randn(len(places), GRID // 2, GRID // 2, 3, dtype=torch.double)
    expected = [naive_image(z, place, predictor) for z, place in zip(visible, places, strict=True)]
    torch.testing.assert_close(predict(predictor, visible, places), torch.stack(expected))


def commuting_matrices() -> tuple[Tensor, Tensor]:
    """Two matrices of waves and decays that commute: both have the same eigenvectors."""
    vectors = torch.randn(4, 4, dtype=torch.double)
    a = torch.tensor([[-0.1, 0.5, 0, 0], [-0.5, -0.1, 0, 0], [0, 0, 0.1, 0], [0, 0, 0, -0.2]])
    b = torch.tensor([[0.1, -0.3, 0, 0], [0.3, 0.1, 0, 0], [0, 0, -0.2, 0], [0, 0, 0, 0.3]])
    inverse = torch.linalg.inv(vectors)
    return vectors @ a.double() @ inverse, vectors @ b.double() @ inverse


def set_finite_differences_(predictor: HeatPredictor, a: Tensor, b: Tensor) -> None:
    """Sets I + M to the exact step of the equations, for each direction that is explicit."""
    identity = torch.eye(len(a), dtype=torch.double)
    for models in cast(Mapping[str, LinearModels], predictor.scales).values():
        steps = models.offset * GRID
        for name, parameter in models.named_parameters():
            x, y = DIRECTIONS[name]
            step = torch.linalg.matrix_exp(a * x * steps) @ torch.linalg.matrix_exp(b * y * steps)
            parameter.data = step - identity


@pytest.mark.parametrize(("num_models", "place"), [(8, "top_left"), (4, "centre")])
def test_a_solution_of_the_equations_is_predicted_exactly(num_models: int, place: str) -> None:
    a, b = commuting_matrices()
    torch.testing.assert_close(a @ b, b @ a)
    z0 = torch.randn(4, dtype=torch.double)
    whole = torch.empty(1, GRID, GRID, 4, dtype=torch.double)
    for y, x in product(range(GRID), range(GRID)):
        whole[0, y, x] = torch.linalg.matrix_exp(a * x) @ torch.linalg.matrix_exp(b * y) @ z0
    predictor = HeatPredictor(dim=4, num_models=num_models).double().requires_grad_(False)
    set_finite_differences_(predictor, a, b)
    crop = VisibleQuarters.at([place], device=CPU).crop(whole.permute(0, 3, 1, 2))
    torch.testing.assert_close(predict(predictor, crop.permute(0, 2, 3, 1), [place]), whole)


def test_eight_four_and_two_models_coincide_where_the_explicit_ones_satisfy_eq_9_and_12() -> None:
    two, four, eight = (fill_(HeatPredictor(dim=3, num_models=count)) for count in (2, 4, 8))
    for scale in ("corner", "centre"):
        a, b = (two.get_parameter(f"scales.{scale}.{name}") for name in ("A1", "B1"))
        explicit = {"A1": a, "B1": b, "A2": -a, "B2": -b}
        for (i, x), (j, y) in product((("1", 1), ("2", -1)), repeat=2):
            explicit[f"C{i}{j}"] = x * a + y * b + x * y * (a @ b + b @ a) / 2
        for name, value in explicit.items():
            eight.get_parameter(f"scales.{scale}.{name}").data = value.clone()
            if name[0] in "AB":
                four.get_parameter(f"scales.{scale}.{name}").data = value.clone()
    visible = torch.randn(len(QUADRANTS), GRID // 2, GRID // 2, 3, dtype=torch.double)
    expected = predict(eight, visible, list(QUADRANTS))
    torch.testing.assert_close(predict(four, visible, list(QUADRANTS)), expected)
    torch.testing.assert_close(predict(two, visible, list(QUADRANTS)), expected)


def test_every_matrix_has_a_gradient_even_without_an_image_of_its_scale() -> None:
    predictor = HeatPredictor(dim=2)
    visible = torch.randn(1, GRID // 2, GRID // 2, 2)
    predict(predictor, visible, ["bottom_left"]).square().sum().backward()
    for name, parameter in predictor.named_parameters():
        assert parameter.grad is not None, name
        in_use = name in {"scales.corner.A1", "scales.corner.B2", "scales.corner.C12"}
        assert bool(parameter.grad.abs().sum() > 0) == in_use, name


def test_a_small_matrix_survives_bfloat16() -> None:
    predictor = HeatPredictor(dim=1, visible="corner")
    for parameter in predictor.parameters():
        parameter.data.fill_(1e-3)
    visible = torch.full((1, 2, 2, 1), 1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = predict(predictor, visible, ["top_left"])[0, 2, 2] - visible[0, 0, 0]
    torch.testing.assert_close(moved, torch.tensor([1e-7]), rtol=0.02, atol=0)
