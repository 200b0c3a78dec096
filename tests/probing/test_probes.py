# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes by name: the linear one ends at its optimum, tran-k learns what lies in maps."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import measure_ranks, rank_true_classes
from qbheat_det.probing import FrozenFeatures, cache_features
from qbheat_det.probing.features import channel_statistics, split_by_class
from qbheat_det.probing.probes import (
    TransformerSettings,
    Whitening,
    fit_linear_probe,
    fit_penalised,
    fit_transformer_probe,
)
from qbheat_det.probing.run import ProbeSettings, run_probe


def draw_classes(num_images, *, num_features, num_classes, spread=0.7, seed=0):
    """Returns features (N, D) around one centre for each class, and labels (N,) in turn."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, num_features, generator=draw)
    labels = torch.arange(num_images) % num_classes
    noise = torch.randn(num_images, num_features, generator=draw)
    return centres[labels] + spread * noise, labels


def make_features(num_images, *, first):
    pooled, labels = draw_classes(120, num_features=4, num_classes=3)
    part = slice(first, first + num_images)
    return FrozenFeatures(pooled[part], labels[part], pooled[part, :, None, None].clone())


def test_each_name_gives_its_probe_on_the_same_features():
    train, val = make_features(90, first=0), make_features(30, first=90)
    transformer = TransformerSettings(width=64, max_epochs=2, trial_epochs=1)
    settings = ProbeSettings(num_classes=3, k=5, transformer=transformer)
    found = {
        name: run_probe(name, train, val, settings=settings)
        for name in ("knn", "linear", "tran-1", "tran-2")
    }
    parts = [(part.pooled, part.labels) for part in (train, val)]
    ranks = rank_true_classes(*parts, k=5, temperature=0.07)
    assert found["knn"] == (measure_ranks(ranks), {})
    linear, chosen = fit_linear_probe(train.pooled, train.labels, num_classes=3)
    assert found["linear"][1] == chosen
    correct = (linear(val.pooled).argmax(dim=1) == val.labels).double().mean()
    assert found["linear"][0]["top1"] == pytest.approx(100 * float(correct))
    assert found["tran-1"][1]["trials"] != found["tran-2"][1]["trials"]


@pytest.mark.parametrize("name", ["linear", "tran-1"])
def test_images_that_are_classified_do_not_enter_what_is_chosen(name):
    train, val = make_features(90, first=0), make_features(30, first=90)
    transformer = TransformerSettings(width=64, max_epochs=3, trial_epochs=2)
    settings = ProbeSettings(num_classes=3, transformer=transformer)
    score, chosen = run_probe(name, train, val, settings=settings)
    wrong = dataclasses.replace(val, labels=(val.labels + 1) % 3)
    other, chosen_again = run_probe(name, train, wrong, settings=settings)
    assert chosen == chosen_again
    assert other["top1"] < score["top1"]


_K = 3


def objective(weight, features, labels, l2):
    """Mean cross-entropy and penalty, image by image."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, label in zip(features, labels.tolist(), strict=True):
        shares = (weight[:, :-1] @ row + weight[:, -1]).exp()
        loss = loss - torch.log(shares[label] / shares.sum())
    return loss / len(labels) + l2 / 2 * weight[:, :-1].square().sum()


def standardised(features):
    features = features.double()
    return (features - features.mean(dim=0)) / features.std(dim=0, correction=0)


@pytest.mark.parametrize("l2", [1.0, 1e-3])
def test_it_ends_where_scipy_ends(l2):
    features, labels = draw_classes(20, num_features=4, num_classes=_K)
    inputs = standardised(features)

    def value_and_gradient(flat):
        weight = torch.tensor(flat).view(_K, 5).requires_grad_()
        loss = objective(weight, inputs, labels, l2)
        (gradient,) = torch.autograd.grad(loss, weight)
        return float(loss.detach()), gradient.numpy().ravel()

    expected = minimize(
        value_and_gradient, np.zeros(_K * 5), jac=True, method="BFGS", options={"gtol": 1e-8}
    )
    probe = fit_penalised(features, labels, num_classes=_K, l2=l2, tolerance=1e-9)
    assert probe.gradient < 1e-8
    weight = torch.tensor(expected.x).view(_K, 5)
    torch.testing.assert_close(probe.weight[:, :-1], weight[:, :-1], rtol=1e-4, atol=1e-5)
    # The bias is only known up to a shift of all classes.
    shifted = [b - b.mean() for b in (probe.weight[:, -1], weight[:, -1])]
    torch.testing.assert_close(*shifted, rtol=1e-4, atol=1e-5)


