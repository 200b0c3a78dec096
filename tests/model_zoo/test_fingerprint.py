# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fingerprints: equal if nothing changed; else the first output that changed is named."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo.fingerprint import (
    TOLERANCE,
    compare_fingerprints,
    compute_fingerprint,
)
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from tests.engine.gradient_cases import CLASSIFIER, MF_DETR, Case, make_case_config
from tests.engine.tiny_detectors import make_retinanet_config
from tests.modeling.tiny_pretraining import make_tiny_config


def _mf_detr() -> CfgNode:
    cfg = make_case_config(Case(MF_DETR), "cpu")
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 64, 96
    return cfg


def _classifier() -> CfgNode:
    return make_case_config(Case(CLASSIFIER), "cpu")


def _qb_heat() -> CfgNode:
    cfg = make_tiny_config()
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    return cfg


@pytest.mark.parametrize(
    ("make_config", "expected"),
    [
        (
            make_retinanet_config,
            {"backbone.p3", "head.0.0", "head.1.4", "image0.scores", "image1.scores"},
        ),
        (_mf_detr, {"backbone.s8", "decoder.pred_logits", "decoder.pred_boxes", "image1.scores"}),
        (_classifier, {"backbone.s16_expanded", "decoder", "image0.scores", "image1.scores"}),
        (_qb_heat, {"backbone.s16_expanded", "predictor", "decoder", "image0.reconstruction"}),
    ],
)
def test_a_fingerprint_has_the_raw_outputs_of_every_kind_of_model_and_is_reproducible(
    make_config: Callable[[], CfgNode], expected: set[str]
) -> None:
    cfg = make_config()
    model = build_model(cfg).train()
    state = torch.random.get_rng_state()
    first = compute_fingerprint(model, cfg)
    assert model.training
    torch.testing.assert_close(torch.random.get_rng_state(), state, rtol=0, atol=0)
    assert expected <= {output.name for output in first.outputs}
    torch.rand(7)
    again = compute_fingerprint(model.eval(), cfg)
    assert first == again
    assert all(one.ratio == 0 for one in compare_fingerprints(first, again))


def test_the_numbers_are_those_of_the_output() -> None:
    cfg, outputs = _qb_heat(), []
    backbone = build_bare_backbone(cfg).eval()
    backbone.register_forward_hook(lambda *call: outputs.append(call[2]["s16_expanded"].double()))
    (output,) = compute_fingerprint(backbone, cfg).outputs
    (whole,) = outputs
    assert output.shape == tuple(whole.shape)
    expected = torch.stack([whole.mean(), whole.std(correction=0)])
    found = torch.tensor([output.mean, output.std], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # The sampled values lie a golden section of the output apart.
    places = [int(math.fmod(k * 0.6180339887498949, 1) * whole.numel()) for k in range(10)]
    values = torch.tensor(output.values, dtype=torch.float64)
    torch.testing.assert_close(values, whole.flatten()[places], rtol=1e-5, atol=1e-5)
    assert output.tolerance == pytest.approx(TOLERANCE * output.std, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda model, cfg: setattr(cfg.INPUT, "FORMAT", "BGR"), "backbone.p3"),
        (lambda model, cfg: model.pixel_mean.add_(2.0), "backbone.p3"),
        (lambda model, cfg: model.head.bbox_pred.weight.data.mul_(1.01), "head.1.0"),
    ],
)
def test_a_change_is_found_at_the_first_output_that_it_reaches(
    change: Callable[[Any, CfgNode], object], first: str
) -> None:
    cfg = make_retinanet_config()
    model = build_model(cfg).eval()
    before = compute_fingerprint(model, cfg)
    change(model, cfg)
    deviations = compare_fingerprints(before, compute_fingerprint(model, cfg))
    assert next(one.output for one in deviations if one.ratio > 1) == first


def test_outputs_that_are_nan_missing_new_or_of_another_shape_are_found() -> None:
    cfg = _classifier()
    whole = compute_fingerprint(build_model(cfg), cfg)
    first, *others = whole.outputs
    broken = build_model(cfg)
    with torch.no_grad():
        next(broken.decoder.parameters()).fill_(math.nan)
    with pytest.raises(UserError, match="'decoder'"):
        compute_fingerprint(broken, cfg)

    def deviations(expected: Any, found: Any) -> dict[str, float]:
        prints = [dataclasses.replace(whole, outputs=tuple(o)) for o in (expected, found)]
        return {one.output: one.ratio for one in compare_fingerprints(*prints)}

    reshaped = dataclasses.replace(first, shape=(1, 2))
    assert deviations(whole.outputs, [reshaped, *others])[first.name] == math.inf
    assert deviations(whole.outputs, others)[first.name] == math.inf
    assert deviations(others, whole.outputs)[first.name] == math.inf
    # The tolerance in an index is not trusted.
    for tolerance in (1e9, -1e9):
        lax = dataclasses.replace(first, mean=99.0, tolerance=tolerance)
        assert deviations([lax, *others], whole.outputs)[first.name] > 1
    with pytest.raises(UserError, match="version"):
        compare_fingerprints(whole, dataclasses.replace(whole, version=2))
