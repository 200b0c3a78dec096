# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class activation maps add up to the logits that the model gives, whatever stands in between."""

from typing import Any

import pytest
import torch
from detectron2.modeling import build_model
from torch import nn
from torch.testing import assert_close

from qbheat_det.analysis.class_activation import measure_class_activation
from qbheat_det.modeling.classification import ImageClassifier
from tests.engine.seeing.encoder_subjects import classifier_config


def make_model(decoder: str = "linear", *, tokens: bool = True, **keys: Any) -> ImageClassifier:
    torch.manual_seed(0)
    cfg = classifier_config(decoder, **keys)
    if not tokens:
        cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s16_expanded"]
    model = build_model(cfg).eval()
    assert isinstance(model, ImageClassifier)
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
    predicted = measure_class_activation(model, images)
    assert_close(predicted.classes, logits.argmax(dim=1))
    assert_close(predicted.logits, logits.amax(dim=1))
    assert_close(predicted.scores, logits.softmax(dim=1).amax(dim=1))
    for found, classes in (
        (predicted, predicted.classes.tolist()),
        (measure_class_activation(model, images, [2, 0, 1]), [2, 0, 1]),
    ):
        assert found.maps.shape == (3, 5, 5)
        assert_close(found.logits, logits[range(3), classes])
        sums = found.maps.mean(dim=(1, 2)) + found.rest
        assert_close(sums, found.logits, atol=1e-4, rtol=1e-4)


def test_a_position_has_what_the_classifier_says_of_its_features_alone() -> None:
    model = make_model(tokens=False)
    images = torch.randn(2, 3, 80, 80)
    found = measure_class_activation(model, images, [1, 1])
    with torch.no_grad():
        features = model.backbone(images)["s16_expanded"]
        alone = model.decoder({"s16_expanded": features[:, :, 3:4, 2:3]})[:, 1]
    assert_close(found.maps[:, 3, 2] + found.rest, alone)


def test_behind_a_transformer_there_is_no_class_activation() -> None:
    with pytest.raises(ValueError, match="only Grad-CAM"):
        measure_class_activation(make_model("transformer"), torch.randn(1, 3, 80, 80))
