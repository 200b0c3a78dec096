# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes by name, on the same features."""

import dataclasses

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import score_neighbours
from qbheat_det.probing import (
    FrozenFeatures,
    ProbeSettings,
    TransformerSettings,
    check_probes,
    run_probe,
)
from qbheat_det.probing.probes import fit_linear_probe
from tests.probing.drawn_features import draw_classes


def make_features(num_images: int, *, first: int) -> FrozenFeatures:
    pooled, labels = draw_classes(120, num_features=4, num_classes=3)
    part = slice(first, first + num_images)
    return FrozenFeatures(pooled[part], labels[part], pooled[part, :, None, None].clone())


def test_each_name_gives_its_probe_on_the_same_features() -> None:
    train, val = make_features(90, first=0), make_features(30, first=90)
    transformer = TransformerSettings(width=64, max_epochs=2, trial_epochs=1)
    settings = ProbeSettings(num_classes=3, k=5, transformer=transformer)
    found = {
        name: run_probe(name, train, val, settings=settings)
        for name in ("knn", "linear", "tran-1", "tran-2")
    }
    neighbours = score_neighbours((train.pooled, train.labels), (val.pooled, val.labels), k=5)
    assert found["knn"] == (neighbours, {})
    linear, chosen = fit_linear_probe(train.pooled, train.labels, num_classes=3)
    assert found["linear"][1] == chosen
    correct = (linear(val.pooled).argmax(dim=1) == val.labels).double().mean()
    assert found["linear"][0]["top1"] == pytest.approx(100 * float(correct))
    assert found["tran-1"][1]["trials"] != found["tran-2"][1]["trials"]
    # A width in the name is that of the settings, whatever theirs is.
    wide = dataclasses.replace(settings, transformer=dataclasses.replace(transformer, width=128))
    assert run_probe("tran-1:64", train, val, settings=wide) == found["tran-1"]
    assert run_probe("tran-1", train, val, settings=wide) != found["tran-1"]


@pytest.mark.parametrize("name", ["linear", "tran-1"])
def test_images_that_are_classified_do_not_enter_what_is_chosen(name: str) -> None:
    train, val = make_features(90, first=0), make_features(30, first=90)
    transformer = TransformerSettings(width=64, max_epochs=3, trial_epochs=2)
    settings = ProbeSettings(num_classes=3, transformer=transformer)
    score, chosen = run_probe(name, train, val, settings=settings)
    wrong = dataclasses.replace(val, labels=(val.labels + 1) % 3)
    other, chosen_again = run_probe(name, train, wrong, settings=settings)
    assert chosen == chosen_again
    assert other["top1"] < score["top1"]


@pytest.mark.parametrize("names", [[], ["knn", "tran-0"], ["lin"], ["tran"], ["tran-1:96"]])
def test_unknown_names_are_refused(names: list[str]) -> None:
    with pytest.raises(UserError, match=names[-1] if names else "none"):
        check_probes(names)
    check_probes(["knn", "linear", "tran-1", "tran-12"])
