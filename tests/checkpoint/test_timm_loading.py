# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights of the package in Detectron2's checkpointer, and timm's weights by address."""

import functools
import logging
import socket

import huggingface_hub
import pytest
import timm
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, build_backbone, build_model
from torch import nn

import qbheat_det
from qbheat_det.checkpoint import (
    SafeCheckpointer,
    WeightsInfo,
    load_run_config,
    read_weights,
    save_weights,
)
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import TimmBackbone
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from tests.checkpoint.tiny_models import replace_hub


class _Detector(nn.Module):
    def __init__(self, mean=0.485):
        super().__init__()
        self.backbone = TimmBackbone(name="resnet18", out_features=["s8", "s16"])
        self.head = nn.Linear(2, 2)
        mean_of_channels = [255 * mean, 255 * 0.456, 255 * 0.406]
        self.register_buffer("pixel_mean", torch.tensor(mean_of_channels).view(3, 1, 1), False)


def test_weights_are_fetched_once_and_other_pixels_are_warned_of(tmp_path, monkeypatch, caplog):
    hub = replace_hub(monkeypatch, tmp_path)
    checkpointer = SafeCheckpointer(_Detector())
    checkpointer.load("timm://resnet18")
    group = checkpointer.report.groups["backbone"]
    assert group.num_loaded == group.num_tensors
    assert set(checkpointer.report.unused) >= {"fc.weight", "fc.bias"}
    assert "pixels" not in caplog.text
    tag = timm.models.get_pretrained_cfg("resnet18").tag
    with caplog.at_level(logging.WARNING):
        SafeCheckpointer(_Detector(mean=0.5)).load(f"timm://resnet18.{tag}")
    assert "trained with the pixels RGB, mean [123.67" in caplog.text
    assert [name for name, _ in hub] == [f"resnet18.{tag}"]


def test_without_a_network_one_sentence_says_where_the_file_belongs_or_what_is_unknown(
    monkeypatch, tmp_path
):
    def fail(*args, **kwargs):
        raise OSError("We couldn't connect\nto the hub")

    model = _Detector()
    monkeypatch.setattr(timm, "create_model", fail)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    for name, named in (
        ("resnet18.a1_in1k", rf"resnet18\.a1_in1k.*{tmp_path}"),
        ("resnt18", "'resnt18'"),  # which timm does not know
        ("resnet18.a9_in9k", "'resnet18.a9_in9k'"),
    ):
        with pytest.raises(UserError, match=named):
            SafeCheckpointer(model).load(f"timm://{name}")


def _fail_without_a_network(*args, **kwargs):
    """Raises what the hub's client does, whose message does not begin with the cause."""
    try:
        raise socket.gaierror(-2, "Name or service not known")
    except socket.gaierror:
        raise OSError("An error happened while trying to locate the file. " * 9)  # noqa: B904


@pytest.mark.parametrize(
    ("address", "module", "function"),
    [
        ("timm://resnet18.a1_in1k", timm, "create_model"),
        ("hf://me/shapes_without_a_network", huggingface_hub, "hf_hub_download"),
    ],
)
def test_the_network_is_named_first_and_what_to_do_is_not_cut(
    address, module, function, monkeypatch, tmp_path
):
    model = _Detector()
    monkeypatch.setattr(module, function, _fail_without_a_network)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        SafeCheckpointer(model).load(address)
    cause, rest = str(caught.value).split("the network cannot be reached", 1)
    assert len(cause) < 90
    assert rest.startswith(" ([Errno -2] Name or service not known)")
    assert "error happened" not in rest
    assert "copy" in rest
    assert "of another machine" not in rest  # this machine's folder is not there


DETECTOR = "retinanet/285M_bccd"


@pytest.fixture(scope="module")
def trained():
    return qbheat_det.model_zoo.get(DETECTOR, device="cpu")


@pytest.fixture(scope="module")
def encoder(trained):
    return dict(_encoder_of(trained).state_dict())


