# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's own ``DetectionCheckpointer`` and ``DefaultPredictor``: all tensors, or an error."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_backbone, build_model
from torch import nn

import qbheat_det
from qbheat_det.checkpoint import bare_backbone, load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine.predict import build_predictor
from qbheat_det.model_zoo.sources import _write_pytorch
from qbheat_det.modeling.backbone.fpn import build_bare_backbone

DETECTOR = "retinanet/285M_bccd"


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    return qbheat_det.model_zoo.get(DETECTOR, device="cpu")


@pytest.fixture(scope="module")
def encoder(trained: nn.Module) -> dict[str, torch.Tensor]:
    return dict(_encoder_of(trained).state_dict())


class Foreign(nn.Module):
    """A model of somebody else, whose class knows nothing of this package."""

    def __init__(self, backbone: nn.Module) -> None:
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
def _build(name: str) -> nn.Module:
    return BUILDERS[name](load_run_config(qbheat_det.model_zoo.get_address(DETECTOR)))


def _empty(name: str) -> nn.Module:
    model = _build(name)
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model


def _encoder_of(model: nn.Module) -> nn.Module:
    backbone = getattr(model, "backbone", model)
    return getattr(backbone, "bottom_up", backbone)


@pytest.mark.parametrize("model", BUILDERS)
@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.bottom_up.", "zoo"])
def test_every_tensor_of_the_encoder_is_loaded(
    model: str, prefix: str, trained: nn.Module, encoder: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    own = _empty(model)
    path = f"qbheat://{DETECTOR}"
    if prefix != "zoo":
        file = tmp_path / "w.pth"
        state = {prefix + name: tensor for name, tensor in encoder.items()}
        # Names without a prefix, in a model of other people: Detectron2 has a switch for them.
        torch.save({"model": state, "matching_heuristics": prefix == ""}, file)
        path = str(file)
    rest = DetectionCheckpointer(own).load(path)
    torch.testing.assert_close(dict(_encoder_of(own).state_dict()), encoder, rtol=0, atol=0)
    if prefix == "zoo":
        assert rest["info"]["class_names"] == ["RBC", "WBC", "Platelets"]
    if prefix == "zoo" and model in ("pyramid", "foreign"):  # the pyramid's layers come along
        pyramid = getattr(own, "backbone", own).state_dict()
        expected = dict(trained.backbone.state_dict())
        torch.testing.assert_close(dict(pyramid), expected, rtol=0, atol=0)


def test_the_zoos_bare_files_find_their_place(
    encoder: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert not bare_backbone(encoder)
    source = tmp_path / "bare.pth"
    torch.save({"model": encoder}, source)
    own = _empty("foreign")
    DetectionCheckpointer(own).load(str(_write_pytorch(source, tmp_path / "cache")))
    torch.testing.assert_close(dict(_encoder_of(own).state_dict()), encoder, rtol=0, atol=0)


@pytest.mark.parametrize("model", ["bare", "pyramid", "foreign"])
@pytest.mark.parametrize("kind", ["none", "some"])
def test_what_does_not_fill_the_encoder_is_an_error(
    model: str, kind: str, encoder: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    names = {"none": "other.{}", "some": "backbone.{}"}
    state = {names[kind].format(name): tensor for name, tensor in [*encoder.items()][:90]}
    torch.save({"model": state}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="SafeCheckpointer"):
        DetectionCheckpointer(_empty(model)).load(str(tmp_path / "w.pth"))


def test_default_predictor_takes_an_address() -> None:
    cfg = load_run_config(f"qbheat://{DETECTOR}", device="cpu", opts=["INPUT.MIN_SIZE_TEST", "128"])
    image = np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)
    found = DefaultPredictor(cfg)(image)["instances"]
    expected = build_predictor(cfg)(image)["instances"]
    torch.testing.assert_close(found.scores, expected.scores)
