# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Queries of training alone: what stays as it was, and denoising against Python loops."""

import dataclasses

import pytest
import torch
from detectron2.modeling import build_model
from torch.testing import assert_close

from qbheat_det.modeling.detr.auxiliary_queries import Denoising
from qbheat_det.modeling.detr.criterion import Targets
from qbheat_det.modeling.detr.mf_decoder import QuerySet
from qbheat_det.modeling.detr.mf_detr import MFDETR
from tests.engine.gradient_cases import MF_DETR, Case, make_case_config, make_image

from ..reference_set_criterion import Settings, denoising_losses, noised_boxes
from .test_criterion import NO_OBJECT_WEIGHT, criterion, ground_truth, predictions
from .test_decoder_against_reference import maps, small_decoder

DENOISING = ("MODEL.MF_DETR.DENOISING.GROUPS", 3)
FOCAL = ("MODEL.MF_DETR.CLASSIFICATION", "focal")


def build(*opts):
    torch.manual_seed(0)
    model = build_model(make_case_config(Case(MF_DETR, opts=opts), "cpu"))
    assert isinstance(model, MFDETR)
    return model


def test_the_network_of_inference_is_the_same_to_the_bit():
    images = [make_image(index) for index in (0, 5)]
    plain, helped = build(*FOCAL).eval(), build(*DENOISING, *FOCAL).eval()
    names = {name for name in helped.state_dict() if not name.startswith("auxiliary_queries.")}
    assert names == set(plain.state_dict())
    for name, tensor in plain.state_dict().items():  # from the same seed
        assert_close(helped.state_dict()[name], tensor, rtol=0, atol=0, msg=name)
    with torch.no_grad():
        for found, expected in zip(helped(images), plain(images), strict=True):
            for field, value in found["instances"].get_fields().items():
                values = [
                    getattr(v, "tensor", v) for v in (value, expected["instances"].get(field))
                ]
                assert_close(*values, rtol=0, atol=0)


def test_a_query_is_moved_by_those_that_it_sees_and_by_no_other():
    """Derivatives through all blocks, beside what the masks allow in any number of steps."""
    decoder, queries = small_decoder((1, 1, 1)), 9
    torch.manual_seed(0)
    hidden = torch.tensor([[False, True, False], [True, False, False], [True, True, False]])
    content = torch.randn(2, 3, 64).double().requires_grad_()
    alone = torch.ones(3, 3, dtype=torch.bool).fill_diagonal_(False)
    extra = QuerySet(
        content=content,
        position=torch.randn(2, 3, 64).double(),
        masked=torch.stack([hidden, alone]),
    )
    features = [torch.stack([f, f.flip(-1)]) for f in maps((12, 20), (24, 40))]
    states = decoder.refine_queries(features, extra=extra)[-1]
    expected = decoder.refine_queries(features)[-1]
    assert_close(states[:, :queries], expected, rtol=1e-10, atol=1e-10)
    for image in range(2):
        sees = ~extra.masked[image]
        reached = torch.linalg.matrix_power(sees.double(), 3) > 0  # in three blocks
        for number in range(3):
            (gradient,) = torch.autograd.grad(
                states[image, queries + number].sum(), content, retain_graph=True
            )
            influence = gradient.abs().sum(dim=2) > 0  # (N, E)
            assert not influence[1 - image].any()
            assert_close(influence[image], reached[number])
    (gradient,) = torch.autograd.grad(states[:, :queries].sum(), content)
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)


K, DIM = 4, 8
COUNTS = {
    "an image without boxes": [2, 0, 3],
    "a hundred boxes": [100, 2],
    "one image": [5],
    "no boxes": [0, 0],
}
SETTINGS = {
    "usual": Settings(),
    "much noise": Settings(box_noise=1.5, label_noise=1.0),
    "few queries": Settings(groups=5, max_queries=20),
}


def part(settings):
    torch.manual_seed(0)
    return Denoising(num_classes=K, dim=DIM, **dataclasses.asdict(settings))


def noise_for(counts, settings):
    """Random numbers (N, E, 6), and the queries that the reference makes with them."""
    longest = min(settings.max_queries, 2 * settings.groups * max(counts))
    drawn = torch.rand(len(counts), longest, 6, generator=torch.Generator().manual_seed(1))
    truth = zip(*ground_truth(counts, K), drawn, strict=True)
    queries = [noised_boxes((labels, boxes), settings, K, noise) for labels, boxes, noise in truth]
    return drawn[:, : max(map(len, queries))], queries


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_queries_equal_those_of_a_loop_over_images(counts, settings):
    denoising, (noise, expected) = part(settings), noise_for(counts, settings)
    found = denoising(Targets.stack(*ground_truth(counts, K)), noise)
    assert found.content.shape[1] == max(len(queries) for queries in expected)
    assert found.content.shape[1] <= settings.max_queries
    for image, queries in enumerate(expected):
        for number, query in enumerate(queries):
            assert_close(found.content[image, number], denoising.label_embed.weight[query.label])
            code = denoising.position_encoding.wave(torch.tensor(query.box)).flatten()
            assert_close(
                found.position[image, number], denoising.box_embed(code), atol=1e-5, rtol=0
            )
        groups = torch.tensor([query.group for query in queries])
        own = found.masked[image, : len(queries)]
        assert_close(own[:, : len(queries)], groups[:, None] != groups)
        assert found.masked[image, :, len(queries) :].all()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_losses_and_gradients_equal_the_naive_ones(counts, settings):
    _, expected = noise_for(counts, settings)
    width = max(len(queries) for queries in expected)
    truth = ground_truth(counts, K)
    ours = [t.requires_grad_() for t in predictions(2, len(counts), width, K)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    denoising, loss = part(settings), criterion(K)
    normalizers = loss.mean_normalizers(torch.tensor(denoising.normalizers(counts, loss)), 1)
    outputs = dict(zip(("pred_logits", "pred_boxes"), ours, strict=True))
    found = denoising.losses(outputs, Targets.stack(*truth), loss, normalizers)
    wanted = denoising_losses(*theirs, expected, list(zip(*truth, strict=True)), NO_OBJECT_WEIGHT)
    assert set(found) == {name.replace("loss_", "loss_dn_") for name in wanted}
    for name, value in wanted.items():
        own = found[name.replace("loss_", "loss_dn_")]
        assert_close(own, value.float(), rtol=1e-5, atol=1e-6, msg=name)
    sum(found.values()).backward()
    sum(wanted.values()).backward()
    for own, reference in zip(ours, theirs, strict=True):
        assert_close(own.grad, reference.grad.float(), rtol=1e-4, atol=1e-6)
