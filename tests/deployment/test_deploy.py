# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Deployed models against the plain ones, without a compiler."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.core.errors import UserError
from qbheat_det.deployment import compiling
from tests.export.tiny_models import build, make_config

from .boxes import assert_same_boxes, deploy, entries

SIZES = [(64, 96), (67, 101), (96, 64)]


@pytest.fixture(scope="module")
def mf_detr() -> nn.Module:
    return build(make_config("mf_detr"))


@pytest.fixture(scope="module")
def classifier() -> nn.Module:
    return build(make_config("classifier"))


@pytest.mark.parametrize("kind", ["mf_detr", "selected_queries", "retinanet"])
def test_boxes_are_those_of_the_plain_model_on_odd_sizes_and_in_batches(kind: str) -> None:
    model = build(make_config(kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deployed = deploy(model)
    assert type(deployed.model) is type(model)
    with torch.no_grad():
        for batch in (*([size] for size in SIZES), [SIZES[0]] * 2, SIZES):
            assert_same_boxes(deployed(entries(*batch)), model(entries(*batch)))
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert {step for step, text in deployed.report.items() if not text.startswith("no: ")} == {
        "fold", "fuse", "channels-last",
    }  # fmt: skip


@torch.no_grad()
def test_scores_of_a_classifier_and_maps_of_a_backbone(classifier: nn.Module, mf_detr: Any) -> None:
    images = entries((32, 32), (32, 32))
    assert_close(deploy(classifier)(images), classifier(images))
    x = torch.randn(2, 3, 65, 90)
    deployed = deploy(mf_detr.backbone)
    assert_close(dict(deployed(x)), dict(mf_detr.backbone(x)), rtol=1e-4, atol=1e-4)


def test_it_only_predicts(mf_detr: nn.Module) -> None:
    deployed = deploy(mf_detr)
    assert not deployed.training
    assert deployed.eval() is deployed
    with pytest.raises(UserError):
        deployed.train()
    with torch.autocast("cpu", torch.bfloat16):  # has no effect
        found = deployed(entries((64, 96)))
    assert not found[0]["instances"].scores.requires_grad
    with torch.no_grad():
        assert_same_boxes(found, mf_detr(entries((64, 96))))


def test_copies_predict_the_same(mf_detr: nn.Module) -> None:
    deployed = deploy(mf_detr, precision="bfloat16")
    image = entries((64, 96))
    for twin in (copy.deepcopy(deployed), pickle.loads(pickle.dumps(deployed))):
        assert_same_boxes(twin(image), deployed(image))


def test_wrong_arguments_and_models_are_refused(classifier: nn.Module) -> None:
    for settings, named in (
        ({"precision": "half"}, "precision"),
        ({"compile": "always"}, "compile"),
        *(({"image_sizes": sizes}, "image_sizes") for sizes in ([800, 1333], [(800, 0)], 800)),
    ):
        with pytest.raises(UserError, match=named):
            deploy(classifier, **settings)
    with pytest.raises(UserError, match="Linear"):
        deploy(nn.Linear(2, 2))
    with pytest.raises(UserError):
        deploy(deploy(classifier))


@torch.no_grad()
def test_bfloat16_is_for_those_who_ask(
    classifier: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "read_cpu_flags", lambda: {"avx512f"})
    assert deploy(classifier).report["precision"].startswith("no: ")
    assert "emulates" in deploy(classifier, precision="bfloat16").report["precision"]
    monkeypatch.setattr(compiling, "read_cpu_flags", lambda: {"avx512f", "amx_bf16"})
    assert deploy(classifier).report["precision"].startswith("no: ")  # it is not equal
    deployed = deploy(classifier, precision="bfloat16")
    assert not deployed.report["precision"].startswith("no: ")
    found, expected = (m(entries((32, 32)))[0]["scores"] for m in (deployed, classifier))
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=0, atol=0.02)
    assert not torch.equal(found, expected)