def test_start_units_and_constant_features_change_nothing():
    features, labels = draw_classes(50, num_features=4, num_classes=_K)
    arguments = {"num_classes": _K, "l2": 1e-2, "tolerance": 1e-9}
    probe = fit_penalised(features, labels, **arguments)
    moved = features * torch.tensor([1e-3, 1.0, 50.0, 1e3]) + torch.tensor([0.0, 5.0, -3.0, 1.0])
    moved = torch.cat([moved, torch.full((50, 1), 0.1)], dim=1)
    other = fit_penalised(moved, labels, start=torch.randn(_K, 6).double(), **arguments)
    torch.testing.assert_close(
        other(moved).softmax(dim=1), probe(features).softmax(dim=1), rtol=1e-4, atol=1e-5
    )
    assert other.scale[-1] == 0


def test_the_best_penalty_is_chosen_and_fits_all_images():
    # Two features that separate classes and many that do not: little penalty overfits.
    signal, labels = draw_classes(90, num_features=2, num_classes=_K, spread=1.5)
    features = torch.cat([signal, torch.randn(90, 60)], dim=1)
    probe, chosen = fit_linear_probe(features, labels, num_classes=_K)
    trials = chosen["trials"]
    assert trials[f"{chosen['l2']:.2g}"] == max(trials.values())
    assert chosen["l2"] > 1e-3
    expected = fit_penalised(features, labels, num_classes=_K, l2=chosen["l2"])
    torch.testing.assert_close(
        probe(features).softmax(dim=1), expected(features).softmax(dim=1), rtol=1e-3, atol=1e-4
    )


def make_batches(*sizes):
    numbers = itertools.count()
    return [[{"label": i % 3, "number": i} for i in itertools.islice(numbers, n)] for n in sizes]


def describe(batch):
    numbers = torch.tensor([float(entry["number"]) for entry in batch])
    maps = numbers[:, None, None, None] + torch.arange(24.0).view(2, 3, 4) / 7
    return {"s16": maps, "tokens": numbers[:, None, None] * torch.ones(5, 6)}


def test_maps_means_tokens_and_labels_follow_the_images():
    found = cache_features(
        describe, make_batches(2, 3, 1), num_images=9, feature="s16", keep_maps=True
    )
    outputs = describe(make_batches(6)[0])
    assert found.maps.dtype is torch.float16
    torch.testing.assert_close(found.maps, outputs["s16"].half())
    torch.testing.assert_close(found.pooled, outputs["s16"].mean(dim=(2, 3)))
    torch.testing.assert_close(found.tokens, outputs["tokens"])
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    torch.testing.assert_close(
        found.joined, torch.cat([outputs["s16"].mean(dim=(2, 3)), outputs["tokens"][:, 0]], dim=1)
    )


def test_maps_beyond_the_memory_are_refused_and_beyond_float16_clipped():
    arguments = {"num_images": 2_000_000, "feature": "s16", "memory_gb": 0.05}
    with pytest.raises(UserError, match="--memory-gb"):
        cache_features(describe, make_batches(2), keep_maps=True, **arguments)
    found = cache_features(
        lambda batch: {"s16": describe(batch)["s16"]}, make_batches(2), **arguments
    )
    assert found.maps is None
    assert found.tokens is None
    assert found.joined is found.pooled

    def large(batch):
        maps = describe(batch)["s16"]
        return {"s16": torch.where(maps >= 3, maps * 1e5, maps)}

    found = cache_features(large, make_batches(2, 3), num_images=5, feature="s16", keep_maps=True)
    expected = torch.cat([large(batch)["s16"] for batch in make_batches(2, 3)])
    torch.testing.assert_close(found.maps.float(), expected.clamp(max=65504), rtol=1e-3, atol=0)


def test_each_class_is_divided_in_the_same_proportion_by_the_seed():
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 3 + [3] * 2 + [4])[torch.randperm(36)]
    remain, aside = split_by_class(labels)
    assert sorted([*remain.tolist(), *aside.tolist()]) == list(range(36))
    # 2 of 10, 4 of 20, 0.6 of 3 rounded, at least 1 of 2; the only image of a class stays.
    assert labels[aside].bincount(minlength=5).tolist() == [2, 4, 1, 1, 0]
    assert torch.equal(remain, remain.sort().values)
    assert torch.equal(aside, split_by_class(labels)[1])
    assert not torch.equal(aside, split_by_class(labels, seed=1)[1])


_SETTINGS = TransformerSettings(
    width=64, dropouts=(0.0, 0.2), trial_epochs=2, max_epochs=8, patience=3, batch_size=16
)


