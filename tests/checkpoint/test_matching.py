# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Matching of names: wrappers, bare backbones, pyramids; and what must not match."""

import pytest
import torch
from torch import nn

from qbheat_det.checkpoint import bare_backbone
from qbheat_det.checkpoint.matching import fit_weights, match_names
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import optional_modules
from tests.checkpoint.tiny_models import TinyBackbone, TinyDetector

PLAIN, PYRAMID = TinyDetector().state_dict(), TinyDetector(pyramid=True).state_dict()
BARE = TinyBackbone().state_dict()


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_prefixes_of_wrappers_are_removed(prefix: str) -> None:
    names = [f"{prefix}{name}" for name in PLAIN]
    assert list(match_names(PLAIN, names, file="w").values()) == list(PLAIN)
    averaged = torch.optim.swa_utils.AveragedModel(TinyDetector()).state_dict()
    assert list(match_names(PLAIN, averaged, file="w").values()) == list(PLAIN)
    for state in (PLAIN, PYRAMID):
        found = bare_backbone([f"{prefix}{name}" for name in state])
        assert set(found.values()) == set(BARE)
        assert all(name.startswith(f"{prefix}backbone.") for name in found)
    assert bare_backbone(["stem.weight", "fc.weight"]) == {}


def test_a_backbone_is_found_in_every_other_place() -> None:
    places = {"": BARE, "backbone.": PLAIN, "backbone.bottom_up.": PYRAMID}
    for old, file in places.items():
        for new, model in places.items():
            matched = match_names(model, file, file="w")
            assert all(matched[old + name] == new + name for name in BARE)
    wrapped = match_names(PLAIN, [f"model.{name}" for name in BARE], file="w")
    assert list(wrapped.values()) == [f"backbone.{name}" for name in BARE]
    detector = match_names(PYRAMID, PLAIN, file="w")
    assert detector["decoder.class_embed.weight"] == "decoder.class_embed.weight"


def test_a_file_that_fits_two_parts_is_refused_unless_one_is_private() -> None:
    pair = nn.ModuleDict({"student": TinyBackbone(), "teacher": TinyBackbone()}).state_dict()
    with pytest.raises(UserError, match=r"'w'.*student\., teacher\."):
        match_names(pair, BARE, file="w")
    matched = match_names(pair, BARE, file="w", private=["teacher"])
    assert list(matched.values()) == [f"student.{name}" for name in BARE]
    assert match_names(pair, pair, file="w", private=["teacher"]) == {name: name for name in pair}


def test_single_names_that_end_alike_do_not_match() -> None:
    # Detectron2's heuristic would match each of the two by its end.
    model = {"backbone.stem.0.weight": None, "decoder.block.0.bias": None}
    file = {"0.weight": None, "0.bias": None, "fc.weight": None}
    assert match_names(model, file, file="w") == {name: name for name in file}


def test_parts_of_a_pyramid_are_reported_separately() -> None:
    fitting, report = fit_weights(dict(BARE), PYRAMID, file="w")
    assert sorted(fitting) == sorted(f"backbone.bottom_up.{name}" for name in BARE)
    assert str(report) == "9/9 backbone tensors; fpn: new, 2 tensors; decoder: new, 4 tensors"
    assert report.find_errors(new_parts=True) == []


def test_modules_that_the_config_leaves_out_may_be_in_the_file_of_a_new_run() -> None:
    model = TinyDetector(pyramid=True)
    del model.backbone.bottom_up.expand
    names = model.state_dict()
    unexpected = ["2 unexpected (expand.weight, expand.bias)"]
    _, report = fit_weights(dict(BARE), names, file="w")
    assert report.find_errors(new_parts=True) == unexpected
    model.backbone.bottom_up.optional_modules = ("expand",)
    _, report = fit_weights(dict(BARE), names, file="w", optional_modules=optional_modules(model))
    assert report.find_errors(new_parts=True) == []
    assert report.unused == ("expand.weight", "expand.bias")
    assert report.find_errors(new_parts=False)[1:] == unexpected  # not of the same config
