# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Matching of names and class rows: wrappers, pyramids, pre-training; what must not match."""

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.dense_detector import permute_to_N_HWA_K
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.roi_heads import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from torch import nn

from qbheat_det.checkpoint import SafeCheckpointer, WeightsInfo, bare_backbone, save_weights
from qbheat_det.checkpoint.matching import (
    carry_over_rows,
    compare_classes,
    fit_weights,
    match_names,
)
from qbheat_det.checkpoint.report import ClassChange
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import optional_modules
from tests.checkpoint.tiny_models import CLASSES, TinyBackbone, TinyDetector

PLAIN, PYRAMID = TinyDetector().state_dict(), TinyDetector(pyramid=True).state_dict()
BARE = TinyBackbone().state_dict()


@pytest.mark.parametrize(
    "prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_prefixes_of_wrappers_are_removed(prefix):
    names = [f"{prefix}{name}" for name in PLAIN]
    assert list(match_names(PLAIN, names, file="w").values()) == list(PLAIN)
    averaged = torch.optim.swa_utils.AveragedModel(TinyDetector()).state_dict()
    assert list(match_names(PLAIN, averaged, file="w").values()) == list(PLAIN)
    for state in (PLAIN, PYRAMID):
        found = bare_backbone([f"{prefix}{name}" for name in state])
        assert set(found.values()) == set(BARE)
        assert all(name.startswith(f"{prefix}backbone.") for name in found)
    assert bare_backbone(["stem.weight", "fc.weight"]) == {}


def test_a_backbone_is_found_in_every_other_place():
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


def test_a_file_that_fits_two_parts_is_refused_unless_one_is_private():
    pair = nn.ModuleDict({"student": TinyBackbone(), "teacher": TinyBackbone()}).state_dict()
    with pytest.raises(UserError, match=r"'w'.*student\., teacher\."):
        match_names(pair, BARE, file="w")
    matched = match_names(pair, BARE, file="w", private=["teacher"])
    assert list(matched.values()) == [f"student.{name}" for name in BARE]
    assert match_names(pair, pair, file="w", private=["teacher"]) == {name: name for name in pair}


def test_parts_of_a_pyramid_and_modules_that_a_config_leaves_out_are_reported():
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

    def __init__(self, backbone, seed=5):
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


def _save(model, folder, kind="safetensors"):
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
def test_a_detector_loads_the_backbone_and_nothing_else(tmp_path, kind, pyramid):
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
    group = report.groups["backbone"]
    assert group.num_loaded == group.num_tensors
    assert report.groups["decoder"].is_new
    assert (report.unexpected, report.unused, report.skipped) == ((), (), PRETRAIN_ONLY)


def test_only_the_named_children_are_skipped(tmp_path):
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


OLD = ("cat", "dog", "bird", "fish")
NEW = ("zebra", "bird", "cat", "ant", "dog")
SAME_NUMBER = ("dog", "cat", "zebra", "bird")


def _box_predictor(num_classes, *, agnostic=False):
    box2box = Box2BoxTransform((1, 1, 1, 1))
    return FastRCNNOutputLayers(
        ShapeSpec(8), box2box_transform=box2box, num_classes=num_classes,
        cls_agnostic_bbox_reg=agnostic,
    )  # fmt: skip


def _mask_head(num_classes):
    shape = ShapeSpec(channels=8, width=7, height=7)
    return MaskRCNNConvUpsampleHead(shape, num_classes=num_classes, conv_dims=[8, 8])


EMPTY = torch.zeros(0)
# By the name of the layers in a detector: a builder, an input, and per-class outputs (…, K, X) with
# those of no class.
CASES = {
    "decoder.class_embed": (
        lambda k: nn.Linear(8, k + 1),
        (7, 8),
        lambda layer, x, k: (layer(x)[:, :-1, None], layer(x)[:, -1]),
    ),
    "head": (
        lambda k: RetinaNetHead(
            input_shape=[ShapeSpec(8, stride=8)], num_classes=k, num_anchors=3, conv_dims=[8]
        ),
        (2, 8, 3, 4),
        lambda head, x, k: (permute_to_N_HWA_K(head([x])[0][0], k)[..., None], EMPTY),
    ),
    "roi_heads.box_predictor": (
        _box_predictor,
        (6, 8),
        lambda head, x, k: (head(x)[1].view(6, k, 4), head(x)[0][:, -1]),
    ),
    "roi_heads.box_predictor.1": (
        lambda k: _box_predictor(k, agnostic=True),
        (6, 8),
        lambda head, x, k: (head(x)[0][:, :-1, None], head(x)[1]),
    ),
    "roi_heads.mask_head": (
        _mask_head,
        (2, 8, 7, 7),
        lambda head, x, k: (head.layers(x).flatten(2), EMPTY),
    ),
}


@pytest.mark.parametrize("prefix", CASES)
def test_outputs_follow_the_names_of_their_classes(prefix):
    build, size, compute = CASES[prefix]
    names = NEW if prefix != "decoder.class_embed" else SAME_NUMBER
    old, new = build(len(OLD)).eval(), build(len(names)).eval()
    for parameter in (*old.parameters(), *new.parameters()):
        nn.init.normal_(parameter)
    # Layers below the class layers are the same, so that outputs can be compared.
    shared = {k: v for k, v in old.state_dict().items() if "subnet" in k or "mask_fcn" in k or
              "deconv" in k}  # fmt: skip
    new.load_state_dict(shared, strict=False)
    x = torch.randn(size)
    (before, other), (fresh, _) = compute(old, x, len(OLD)), compute(new, x, len(names))
    stored, state = (
        {f"{prefix}.{key}": value for key, value in module.state_dict().items()}
        for module in (old, new)
    )
    fitting, report = fit_weights(stored, state, file="w.pth", old_classes=OLD, classes=names)
    assert report.find_errors(new_parts=False) == []
    new.load_state_dict({key.removeprefix(f"{prefix}."): t for key, t in fitting.items()})
    after, other_after = compute(new, x, len(names))
    torch.testing.assert_close(other_after, other)
    for index, name in enumerate(names):
        expected = before[..., OLD.index(name), :] if name in OLD else fresh[..., index, :]
        torch.testing.assert_close(after[..., index, :], expected)


def test_other_numbers_of_rows_do_not_fit_and_ambiguous_names_are_refused():
    change = compare_classes(OLD, NEW, file="w.pth")
    for name, stored, fresh in (
        ("decoder.class_embed.weight", (81, 8), (6, 8)),  # rows of other classes than named
        ("decoder.class_embed.weight", (5, 8), (6, 9)),
        ("head.cls_score.weight", (12, 8, 3, 3), (10, 8, 3, 3)),  # three anchors, and two
        ("head.cls_score.weight", (13, 8, 3, 3), (15, 8, 3, 3)),
        ("decoder.bbox_embed.weight", (5, 8), (6, 8)),  # no class layer
    ):
        assert carry_over_rows(name, torch.ones(stored), torch.ones(fresh), change) is None
    only = ClassChange(("cat",), ("dog",))  # whose rows are not shared
    for name, rows in (("box_predictor.bbox_pred.weight", 4), ("mask_head.predictor.bias", 1)):
        taken = carry_over_rows(name, torch.ones(rows, 2), torch.zeros(rows, 2), only)
        torch.testing.assert_close(taken, torch.zeros(rows, 2))

    assert compare_classes(OLD, OLD, file="w.pth") is compare_classes((), NEW, file="w.pth") is None
    with pytest.raises(UserError, match="'cat'"):
        compare_classes(("cat", "dog", "cat"), NEW, file="w.pth")
