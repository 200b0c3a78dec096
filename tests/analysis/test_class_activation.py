# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class activation maps sum to the logits, whatever normalises in between; and their figure."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.modeling import build_model
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis.class_activation import compute_class_activation, draw_heat
from qbheat_det.analysis.figure import FigureOptions
from qbheat_det.analysis.steady_heat import compare_with_heat
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import NotApplicable, to_json
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


def test_a_position_has_what_its_features_alone_add() -> None:
    model = make_model(tokens=False)
    images = torch.randn(2, 3, 80, 80)
    found = compute_class_activation(model, images, 1)
    with torch.no_grad():
        features = model.backbone(images)["s16_expanded"]
        alone = model.decoder({"s16_expanded": features[:, :, 3:4, 2:3]})[:, 1]
    assert_close(found.maps[:, 3, 2] + found.rest, alone)


def test_the_figure_compares_the_map_of_each_image_with_steady_heat(
    tiny: TinyRuns, photos: Path, tmp_path: Path
) -> None:
    run = tiny.get("classifier")
    options = FigureOptions(images=photos, num_images=2)
    runs = [tiny.get("untrained"), tiny.get("transformer"), run, truncate(run, tmp_path)]
    figure = draw_heat(runs, options, heat_class="dog")
    check_files(figure, tmp_path)
    assert list(figure.images) == ["maps_1", "agreement"]
    names = ("untrained", "transformer", "cut")
    assert [name in t for name, t in zip(names, figure.data["left_out"], strict=True)]
    rows = figure.data["runs"]["classifier"]
    assert [row["class"] for row in rows] == ["dog"] * 3
    entries = run.load_images(3, photos)
    with torch.no_grad():
        scores = [float(output["scores"][1]) for output in run.model(entries)]
        features = run.model.backbone(run.model.preprocess_image(entries))["s16_expanded"]
        maps = torch.einsum("nchw,c->nhw", features, run.model.decoder.classifier.weight[1, :64])
    for row, score, values in zip(rows, scores, maps, strict=True):
        assert row["score"] == pytest.approx(score)
        expected = compare_with_heat(values.numpy())
        steady = asdict(expected.agreements["steady"])
        assert row["steady"] == pytest.approx(steady, abs=1e-3)
        assert row["source"] == expected.source
    by_index = draw_heat([run], options, heat_class="1")
    assert to_json(by_index.data["runs"]) == to_json(figure.data["runs"])


def test_unknown_classes_and_maps_without_inside_are_refused(tiny: TinyRuns, photos: Path) -> None:
    run, options = tiny.get("classifier"), FigureOptions(images=photos)
    with pytest.raises(UserError, match="cow"):
        draw_heat([run], options, heat_class="cow")
    with pytest.raises(NotApplicable, match="border"):
        draw_heat([run], options, heat_size=32)
    with pytest.raises(NotApplicable, match="untrained"):
        draw_heat([tiny.get("untrained")], options)
