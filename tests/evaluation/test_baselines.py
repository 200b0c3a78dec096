# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Baselines of the reconstruction loss, against a naive implementation on whole patches."""

import pytest
import torch
from detectron2.modeling import build_model
from torch.testing import assert_close

from qbheat_det.evaluation import HeldOutLossEvaluator, baselines
from qbheat_det.evaluation.baselines import ReconstructionBaselines, fit_ridge
from qbheat_det.modeling.contracts import PATCHES
from tests.modeling.tiny_pretraining import make_tiny_config

NUM_IMAGES = 20


@pytest.fixture(scope="module")
def images():
    """Smooth images, so that masked pixels depend on visible ones, by name in order of folds."""
    generator = torch.Generator().manual_seed(0)
    coarse = 255 * torch.rand(NUM_IMAGES, 3, 3, 3, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (64, 64), mode="bicubic").clamp(0, 255)
    names = sorted((str(index) for index in range(NUM_IMAGES)), key=baselines._order)
    return dict(zip(names, smooth.round(), strict=True))


def evaluate(model, images, places):
    """Returns results as of an evaluation in batches of three, and all outputs by image."""
    evaluator = HeldOutLossEvaluator("held_out")
    entries = []
    for name, image in images.items():
        entries += [{"image_id": name, "image": image, "place": place} for place in places]
    all_outputs = {name: [] for name in images}
    with torch.no_grad():
        for start in range(0, len(entries), 3):
            batch = entries[start : start + 3]
            outputs = model(batch)
            evaluator.process(batch, outputs)
            for entry, output in zip(batch, outputs, strict=True):
                all_outputs[entry["image_id"]].append(output)
    return evaluator.evaluate()["reconstruction"], all_outputs


def block_means(patches, side):
    """Returns patches (..., 3 * 16 * 16) whose values are replaced by means of their blocks."""
    blocks = patches.unflatten(-1, (3, side, 16 // side, side, 16 // side))
    return blocks.mean(dim=(-1, -3), keepdim=True).expand_as(blocks).flatten(-5)


def predict_naively(name, outputs, index, fitted):
    """Returns predicted targets (L, P) of one view; ridge regression in its primal form."""
    patches = outputs[index][PATCHES]
    count = len(patches.target)
    if name == "zero":
        return torch.zeros_like(patches.target)
    if name == "mean":
        by_channel = patches.target[patches.visible].unflatten(1, (3, -1))
        mean = by_channel.double().mean(dim=(0, 2))
        return mean[:, None].expand(3, 256).flatten().expand(count, -1)
    x = torch.stack([corners(other.pixels)[patches.visible].flatten() for other in fitted])
    y = torch.stack([block_means(other.target, 4).flatten() for other in fitted]).double()
    query = corners(patches.pixels)[patches.visible].flatten()
    centered = x - x.mean(dim=0)
    penalty = 3 * centered.square().sum(dim=1).mean()
    gram = centered.T @ centered + penalty * torch.eye(x.shape[1])
    weights = torch.linalg.solve(gram, centered.T @ (y - y.mean(dim=0)))
    return ((query - x.mean(dim=0)) @ weights + y.mean(dim=0)).view(count, -1)


def corners(patches):
    """Returns the four means of each channel of patches (L, 768), as (L, 12)."""
    blocks = block_means(patches, 2).unflatten(1, (3, 16, 16))
    return blocks[:, :, ::8, ::8].flatten(1).double()


@pytest.mark.parametrize(
    ("objective", "places"),
    [("QBHeat", ["top_left", "centre"]), ("MaskTokenMasking", [""]), ("InterpolatedMasking", [""])],
)
@pytest.mark.parametrize("normalized", [True, False])
def test_losses_are_those_of_naive_predictions(images, objective, places, normalized):
    cfg = make_tiny_config(objective)
    cfg.MODEL.QB_HEAT.NORM_PIXEL_LOSS = normalized
    model = build_model(cfg).eval()
    found, outputs = evaluate(model, images, places)
    for name in ("zero", "mean", "ridge"):
        losses = []
        for position, image in enumerate(images):
            fitted = []
            for other_position, other in enumerate(images):
                if other_position % 5 != position % 5:
                    fitted.append(outputs[other][0][PATCHES])
            for index, output in enumerate(outputs[image]):
                predicted = predict_naively(name, outputs[image], index, fitted)
                patches = output[PATCHES]
                error = (predicted - patches.target).square().mean(dim=1)
                losses.append(float(error[~patches.visible].mean()))
        assert found[name] == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    # The loss of the model itself, by the same mask and target.
    first = next(iter(outputs.values()))[0]
    patches = first[PATCHES]
    assert_close(patches.target, model.loss.find_target(patches.pixels[None])[0])


def test_ridge_regression_finds_a_linear_map():
    x = torch.randn(400, 5)
    weights = torch.randn(5, 3)
    predicted = fit_ridge(x, x @ weights + 7, x[:9])
    assert_close(predicted, x[:9] @ weights + 7, rtol=0, atol=0.2)
    # Constant inputs have no kernel to invert.
    assert_close(fit_ridge(torch.ones(4, 2), torch.ones(4, 1), torch.ones(1, 2)), torch.ones(1, 1))


def test_many_images_are_sampled_and_few_have_no_ridge_regression(monkeypatch, images):
    model = build_model(make_tiny_config("QBHeat")).eval()
    _, outputs = evaluate(model, images, ["centre"])
    monkeypatch.setattr(baselines, "_MAX_IMAGES", 3)
    sampled = ReconstructionBaselines()
    for name in reversed(images):  # in another order
        sampled.process([name], outputs[name])
    first = ReconstructionBaselines()
    for name in list(images)[:3]:
        first.process([name], outputs[name])
    results = first.evaluate()
    assert "ridge" not in results
    assert results == pytest.approx(
        {name: value for name, value in sampled.evaluate().items() if name != "ridge"}
    )
    first.reset()
    assert first.evaluate() == {}
