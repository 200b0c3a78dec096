# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Matching of names: wrappers, bare backbones, pyramids, pre-training; and what must not match."""

from pathlib import Path

import pytest
import torch
from torch import nn

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, bare_backbone, save_weights
from qbheat_det.checkpoint.matching import fit_weights, match_names
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import optional_modules
from tests.checkpoint.tiny_models import CLASSES, TinyBackbone, TinyDetector

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

    # Detectron2's heuristic would match each of the two by its end.
    model = {"backbone.stem.0.weight": None, "decoder.block.0.bias": None}
    file = {"0.weight": None, "0.bias": None, "fc.weight": None}
    assert match_names(model, file, file="w") == {name: name for name in file}


def test_a_file_that_fits_two_parts_is_refused_unless_one_is_private() -> None:
    pair = nn.ModuleDict({"student": TinyBackbone(), "teacher": TinyBackbone()}).state_dict()
    with pytest.raises(UserError, match=r"'w'.*student\., teacher\."):
        match_names(pair, BARE, file="w")
    matched = match_names(pair, BARE, file="w", private=["teacher"])
    assert list(matched.values()) == [f"student.{name}" for name in BARE]
    assert match_names(pair, pair, file="w", private=["teacher"]) == {name: name for name in pair}


def test_parts_of_a_pyramid_and_modules_that_a_config_leaves_out_are_reported() -> None:
    fitting, report = fit_weights(dict(BARE), PYRAMID, file="w")
    assert sorted(fitting) == sorted(f"backbone.bottom_up.{name}" for name in BARE)
    assert str(report) == "9/9 backbone tensors; fpn: new, 2 tensors; decoder: new, 4 tensors"
    assert report.find_errors(new_parts=True) == []

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


PRETRAIN_ONLY = ("projection", "predictor", "decoder")


class TinyPretraining(nn.Module):
    """QB-Heat's children; its decoder has a tensor of the name and shape of a detector's."""

    pretrain_only_modules = PRETRAIN_ONLY

    def __init__(self, backbone: nn.Module, seed: int = 5) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Conv2d(4, 8, 1)
        self.predictor = nn.Linear(8, 8)
        self.decoder = nn.Module()
        self.decoder.bbox_embed = nn.Linear(4, 4)
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def _save(model: nn.Module, folder: Path, kind: str = "safetensors") -> str:
    """Writes the model as the trainer does; "ema" as the average beside other weights."""
    info = WeightsInfo(pretrain_only_modules=PRETRAIN_ONLY)
    if kind == "safetensors":
        save_weights(str(folder / "w.safetensors"), model.state_dict(), info)
        return str(folder / "w.safetensors")
    others = {key: 2 * value for key, value in model.state_dict().items()}
    content = {"model": others, "ema": model.state_dict(), "iteration": 9, "info": info.to_dict()}
    torch.save(content, folder / "w.pth")
    return str(folder / "w.pth")


@pytest.mark.parametrize(("kind", "pyramid"), [("safetensors", False), ("ema", True)])
def test_a_detector_loads_the_backbone_and_nothing_else(
    tmp_path: Path, kind: str, pyramid: bool
) -> None:
    pretraining = TinyPretraining(TinyDetector(seed=3).backbone)
    model = TinyDetector(pyramid=pyramid, seed=9)
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    checkpointer = SafeCheckpointer(model, class_names=CLASSES)
    checkpointer.load(_save(pretraining, tmp_path, kind))
    inside = model.backbone.bottom_up if pyramid else model.backbone
    torch.testing.assert_close(
        dict(inside.state_dict()), dict(pretraining.backbone.state_dict()), rtol=0, atol=0
    )
    for key, value in model.state_dict().items():
        if key.startswith("decoder.") or "lateral" in key:
            torch.testing.assert_close(value, fresh[key], rtol=0, atol=0)
    report = checkpointer.report
    assert report.groups["backbone"].is_full
    assert report.groups["decoder"].is_new
    assert (report.unexpected, report.unused, report.skipped) == ((), (), PRETRAIN_ONLY)


def test_only_the_named_children_are_skipped(tmp_path: Path) -> None:
    state = TinyPretraining(TinyDetector(seed=3).backbone).state_dict()
    for modules, error in (
        ((), "unexpected"),  # names that collide by accident
        (("backbone", *PRETRAIN_ONLY), "another architecture"),  # nothing is left
        (("back", "pro", "deco"), "unexpected"),  # children are named in full
    ):
        info = WeightsInfo(pretrain_only_modules=modules)
        save_weights(str(tmp_path / "w.safetensors"), state, info)
        with pytest.raises(UserError, match=error):
            SafeCheckpointer(TinyDetector()).load(str(tmp_path / "w.safetensors"))
