# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat as a whole, and linear prediction against a double loop and the equations."""

from collections.abc import Mapping
from itertools import product
from typing import cast

import pytest
import torch
from detectron2.modeling import build_model
from fvcore.nn import FlopCountAnalysis

from qbheat_det.modeling.pretrain import QUADRANTS, HeatPredictor, QBHeat, VisibleQuarters
from qbheat_det.modeling.pretrain.qb_heat import DIRECTIONS, LinearModels
from tests.modeling.tiny_pretraining import (
    make_config,
    make_copying_model,
    make_inputs,
    make_tiny_config,
)

CPU = torch.device("cpu")
# First row and column of the visible quarter, in quarters of the side.
FIRST = {
    "top_left": (0, 0),
    "top_right": (0, 2),
    "bottom_left": (2, 0),
    "bottom_right": (2, 2),
    "centre": (1, 1),
}


def pixel_mask(place, size):
    """Returns (S, S): which pixels are visible."""
    mask = torch.zeros(size, size, dtype=torch.bool)
    top, left = (size // 4 * index for index in FIRST[place])
    mask[top : top + size // 2, left : left + size // 2] = True
    return mask


@pytest.mark.parametrize("place", QUADRANTS)
def test_the_encoder_never_sees_a_masked_pixel(place):
    model = build_model(make_tiny_config()).eval()
    seen = []
    model.backbone.register_forward_hook(lambda _, args, out: seen.append(out["s16_expanded"]))
    inputs = make_inputs(1)
    mask = pixel_mask(place, 64)
    image = inputs[0]["image"]
    masked_changed = {"image": torch.where(mask, image, 255 - image)}
    visible_changed = {"image": torch.where(mask, 255 - image, image)}
    with torch.no_grad():
        for entry in (inputs[0], masked_changed, visible_changed):
            model([entry], [place])
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_the_encoders_convolutions_cost_a_quarter_of_those_over_the_whole_image():
    model = build_model(make_tiny_config()).eval()
    shapes = []
    model.backbone.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    with torch.no_grad():
        model(make_inputs(5))
    assert shapes == [torch.Size((5, 3, 32, 32))]

    def count(size):
        analysis = FlopCountAnalysis(model.backbone, torch.zeros(1, 3, size, size))
        return analysis.unsupported_ops_warnings(False).by_operator()["conv"]

    assert 4 * count(32) == count(64) > 0


@pytest.mark.parametrize("place", QUADRANTS)
def test_copying_reproduces_what_is_visible_where_it_is(place):
    entry = make_inputs(1, size=128)[0]
    result = make_copying_model(QBHeat, HeatPredictor(dim=768), 8)([entry], [place])[0]
    visible = result["visible"]
    assert result["place"] == place
    assert torch.equal(visible, pixel_mask(place, 128))
    found, expected = result["reconstruction"][:, visible], entry["image"][:, visible]
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-3)


def test_training_has_the_loss_and_the_gradients_that_evaluation_has():
    """The former computes what the loss looks at alone, and the latter whole images."""
    model = build_model(make_tiny_config()).eval()
    inputs = make_inputs(5)
    found = []
    for training in (False, True):
        model.training = training  # but not the BatchNorms
        model.zero_grad()
        results = model(inputs, QUADRANTS)
        if not training:
            results = {"loss_reconstruction": sum(r["loss_reconstruction"] for r in results) / 5}
        results["loss_reconstruction"].backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append({**results, **gradients})
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_an_image_in_a_batch_is_reconstructed_as_alone():
    model = build_model(make_tiny_config()).eval()
    inputs = make_inputs(6)
    places = ["centre", "bottom_left", "top_left", "centre", "top_right", "bottom_left"]
    with torch.no_grad():
        together = model(inputs, places)
        alone = [model([entry], [place])[0] for entry, place in zip(inputs, places, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.pop("place") == other.pop("place")
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_evaluation_takes_the_places_in_turn():
    results = make_copying_model(QBHeat, HeatPredictor(dim=768), 8)(make_inputs(7, size=128))
    assert [result["place"] for result in results] == [*QUADRANTS, *QUADRANTS[:2]]


def test_a_resnet_is_pre_trained_from_a_map_of_another_stride():
    cfg = make_config(IN_FEATURE="s32")
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.TIMM.OUT_FEATURES = "timm:resnet18", ["s32"]
    cfg.INPUT.PRETRAIN.SIZE = 128
    model = build_model(cfg)
    assert (model.decoder.grid_size, model.decoder.patch_size) == (4, 32)
    assert torch.isfinite(model(make_inputs(2, 128))["loss_reconstruction"])


@pytest.mark.parametrize("visible", ["corner", "centre", "both"])
@pytest.mark.parametrize("num_images", [1, 6, 8, 13])
def test_places_are_shared_out_as_evenly_as_the_batch_allows(visible, num_images):
    for _ in range(10):
        drawn = VisibleQuarters.draw(num_images, visible=visible, device=CPU)
        *corners, _ = drawn.counts
        assert sum(drawn.counts) == num_images
        assert max(corners) - min(corners) <= 1
        at_corners = {"corner": [num_images], "centre": [0]}.get(
            visible, [num_images // 2, num_images - num_images // 2]
        )
        assert sum(corners) in at_corners
        assert drawn.order.sort().values.tolist() == list(range(num_images))


def test_every_corner_is_equally_likely_to_get_the_rest_of_a_batch():
    drawn = [VisibleQuarters.draw(5, visible="corner", device=CPU).counts[:4] for _ in range(400)]
    more = torch.tensor(drawn).sum(dim=0) - 400
    assert more.sum() == 400
    assert (more - 100).abs().max() < 35  # four standard deviations


GRID = 8
# Row and column of the visible block, in halves of the image.
CORNER = {"top_left": (0, 0), "top_right": (0, 1), "bottom_left": (1, 0), "bottom_right": (1, 1)}
PLACE_LISTS = [
    ["centre"],
    ["bottom_left"],
    ["bottom_right", "centre", "top_left", "bottom_right", "centre", "centre", "top_right"],
]


def fill_(predictor, scale=0.3):
    """Gives every explicit matrix random values, in double precision."""
    predictor.double()
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return predictor.requires_grad_(False)


def models_of(predictor, scale):
    return cast(LinearModels, predictor.scales[scale]).matrices()


def naive_image(visible, place, predictor):
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


def predict(predictor, visible, places):
    """Predicts for visible quarters in the order of ``places``."""
    quarters = VisibleQuarters.at(places, device=CPU)
    whole = predictor(visible[quarters.order], quarters.counts)
    return whole[quarters.order.argsort()]


@pytest.mark.parametrize("num_models", [8, 4, 2])
@pytest.mark.parametrize("places", PLACE_LISTS)
def test_every_position_is_what_a_double_loop_predicts(num_models, places):
    predictor = fill_(HeatPredictor(dim=3, num_models=num_models))
    visible = torch.randn(len(places), GRID // 2, GRID // 2, 3, dtype=torch.double)
    expected = [naive_image(z, place, predictor) for z, place in zip(visible, places, strict=True)]
    torch.testing.assert_close(predict(predictor, visible, places), torch.stack(expected))


def commuting_matrices():
    """Two matrices of waves and decays that commute: both have the same eigenvectors."""
    vectors = torch.randn(4, 4, dtype=torch.double)
    a = torch.tensor([[-0.1, 0.5, 0, 0], [-0.5, -0.1, 0, 0], [0, 0, 0.1, 0], [0, 0, 0, -0.2]])
    b = torch.tensor([[0.1, -0.3, 0, 0], [0.3, 0.1, 0, 0], [0, 0, -0.2, 0], [0, 0, 0, 0.3]])
    inverse = torch.linalg.inv(vectors)
    return vectors @ a.double() @ inverse, vectors @ b.double() @ inverse


def set_finite_differences_(predictor, a, b):
    """Sets I + M to the exact step of the equations, for each direction that is explicit."""
    identity = torch.eye(len(a), dtype=torch.double)
    for models in cast(Mapping[str, LinearModels], predictor.scales).values():
        steps = models.offset * GRID
        for name, parameter in models.named_parameters():
            x, y = DIRECTIONS[name]
            step = torch.linalg.matrix_exp(a * x * steps) @ torch.linalg.matrix_exp(b * y * steps)
            parameter.data = step - identity


@pytest.mark.parametrize(("num_models", "place"), [(8, "top_left"), (4, "centre")])
def test_a_solution_of_the_equations_is_predicted_exactly(num_models, place):
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


def test_eight_four_and_two_models_coincide_where_the_explicit_ones_satisfy_eq_9_and_12():
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


def test_a_small_matrix_survives_bfloat16():
    predictor = HeatPredictor(dim=1, visible="corner")
    for parameter in predictor.parameters():
        parameter.data.fill_(1e-3)
    visible = torch.full((1, 2, 2, 1), 1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = predict(predictor, visible, ["top_left"])[0, 2, 2] - visible[0, 0, 0]
    torch.testing.assert_close(moved, torch.tensor([1e-7]), rtol=0.02, atol=0)
