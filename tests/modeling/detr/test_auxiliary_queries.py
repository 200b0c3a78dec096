# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR with further queries in training: what stays as it was, to the bit or to rounding."""

from typing import Any

import pytest
import torch
from detectron2.modeling import build_model
from torch.testing import assert_close

from qbheat_det.modeling.detr.mf_detr import MFDETR
from tests.engine.gradient_cases import MF_DETR, Case, make_case_config, make_image

DENOISING = ("MODEL.MF_DETR.DENOISING.GROUPS", 3)
GROUPS = ("MODEL.MF_DETR.QUERY_GROUPS.COUNT", 3)
FOCAL = ("MODEL.MF_DETR.CLASSIFICATION", "focal")
HELPS = {
    "denoising": DENOISING,
    "groups": GROUPS,
    "both": (*DENOISING, *GROUPS),
    "both with focal losses": (*DENOISING, *GROUPS, *FOCAL),
}
BATCHES = {"boxes": (0, 5, 1, 3), "no box": (5, 6), "one image": (2,)}
NAMES = {"denoising": "loss_dn_", "groups": "loss_group_"}


def build(*opts: Any) -> MFDETR:
    torch.manual_seed(0)
    model = build_model(make_case_config(Case(MF_DETR, opts=opts), "cpu"))
    assert isinstance(model, MFDETR)
    return model


def without_help(opts: tuple[Any, ...]) -> tuple[Any, ...]:
    return FOCAL if "focal" in opts else ()


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("opts", HELPS.values(), ids=HELPS.keys())
def test_the_main_losses_are_those_without_help(
    opts: tuple[Any, ...], batch: tuple[int, ...]
) -> None:
    images = [make_image(index) for index in batch]
    plain, helped = build(*without_help(opts)), build(*opts)
    for model in (plain, helped):
        # At its start all boxes are the same, and of two assignments that cost the same, rounding
        # chooses.
        generator = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(model.decoder.bbox_embed.last.weight, generator=generator)
    plain, helped = plain(images), helped(images)
    for name, loss in plain.items():
        assert_close(helped[name], loss, rtol=1e-6, atol=1e-6, msg=name)
    kinds = [prefix for prefix in NAMES.values() if any(prefix in name for name in helped)]
    assert len(helped) == len(plain) + 3 * len(kinds)
    assert len(kinds) == (DENOISING[0] in opts) + (GROUPS[0] in opts)


@pytest.mark.parametrize("opts", HELPS.values(), ids=HELPS.keys())
def test_the_network_of_inference_is_the_same_to_the_bit(opts: tuple[Any, ...]) -> None:
    images = [make_image(index) for index in (0, 5)]
    plain, helped = build(*without_help(opts)).eval(), build(*opts).eval()
    names = {name for name in helped.state_dict() if not name.startswith("auxiliary_queries.")}
    assert names == set(plain.state_dict())
    for name, tensor in plain.state_dict().items():  # from the same seed
        assert_close(helped.state_dict()[name], tensor, rtol=0, atol=0, msg=name)
    with torch.no_grad():
        for found, expected in zip(helped(images), plain(images), strict=True):
            for field in ("scores", "pred_classes"):
                value, wanted = (each["instances"].get(field) for each in (found, expected))
                assert_close(value, wanted, rtol=0, atol=0)
            boxes = found["instances"].pred_boxes.tensor
            assert_close(boxes, expected["instances"].pred_boxes.tensor, rtol=0, atol=0)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_every_parameter_has_a_gradient(batch: tuple[int, ...]) -> None:
    model = build(*HELPS["both"])
    sum(model([make_image(index) for index in batch]).values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_what_losses_are_divided_by_is_known_from_the_ground_truth() -> None:
    # Images of 3, 0 and 1 boxes, 7 queries, 3 groups: 4 of 21 queries find a box, and 12 of 24
    # denoising queries are positive; no-object weighs 0.1.
    model = build(*HELPS["both"])
    counts = model.loss_counts([make_image(index) for index in (0, 5, 1)])
    assert_close(counts, torch.tensor([[4 + 0.1 * 17, 4.0], [12 + 0.1 * 12, 12.0]]))
    assert_close(model.loss_normalizers(counts, parts=4), counts / 4)
