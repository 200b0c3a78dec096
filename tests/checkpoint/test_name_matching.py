# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Names of a file and of a model: wrappers, bare backbones, pyramids, and what is no match."""

import pytest
import torch
from torch import nn

from qbheat_det.checkpoint.matching import fit_weights, match_names
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import optional_modules
from tests.checkpoint.tiny_models import TinyBackbone, TinyDetector

PLAIN, PYRAMID = TinyDetector().state_dict(), TinyDetector(pyramid=True).state_dict()
BARE = TinyBackbone().state_dict()


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_wrappers_are_taken_off(prefix: str) -> None:
    names = [f"{prefix}{name}" for name in PLAIN]
    assert list(match_names(PLAIN, names, file="w").values()) == list(PLAIN)


def test_an_averaged_models_counter_is_no_weight() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(TinyDetector())
    matched = match_names(PLAIN, averaged.state_dict(), file="w")
    assert list(matched.values()) == list(PLAIN)


@pytest.mark.parametrize(
    ("model", "file", "prefix"),
    [
        (PLAIN, BARE, "backbone."),
        (PYRAMID, BARE, "backbone.bottom_up."),
        (PLAIN, {f"model.{name}": None for name in BARE}, "backbone."),
    ],
)
def test_a_bare_backbone_finds_its_place(
    model: dict[str, object], file: dict[str, object], prefix: str
) -> None:
    matched = match_names(model, file, file="w")
    assert list(matched.values()) == [f"{prefix}{name}" for name in BARE]


def test_a_detectors_backbone_moves_into_a_pyramid_and_out_of_it() -> None:
    into, out = match_names(PYRAMID, PLAIN, file="w"), match_names(PLAIN, PYRAMID, file="w")
    for name in BARE:
        assert into[f"backbone.{name}"] == f"backbone.bottom_up.{name}"
        assert out[f"backbone.bottom_up.{name}"] == f"backbone.{name}"
    assert into["decoder.class_embed.weight"] == "decoder.class_embed.weight"


def test_a_detectors_backbone_fits_the_backbone_alone() -> None:
    for state, prefix in ((PLAIN, "backbone."), (PYRAMID, "backbone.bottom_up.")):
        matched = match_names(BARE, state, file="w")
        assert [matched[f"{prefix}{name}"] for name in BARE] == list(BARE)


def test_a_file_that_fits_twice_is_an_error_that_names_both_places() -> None:
    pair = nn.ModuleDict({"student": TinyBackbone(), "teacher": TinyBackbone()})
    with pytest.raises(UserError, match=r"'w' fits in more than one part .*student\., teacher\."):
        match_names(pair.state_dict(), BARE, file="w")


def test_a_bare_backbone_is_not_meant_for_the_copy_that_a_model_keeps_of_its_own() -> None:
    pair = nn.ModuleDict({"backbone": TinyBackbone(), "copy": TinyBackbone()}).state_dict()
    matched = match_names(pair, BARE, file="w", private=["copy"])
    assert list(matched.values()) == [f"backbone.{name}" for name in BARE]
    assert match_names(pair, pair, file="w", private=["copy"]) == {name: name for name in pair}


def test_ends_of_names_that_agree_by_accident_are_not_taken_one_by_one() -> None:
    # Detectron2's heuristic would put each of the two where its name ends alike.
    model = {"backbone.stem.0.weight": None, "decoder.block.0.bias": None}
    file = {"0.weight": None, "0.bias": None, "fc.weight": None}
    assert match_names(model, file, file="w") == {name: name for name in file}


def test_parts_of_a_pyramid_are_reported_apart() -> None:
    fitting, report = fit_weights(dict(BARE), PYRAMID, file="w")
    assert sorted(fitting) == sorted(f"backbone.bottom_up.{name}" for name in BARE)
    assert str(report) == "9/9 backbone tensors; fpn: new, 2 tensors; decoder: new, 4 tensors"
    assert report.find_errors(new_parts=True) == []


def test_a_part_that_the_model_leaves_out_may_stand_in_the_file() -> None:
    model = TinyDetector(pyramid=True)
    del model.backbone.bottom_up.expand
    names = model.state_dict()
    _, report = fit_weights(dict(BARE), names, file="w")
    assert report.find_errors(new_parts=True) == ["2 unexpected (expand.weight, expand.bias)"]
    model.backbone.bottom_up.optional_modules = ("expand",)
    _, report = fit_weights(dict(BARE), names, file="w", optional_modules=optional_modules(model))
    assert report.find_errors(new_parts=True) == []
    assert "7/7 backbone tensors" in str(report)
    assert "2 not used (expand.weight, expand.bias)" in str(report)
    # For a trained model it is one of another config.
    assert "2 unexpected (expand.weight, expand.bias)" in report.find_errors(new_parts=False)
