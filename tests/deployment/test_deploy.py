# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Deployed models beside the plain ones, in the steps that need no compiler."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import qbheat_det
from qbheat_det.core.errors import UserError
from qbheat_det.deployment import Deployed, part_forwards, precision
from tests.export.tiny_models import build, make_config

SIZES = [(64, 96), (67, 101), (96, 64)]


def entries(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"image": torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8)}
        for size in sizes
    ]


def plain_steps(model: nn.Module, **settings: Any) -> Any:
    return qbheat_det.deploy(model, compile="off", keep_memory=False, **settings)


def assert_same_boxes(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        a, b = one["instances"], other["instances"]
        assert len(b) > 0
        assert_close(a.pred_boxes.tensor, b.pred_boxes.tensor, rtol=0, atol=0.05)
        assert_close(a.scores, b.scores, rtol=0, atol=1e-4)
        assert_close(a.pred_classes, b.pred_classes)


@pytest.mark.parametrize("kind", ["mf_detr", "retinanet"])
@torch.no_grad()
def test_boxes_are_those_of_the_plain_model_on_odd_sizes_and_in_batches(kind: str) -> None:
    model = build(make_config(kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    deployed = plain_steps(model)
    assert isinstance(deployed, type(model))
    assert isinstance(deployed, Deployed)
    for size in SIZES:
        assert_same_boxes(deployed(entries(size)), model(entries(size)))
    assert_same_boxes(deployed(entries((64, 96), (64, 96))), model(entries((64, 96), (64, 96))))
    assert_same_boxes(deployed(entries(*SIZES)), model(entries(*SIZES)))
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert deployed.report["fold"].applied
    assert not deployed.report["compile"].applied
    assert "channels-last yes" in str(deployed.report)


@pytest.mark.parametrize("arch", ["SyncFCOS", "RetinaNet"])
@torch.no_grad()
def test_other_detectors_too(arch: str) -> None:
    model = build(
        make_config(
            "retinanet",
            MODEL__META_ARCHITECTURE=arch,
            MODEL__FCOS__IN_FEATURES=["p3", "p4"],
            MODEL__FCOS__SCORE_THRESH_TEST=0.01,
        )
    )
    assert_same_boxes(plain_steps(model)(entries((67, 101))), model(entries((67, 101))))


@torch.no_grad()
def test_scores_of_a_classifier_and_maps_of_a_backbone() -> None:
    classifier = build(make_config("classifier"))
    images = entries((32, 32), (32, 32))
    found, expected = plain_steps(classifier)(images), classifier(images)
    assert_close(found, expected)
    backbone = build(make_config("mf_detr")).backbone
    x = torch.randn(2, 3, 65, 90)
    deployed = plain_steps(backbone)
    assert_close(dict(deployed(x)), dict(backbone(x)), rtol=1e-4, atol=1e-4)
    assert deployed.output_shape() == backbone.output_shape()


def test_it_neither_trains_nor_takes_weights_and_needs_no_no_grad() -> None:
    model = build(make_config("mf_detr"))
    deployed = plain_steps(model)
    with pytest.raises(UserError, match="does not train"):
        deployed.train()
    assert deployed.eval() is deployed
    with pytest.raises(UserError, match="takes no other weights"):
        deployed.load_state_dict(model.state_dict())
    found = deployed(entries((64, 64)))[0]["instances"]
    assert not found.scores.requires_grad


@torch.no_grad()
def test_what_is_deployed_again_begins_with_its_own_forwards(tmp_path: Path) -> None:
    plain = build(make_config("mf_detr"))
    deployed = plain_steps(plain, precision="bfloat16")
    x = torch.randn(1, 3, 64, 96)
    expected = dict(plain.backbone(x))
    again = plain_steps(deployed)
    assert type(again) is type(deployed)
    for found in (again.backbone(x), plain_steps(deployed.backbone)(x)):
        assert_close(dict(found), expected, rtol=1e-4, atol=1e-4)
    rounded = deployed.backbone(x)  # which is left as it was
    assert any((rounded[name] - expected[name]).abs().max() > 1e-3 for name in expected)
    twice: Any = deployed
    for _ in range(2):
        twice = qbheat_det.deploy(
            twice, compile_after=0, keep_memory=False, cache_folder=tmp_path / "programs"
        )
    own = twice.backbone.forward.programs.own
    assert own.__func__ is type(plain.backbone).forward
    assert own.__self__ is twice.backbone


def test_wrong_arguments_are_sentences() -> None:
    model = build(make_config("classifier"))
    with pytest.raises(UserError, match="precision is one of float32, bfloat16, not 'half'"):
        plain_steps(model, precision="half")
    with pytest.raises(UserError, match="compile is one of auto, off, not 'always'"):
        qbheat_det.deploy(model, compile="always")
    with pytest.raises(UserError, match="Linear has no backbone"):
        plain_steps(nn.Linear(2, 2))
    with pytest.raises(KeyError, match="program"):
        plain_steps(model).report["program"]


def test_a_part_in_bfloat16_takes_keywords() -> None:
    assert part_forwards._Shell(lambda x, y: x - y)(5, y=3) == 2


@torch.no_grad()
def test_a_backbone_in_bfloat16_takes_its_image_by_name() -> None:
    backbone = build(make_config("classifier")).backbone
    images = torch.randn(1, 3, 64, 64)
    found, expected = plain_steps(backbone, precision="bfloat16")(x=images), backbone(images)
    for name, wanted in expected.items():
        assert_close(found[name], wanted, rtol=0, atol=0.1 * float(wanted.abs().max()))


def test_a_folder_that_others_can_write_is_told_where_sizes_were_asked_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    told: list[str] = []
    deployed = qbheat_det.deploy(
        build(make_config("classifier")),
        image_sizes=[(32, 32)],
        keep_memory=False,
        cache_folder=tmp_path,
        tell=told.append,
    )
    sentence = deployed.report["compile"].sentence  # type: ignore[index, union-attr]
    assert told == [f"nothing is compiled: {sentence}"]


@torch.no_grad()
def test_bfloat16_is_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(make_config("classifier"))
    monkeypatch.setattr(precision, "processor_flags", lambda: {"avx512f"})
    report = plain_steps(model).report
    assert not report["precision"].applied
    assert "does not multiply bfloat16" in report["precision"].sentence
    report = plain_steps(model, precision="bfloat16").report
    assert "slower, for this device emulates it" in report["precision"].sentence
    monkeypatch.setattr(precision, "processor_flags", lambda: {"avx512f", "amx_bf16"})
    report = plain_steps(model).report
    assert not report["precision"].applied  # it is not equal
    assert "precision='bfloat16' takes it" in report["precision"].sentence
    deployed = plain_steps(model, precision="bfloat16")
    assert deployed.report["precision"].sentence == "bfloat16: as asked for"
    found, expected = (m(entries((32, 32)))[0]["scores"] for m in (deployed, model))
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=0, atol=0.02)
    assert not torch.equal(found, expected)


@torch.no_grad()
def test_without_a_compiler_there_is_a_sentence_and_a_model(
    tmp_path: Path,
) -> None:
    from torch._inductor import config

    model = build(make_config("classifier"))
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        deployed: Any = qbheat_det.deploy(
            model,
            keep_memory=False,
            cache_folder=tmp_path / "programs",
            image_sizes=[(32, 32)],
            tell=lambda _: None,
        )
    sentence = "there is no C++ compiler (no-such-compiler): install"
    assert f"none can be made: {sentence}" in deployed.report["compile"].sentence
    assert not deployed.report["program"].applied
    assert f"backbone for 32x32: {sentence}" in deployed.report["program"].sentence
    assert_close(deployed(entries((32, 32))), model(entries((32, 32))))