class Foreign(nn.Module):
    """A model of somebody else, whose class knows nothing of this package."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(2, 2)


BUILDERS = {
    "bare": build_bare_backbone,
    "pyramid": build_backbone,
    "detector": build_model,
    "foreign": lambda cfg: Foreign(build_backbone(cfg)),
    "foreign, bare": lambda cfg: Foreign(build_bare_backbone(cfg)),
}


@functools.cache
def _build(name):
    return BUILDERS[name](load_run_config(qbheat_det.model_zoo.get_address(DETECTOR)))


def _empty(name):
    model = _build(name)
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model


def _encoder_of(model):
    backbone = getattr(model, "backbone", model)
    return getattr(backbone, "bottom_up", backbone)


@pytest.mark.parametrize("model", BUILDERS)
@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.bottom_up.", "zoo"])
def test_every_tensor_of_the_encoder_is_loaded(model, prefix, trained, encoder, tmp_path):
    own = _empty(model)
    path = f"qbheat://{DETECTOR}"
    if prefix != "zoo":
        file = tmp_path / "w.pth"
        state = {prefix + name: tensor for name, tensor in encoder.items()}
        # Names without a prefix, in a model of other people: Detectron2 has a switch for them.
        torch.save({"model": state, "matching_heuristics": prefix == ""}, file)
        path = str(file)
    rest = DetectionCheckpointer(own).load(path)
    found = dict(_encoder_of(own).state_dict())
    # The file's BatchNorm is frozen and counts no batches.
    counters = {name for name in found if name.endswith("num_batches_tracked")}
    filled = {name: found[name] for name in found.keys() - (counters - encoder.keys())}
    torch.testing.assert_close(filled, encoder, rtol=0, atol=0)
    if prefix == "zoo":
        assert rest["info"]["class_names"] == ["RBC", "WBC", "Platelets"]
    if prefix == "zoo" and model in ("pyramid", "foreign"):  # the pyramid's layers come along
        pyramid = getattr(own, "backbone", own).state_dict()
        expected = dict(trained.backbone.state_dict())
        torch.testing.assert_close(dict(pyramid), expected, rtol=0, atol=0)


def test_a_pre_trained_encoder_is_found_below_detectron2s_own_pyramid():
    cfg = qbheat_det.get_cfg()
    cfg.MODEL.MOBILE_FORMER.VARIANT = "285M"
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16"]
    encoder = BACKBONE_REGISTRY.get("MobileFormer")(cfg, ShapeSpec(channels=3))
    own = nn.Module()
    own.trunk = FPN(encoder, ["s8", "s16"], 32)
    DetectionCheckpointer(own).load("qbheat://distill/285M")
    state, _ = read_weights("qbheat://distill/285M")
    found = own.trunk.bottom_up.state_dict()
    for name, tensor in found.items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(tensor, state[f"backbone.{name}"].float(), rtol=0, atol=0)


@pytest.mark.parametrize("model", ["bare", "pyramid", "foreign"])
@pytest.mark.parametrize("kind", ["none", "some"])
def test_what_does_not_fill_the_encoder_is_an_error(model, kind, encoder, tmp_path):
    names = {"none": "other.{}", "some": "backbone.{}"}
    state = {names[kind].format(name): tensor for name, tensor in [*encoder.items()][:90]}
    torch.save({"model": state}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="SafeCheckpointer"):
        DetectionCheckpointer(_empty(model)).load(str(tmp_path / "w.pth"))


def test_weights_of_a_network_that_pads_otherwise_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    model = TimmBackbone(name="tf_efficientnet_lite0", out_features=["s8"])
    config = "MODEL: {BACKBONE: {NAME: build_fpn_backbone}, FPN: {BOTTOM_UP: 'timm:%s'}}"
    info = WeightsInfo(config=config % "tf_efficientnet_lite0")
    save_weights(str(path), model.state_dict(), info)
    SafeCheckpointer(model).load(str(path))
    other = TimmBackbone(name="efficientnet_lite0", out_features=["s8"])
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(UserError, match="timm:tf_efficientnet_lite0"):
        SafeCheckpointer(other).load(str(path))
    torch.testing.assert_close(other.state_dict(), before)
    SafeCheckpointer(other, allow_partial=True).load(str(path))