def draw_maps(num_images, *, seed=0):
    """Draws maps of 4 channels at 3 x 2 positions whose class is the channel of one large value.

    Channels have offsets and scales of their own, as a backbone's have.
    """
    draw = torch.Generator().manual_seed(seed)
    maps = 0.3 * torch.randn(num_images, 4, 3, 2, generator=draw)
    labels = torch.arange(num_images) % 3
    maps[torch.arange(num_images), labels] += 2.0
    maps = maps * torch.tensor([1e-2, 1.0, 40.0, 1.0]).view(4, 1, 1) + 7.0
    return FrozenFeatures(maps.mean(dim=(2, 3)), labels, maps)


def accuracy(logits, features):
    return float((logits.argmax(dim=1) == features.labels).double().mean())


def test_classes_are_learned_and_other_images_classified():
    probe, chosen = fit_transformer_probe(draw_maps(96), num_classes=3, settings=_SETTINGS)
    val = draw_maps(30, seed=1)
    together = probe(val)
    assert accuracy(together, val) > 0.9
    alone = torch.cat([probe(val.select(torch.tensor([i]))) for i in range(5)])
    torch.testing.assert_close(together[:5], alone, rtol=1e-4, atol=1e-5)
    trials = chosen["trials"]
    assert set(trials) == {"0", "0.2"}
    # The dropout that did best goes on, to the end of its patience or of all epochs.
    best = trials[f"{chosen['dropout']:g}"]
    (other,) = [values for rate, values in trials.items() if values is not best]
    assert len(other) == _SETTINGS.trial_epochs
    assert max(best[:2]) >= max(other)
    assert chosen["epochs"] == 1 + best.index(max(best))
    waited = len(best) - chosen["epochs"]
    assert chosen["converged"] is (waited >= _SETTINGS.patience)
    assert waited == _SETTINGS.patience or len(best) == _SETTINGS.max_epochs


def test_it_is_a_function_of_the_seed_and_ignores_units_of_channels():
    features, state = draw_maps(48), torch.get_rng_state()
    moved = dataclasses.replace(features, maps=features.maps * 8.0 - 3.0)
    settings = dataclasses.replace(_SETTINGS, max_epochs=2)
    first, again, other, units = (
        fit_transformer_probe(part, num_classes=3, settings=settings, seed=seed)[0](part)
        for part, seed in ((features, 1), (features, 1), (features, 2), (moved, 1))
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first, units, rtol=1e-2, atol=1e-3)
    assert torch.equal(state, torch.get_rng_state())


def test_tokens_are_read_where_there_are_any():
    features = draw_maps(48)
    # The map says nothing, the first token all.
    tokens = torch.zeros(48, 2, 3)
    tokens[torch.arange(48), 0, features.labels] = 3.0
    blind = FrozenFeatures(features.pooled, features.labels, torch.randn(48, 4, 3, 2), tokens)
    settings = dataclasses.replace(_SETTINGS, learning_rate=1e-2)
    probe, _ = fit_transformer_probe(blind, num_classes=3, settings=settings)
    assert accuracy(probe(blind), blind) > 0.85


def flat(maps):
    return maps.double().transpose(0, 1).flatten(1)


def test_whitening_is_affine_and_makes_variances_even_but_for_the_floor():
    mixed = torch.randn(600, 2, 2, 4) @ torch.randn(4, 4) * torch.tensor([1.0, 30.0, 1e-2, 5.0])
    maps = mixed.permute(0, 3, 1, 2) + 4.0
    variances = torch.linalg.eigvalsh(torch.corrcoef(flat(maps)))
    found = torch.cov(flat(Whitening.of(maps)(maps)), correction=0)
    expected = torch.diag(variances / (variances + 0.01))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    whiten = Whitening.of(maps[:300])
    torch.testing.assert_close(whiten(maps)[300:], whiten(maps[300:]))
    constant = torch.cat([maps, torch.full_like(maps[:, :1], 0.3)], dim=1)
    assert bool((Whitening.of(constant).matrix[-1] == 0).all())
    undone = torch.linalg.inv(whiten.matrix.double()).T @ flat(whiten(maps))
    torch.testing.assert_close(
        undone + whiten.mean.double()[:, None], flat(maps), rtol=1e-3, atol=1e-3
    )

    maps = torch.randn(600, 3, 2, 2) * torch.tensor([1.0, 5.0, 0.0]).view(3, 1, 1) + 4
    mean, scale = channel_statistics(maps.half())
    values = flat(maps.half())
    torch.testing.assert_close(mean, values.mean(dim=1))
    torch.testing.assert_close(scale[:2], 1 / values[:2].std(dim=1, correction=0))
    assert scale[2] == 0
