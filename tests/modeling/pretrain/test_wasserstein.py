# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Wasserstein dependency as a whole: what is seen, compared, learned and refused."""

import math

import pytest
import torch
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.modeling.pretrain import WassersteinDependency
from qbheat_det.modeling.pretrain.wasserstein import DependencyDraw, LipschitzCritic
from tests.modeling.tiny_pretraining import make_inputs, make_tiny_config

FORMS = ("dual", "contrastive")
FIRST, SECOND = torch.tensor([0, 3, 1, 2, 0]), torch.tensor([2, 0, 3, 1, 1])
MIXING = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0])
DRAWN = DependencyDraw(FIRST, SECOND, MIXING)


def make_keys(**wasserstein):
    cfg = make_tiny_config("WassersteinDependency")
    small = {"HIDDEN_DIM": 32, "DIM": 8, "CRITIC_DIM": 16}
    for key, value in {**small, **wasserstein}.items():
        cfg.MODEL.WASSERSTEIN[key] = value
    return cfg


def make_model(**wasserstein):
    """With a critic that is steep enough for a penalty, and BatchNorm that looks at no batch."""
    torch.manual_seed(0)
    model = build_model(make_keys(**wasserstein))
    assert isinstance(model, WassersteinDependency)
    for parameter in model.critic.parameters():
        nn.init.normal_(parameter, std=0.3)
    for module in model.backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def losses(model, inputs):
    return model(inputs, DRAWN)


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_a_loop_over_all_pairs(form):
    model, inputs = make_model(FORM=form, RADIUS=3.0), make_inputs(5)
    found = losses(model, inputs)
    half, x, y = 32, [], []
    for entry, first, second in zip(inputs, FIRST.tolist(), SECOND.tolist(), strict=True):
        image = (entry["image"] - model.pixel_mean) / model.pixel_std
        for corner, features in ((first, x), (second, y)):
            top, left = half * (corner // 2), half * (corner % 2)
            area = image[None, :, top : top + half, left : left + half]
            features.append(3.0 * model.head(model.backbone(area))[0])
    own, others, contrast, penalty = 0.0, 0.0, 0.0, 0.0
    for i in range(5):
        row = [model.critic(x[i], y[j]).item() for j in range(5)]
        own += row[i] / 5
        others += sum(row[j] for j in range(5) if j != i) / 20
        contrast += (math.log(sum(map(math.exp, row))) - row[i]) / 5
        share = MIXING[i]
        pair = torch.cat([
            share * x[i] + (1 - share) * x[(i + 1) % 5],
            share * y[i] + (1 - share) * y[(i + 2) % 5],
        ]).detach().requires_grad_()  # fmt: skip
        (gradient,) = torch.autograd.grad(model.critic(*pair.split(8)), pair)
        penalty += 10.0 * max(0.0, gradient.norm().item() - 1) ** 2 / 5
    assert penalty > 0
    expected = others - own if form == "dual" else contrast
    torch.testing.assert_close(found["loss_dependency"], torch.tensor(expected))
    torch.testing.assert_close(found["loss_penalty"], torch.tensor(penalty))
    torch.testing.assert_close(model.metrics["distance"], torch.tensor(own - others))


@pytest.mark.parametrize("form", FORMS)
def test_everything_learns_and_the_penalty_teaches_the_critic_alone(form):
    model, inputs = make_model(FORM=form), make_inputs(5)
    found = losses(model, inputs)
    found["loss_penalty"].backward(retain_graph=True)
    learns = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learns
    assert all(name.startswith("critic.") for name in learns)
    found["loss_dependency"].backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == set()


def test_only_two_quarters_of_an_image_are_seen():
    model, inputs = make_model(), make_inputs(5)
    expected = losses(model, inputs)
    for entry, first, second in zip(inputs, FIRST.tolist(), SECOND.tolist(), strict=True):
        for corner in {0, 1, 2, 3} - {first, second}:
            top, left = 32 * (corner // 2), 32 * (corner % 2)
            entry["image"][:, top : top + 32, left : left + 32] = 7
    torch.testing.assert_close(losses(model, inputs), expected, rtol=0, atol=0)
    entry["image"][:, :32, :32] = 7  # which is the first area of the last
    assert not torch.equal(losses(model, inputs)["loss_dependency"], expected["loss_dependency"])


def make_critic(dim, hidden_dim=16):
    """With every parameter random, the bilinear term included."""
    critic = LipschitzCritic(dim=dim, hidden_dim=hidden_dim)
    for parameter in critic.parameters():
        nn.init.normal_(parameter, std=0.4)
    return critic


def naive_value(critic, x, y):
    """Of one pair, with the first layer on [x, y] as one matrix."""
    weight = torch.cat([critic.from_x.weight, critic.from_y.weight], dim=1)
    hidden = weight @ torch.cat([x, y]) + critic.from_x.bias
    return critic.head(critic.rest(hidden))[0] + x @ critic.interaction @ y


def test_the_critic_values_one_pair_after_another_in_full_precision():
    torch.manual_seed(0)
    critic = make_critic(3)
    x, y = torch.randn(4, 3), torch.randn(5, 3)
    found = critic(x[:, None], y[None])
    naive = torch.stack([torch.stack([naive_value(critic, a, b) for b in y]) for a in x])
    torch.testing.assert_close(found, naive)
    torch.testing.assert_close(critic(x, y[:4]), naive.diagonal())

    torch.manual_seed(3)
    critic = make_critic(4)
    x, y, mixing = torch.randn(5, 4), torch.randn(5, 4), torch.rand(5)
    exact = critic(x, y), critic.slopes((x, y), (y, x), mixing)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = critic(x, y), critic.slopes((x, y), (y, x), mixing)
    torch.testing.assert_close(found, exact, rtol=0, atol=0)
