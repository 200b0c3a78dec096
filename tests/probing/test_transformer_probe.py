# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tran-k probe learns what lies in the positions of maps, and chooses on training images."""

import dataclasses

import pytest
import torch
from torch import Tensor

from qbheat_det.probing import FrozenFeatures, TransformerSettings
from qbheat_det.probing.features import channel_statistics
from qbheat_det.probing.transformer import TransformerProbe, Whitening, fit_transformer_probe

_SETTINGS = TransformerSettings(
    width=64, dropouts=(0.0, 0.2), trial_epochs=2, max_epochs=8, patience=3, batch_size=16
)


def draw_maps(num_images: int, *, seed: int = 0) -> FrozenFeatures:
    """Draws maps of 4 channels at 3 x 2 positions whose class is the channel of one large value.

    Channels have offsets and scales of their own, as a backbone's have.
    """
    draw = torch.Generator().manual_seed(seed)
    maps = 0.3 * torch.randn(num_images, 4, 3, 2, generator=draw)
    labels = torch.arange(num_images) % 3
    maps[torch.arange(num_images), labels] += 2.0
    maps = maps * torch.tensor([1e-2, 1.0, 40.0, 1.0]).view(4, 1, 1) + 7.0
    return FrozenFeatures(maps.mean(dim=(2, 3)), labels, maps)


def accuracy(logits: Tensor, features: FrozenFeatures) -> float:
    return float((logits.argmax(dim=1) == features.labels).double().mean())


def test_classes_are_learned_and_other_images_classified() -> None:
    probe, chosen = fit_transformer_probe(draw_maps(96), num_classes=3, settings=_SETTINGS)
    val = draw_maps(30, seed=1)
    together = probe(val)
    assert accuracy(together, val) > 0.9
    alone = torch.cat([probe(val.select(torch.tensor([i]))) for i in range(5)])
    torch.testing.assert_close(together[:5], alone, rtol=1e-4, atol=1e-5)
    without = dataclasses.replace(val, maps=None)
    with pytest.raises(ValueError, match="maps"):
        fit_transformer_probe(without, num_classes=3, settings=_SETTINGS)
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


def test_it_is_a_function_of_the_seed_and_ignores_units_of_channels() -> None:
    features, state = draw_maps(48), torch.get_rng_state()
    assert features.maps is not None
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


def test_classification_is_that_of_averaged_weights() -> None:
    settings = dataclasses.replace(_SETTINGS, batch_size=48)  # one step: a decay of one half
    features = draw_maps(48)
    probe = TransformerProbe(features, num_classes=3, dropout=0.0, settings=settings)
    probe.run_epoch()
    first = [weight.detach().clone() for weight in probe.decoder.parameters()]
    probe.run_epoch()
    second, average = probe.decoder.parameters(), probe.average.module.parameters()
    for one, other, mean in zip(first, second, average, strict=True):
        torch.testing.assert_close(mean, (one + other) / 2)


def test_tokens_are_read_where_there_are_any() -> None:
    features = draw_maps(48)
    assert features.maps is not None
    # The map says nothing, the first token all.
    tokens = torch.zeros(48, 2, 3)
    tokens[torch.arange(48), 0, features.labels] = 3.0
    blind = FrozenFeatures(features.pooled, features.labels, torch.randn(48, 4, 3, 2), tokens)
    settings = dataclasses.replace(_SETTINGS, learning_rate=1e-2)
    probe, _ = fit_transformer_probe(blind, num_classes=3, settings=settings)
    assert accuracy(probe(blind), blind) > 0.85


def flat(maps: Tensor) -> Tensor:
    return maps.double().transpose(0, 1).flatten(1)


def test_whitening_is_affine_and_makes_variances_even_but_for_the_floor() -> None:
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


def test_statistics_of_channels_are_those_over_all_images_and_positions() -> None:
    maps = torch.randn(600, 3, 2, 2) * torch.tensor([1.0, 5.0, 0.0]).view(3, 1, 1) + 4
    mean, scale = channel_statistics(maps.half())
    values = flat(maps.half())
    torch.testing.assert_close(mean, values.mean(dim=1))
    torch.testing.assert_close(scale[:2], 1 / values[:2].std(dim=1, correction=0))
    assert scale[2] == 0
