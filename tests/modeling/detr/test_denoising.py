# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Denoising queries against Python loops over images: queries, who sees whom, losses, gradients."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qbheat_det.modeling.detr.auxiliary_queries import Denoising
from qbheat_det.modeling.detr.criterion import Targets

from ..reference_denoising import NoisedBox, Settings, denoising_losses, noised_boxes
from .test_criterion import NO_OBJECT_WEIGHT, criterion, ground_truth, predictions

K, DIM = 4, 8
COUNTS = {
    "an image without boxes": [2, 0, 3],
    "a hundred boxes": [100, 2],
    "one image": [5],
    "no boxes": [0, 0],
}
SETTINGS = {
    "negatives": Settings(),
    "much noise": Settings(box_noise=1.5, label_noise=1.0),
    "few queries": Settings(groups=5, max_queries=20),
    "one query": Settings(max_queries=1, negatives=False),
}


def part(settings: Settings) -> Denoising:
    torch.manual_seed(0)
    return Denoising(num_classes=K, dim=DIM, **dataclasses.asdict(settings))


def noise_for(counts: list[int], settings: Settings) -> tuple[Tensor, list[list[NoisedBox]]]:
    """Random numbers (N, E, 6), and the queries that the reference makes with them."""
    longest = min(settings.max_queries, 2 * settings.groups * max(counts))
    drawn = torch.rand(len(counts), longest, 6, generator=torch.Generator().manual_seed(1))
    truth = zip(*ground_truth(counts, K), drawn, strict=True)
    queries = [noised_boxes((labels, boxes), settings, K, noise) for labels, boxes, noise in truth]
    return drawn[:, : max(map(len, queries))], queries


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_queries_equal_those_of_a_loop_over_images(counts: list[int], settings: Settings) -> None:
    denoising, (noise, expected) = part(settings), noise_for(counts, settings)
    found = denoising(Targets.stack(*ground_truth(counts, K)), noise)
    assert found.content.shape[1] == max(len(queries) for queries in expected)
    assert found.content.shape[1] <= settings.max_queries
    assert found.reads_own.all()
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
def test_losses_and_gradients_equal_the_naive_ones(counts: list[int], settings: Settings) -> None:
    _, expected = noise_for(counts, settings)
    width = max(len(queries) for queries in expected)
    truth = ground_truth(counts, K)
    ours = [t.requires_grad_() for t in predictions(2, len(counts), width, K)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    denoising, loss = part(settings), criterion(K)
    normalizers = loss.mean_normalizers(torch.tensor(denoising.normalizers(counts, loss)), 1)
    found = denoising.losses(*ours, Targets.stack(*truth), loss, normalizers)
    wanted = denoising_losses(*theirs, expected, list(zip(*truth, strict=True)), NO_OBJECT_WEIGHT)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert_close(value.sum(), wanted[name].float(), rtol=1e-5, atol=1e-6, msg=name)
    sum(value.sum() for value in found.values()).backward()
    sum(wanted.values()).backward()
    for own, reference in zip(ours, theirs, strict=True):
        assert own.grad is not None
        assert reference.grad is not None
        assert_close(own.grad, reference.grad.float(), rtol=1e-4, atol=1e-6)


def test_an_image_has_the_same_queries_alone_as_beside_a_crowded_one() -> None:
    settings = Settings(groups=5, max_queries=24)
    denoising, (noise, _) = part(settings), noise_for([2, 12], settings)
    together = denoising(Targets.stack(*ground_truth([2, 12], K)), noise)
    labels, boxes = ground_truth([2, 12], K)
    alone = denoising(Targets.stack(labels[:1], boxes[:1]), noise[:1, :20])
    assert alone.position.shape[1] == 20  # five groups of two boxes and their negatives
    assert_close(together.position[:1, :20], alone.position)
    assert_close(together.masked[:1, :20, :20], alone.masked)


def test_nothing_waits_for_the_device() -> None:
    """On the meta device there is no value to wait for: reading one raises."""
    settings, counts, loss = Settings(), [3, 0, 4], criterion(K)
    denoising = part(settings).to("meta")
    labels, boxes = ([t.to("meta") for t in each] for each in ground_truth(counts, K))
    targets = Targets.stack(labels, boxes)
    queries = denoising(targets)
    width = queries.content.shape[1]
    outputs = (torch.zeros(2, 3, width, size, device="meta") for size in (K + 1, 4))
    losses = denoising.losses(*outputs, targets, loss, torch.ones(2, device="meta"))
    assert all(value.is_meta for value in losses.values())
