# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Deployed models equal the plain ones, and only predict."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import qbheat_det
from qbheat_det.core import environment
from qbheat_det.core.errors import UserError
from tests.export.tiny_models import build, make_config

SIZES = [(64, 96), (67, 101), (96, 64)]


def deploy(model, **settings):
    """Deploys without changing the memory settings of this process."""
    return qbheat_det.deploy(model, keep_memory=False, **settings)


def entries(*sizes):
    """Returns a batch of random images, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"image": torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8)}
        for size in sizes
    ]


def assert_same_boxes(computed, expected):
    """Asserts that two batches of results agree, and are not empty."""
    for one, other in zip(computed, expected, strict=True):
        ours = one["instances"]
        theirs = other["instances"]
        assert len(theirs) > 0
        assert_close(ours.pred_boxes.tensor, theirs.pred_boxes.tensor, rtol=0, atol=0.05)
        assert_close(ours.scores, theirs.scores, rtol=0, atol=1e-4)
        assert_close(ours.pred_classes, theirs.pred_classes)


@pytest.fixture(scope="module")
def mf_detr():
    return build(make_config("mf_detr"))


@pytest.fixture(scope="module")
def classifier():
    return build(make_config("classifier"))


@pytest.mark.parametrize("kind", ["mf_detr", "selected_queries", "retinanet"])
def test_boxes_equal_the_plain_models_on_odd_sizes_and_in_batches(kind):
    model = build(make_config(kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deployed = deploy(model)
    assert type(deployed.model) is type(model)
    with torch.no_grad():
        for batch in (*([size] for size in SIZES), [SIZES[0]] * 2, SIZES):
            assert_same_boxes(deployed(entries(*batch)), model(entries(*batch)))
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    applied = {step for step, text in deployed.report.items() if not text.startswith("no: ")}
    assert applied == {"fold", "fuse", "channels-last"}


@torch.no_grad()
def test_scores_of_a_classifier_and_maps_of_a_backbone(classifier, mf_detr):
    images = entries((32, 32), (32, 32))
    assert_close(deploy(classifier)(images), classifier(images))
    x = torch.randn(2, 3, 65, 90)
    deployed = deploy(mf_detr.backbone)
    assert_close(dict(deployed(x)), dict(mf_detr.backbone(x)), rtol=1e-4, atol=1e-4)


def test_a_deployed_model_only_predicts_and_can_be_copied(mf_detr):
    deployed = deploy(mf_detr)
    assert not deployed.training
    assert deployed.eval() is deployed
    with pytest.raises(UserError):
        deployed.train()
    with torch.autocast("cpu", torch.bfloat16):  # has no effect
        outputs = deployed(entries((64, 96)))
    assert not outputs[0]["instances"].scores.requires_grad
    with torch.no_grad():
        assert_same_boxes(outputs, mf_detr(entries((64, 96))))

    deployed = deploy(mf_detr, precision="bfloat16")
    image = entries((64, 96))
    for twin in (copy.deepcopy(deployed), pickle.loads(pickle.dumps(deployed))):
        assert_same_boxes(twin(image), deployed(image))


def test_wrong_arguments_and_models_are_refused(classifier):
    with pytest.raises(UserError, match="precision"):
        deploy(classifier, precision="half")
    with pytest.raises(UserError, match="Linear"):
        deploy(nn.Linear(2, 2))
    with pytest.raises(UserError):
        deploy(deploy(classifier))


@torch.no_grad()
def test_bfloat16_is_used_only_on_request(classifier, monkeypatch):
    monkeypatch.setattr(environment, "read_cpu_flags", lambda: {"avx512f"})
    assert deploy(classifier).report["precision"].startswith("no: ")
    assert "emulates" in deploy(classifier, precision="bfloat16").report["precision"]
    monkeypatch.setattr(environment, "read_cpu_flags", lambda: {"avx512f", "amx_bf16"})
    assert deploy(classifier).report["precision"].startswith("no: ")  # it is not equal
    deployed = deploy(classifier, precision="bfloat16")
    assert not deployed.report["precision"].startswith("no: ")
    computed = deployed(entries((32, 32)))[0]["scores"]
    expected = classifier(entries((32, 32)))[0]["scores"]
    assert computed.dtype == torch.float32
    assert_close(computed, expected, rtol=0, atol=0.02)
    assert not torch.equal(computed, expected)


@pytest.mark.gpu
@torch.no_grad()
def test_results_on_a_gpu_equal_the_plain_ones():
    model = build(make_config("mf_detr")).cuda()
    images = entries((128, 160))
    expected = model(images)[0]["instances"].scores
    computed = deploy(model)(images)[0]["instances"].scores
    assert_close(computed, expected, atol=1e-2, rtol=0)
