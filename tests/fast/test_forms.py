# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What ``optimize`` replaces, and what stays the same."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.fast import FORMS, count_fast_layers, optimize
from tests.export.tiny_models import build, make_config


@pytest.mark.parametrize("form", FORMS)
def test_a_fast_form_is_a_subclass_of_the_layer(form):
    for layer, replacement in FORMS[form].items():
        assert issubclass(replacement, layer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["mf_detr", "retinanet"])
def test_parameters_keep_their_names_and_stay_the_same_tensors(kind, form):
    model = build(make_config(kind))
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    optimize(model, form)
    assert list(model.state_dict()) == names
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert count_fast_layers(model) > 0


def test_a_layer_in_two_places_stays_one_layer():
    layer = nn.Conv2d(4, 4, 5, groups=4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    optimize(model, "cpu_training")
    assert model[0] is model[2]
    assert type(model[0]) is not nn.Conv2d


@pytest.mark.parametrize("form", ["training", "cpu_training"])
def test_a_training_step_gives_the_plain_models_gradients(form):
    plain = build(make_config("retinanet", MODEL__BACKBONE__FREEZE_AT=0)).double().train()
    fast = copy.deepcopy(plain)
    optimize(fast, form)
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    results = []
    for model in (plain, fast):
        features = model.backbone(x)
        loss = sum(each.square().mean() for each in features.values())
        model.zero_grad()
        loss.backward()
        gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        results.append((features, gradients))
    assert_close(*results)
