# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The parts of MoCo against second implementations in NumPy and in loops."""

from collections import deque

import numpy as np
import pytest
import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn

from qbheat_det.modeling.pretrain import FeatureQueue, ProjectionHead
from qbheat_det.modeling.pretrain.moco import MomentumCopy, info_nce, similarity_logits
from qbheat_det.modeling.pretrain.shuffled_batch_norm import (
    embed_in_groups,
    embed_shuffled,
)


def unit(*shape: int) -> Tensor:
    return nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_the_queue_is_that_of_the_standard_library() -> None:
    queue = FeatureQueue(size=12, dim=3)
    reference = deque(queue.keys.clone(), maxlen=12)
    for step in range(9):
        for part in unit(4, 3).split([4, 1, 3][step % 3]):  # micro-batches
            queue.hold(part)
            reference.extend(part)
        queue.push_held()
        oldest = int(queue.next)
        assert oldest == 4 * (step + 1) % 12
        torch.testing.assert_close(
            queue.keys.roll(-oldest, dims=0), torch.stack(list(reference)), rtol=0, atol=0
        )


def test_a_queue_begins_with_the_same_directions_everywhere() -> None:
    queue = FeatureQueue(size=100, dim=16)
    torch.manual_seed(7)
    torch.testing.assert_close(queue.keys, FeatureQueue(size=100, dim=16).keys, rtol=0, atol=0)
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(100))
    assert set(queue.state_dict()) == {"keys", "next"}


def test_a_queue_that_nobody_empties_says_so() -> None:
    queue = FeatureQueue(size=4, dim=2)
    queue.hold(unit(3, 2))
    with pytest.raises(RuntimeError, match="QUEUE_SIZE"):
        queue.hold(unit(3, 2))
    with pytest.raises(ValueError):
        FeatureQueue(size=0, dim=2)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999, 1.0])
def test_the_copy_follows_as_in_numpy(momentum: float) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    follower = MomentumCopy(module, momentum=momentum)
    own = dict(follower.copied.named_parameters())
    expected = {name: value.detach().double().numpy().copy() for name, value in own.items()}
    for _ in range(5):
        for parameter in module.parameters():
            parameter.data += torch.randn_like(parameter)
        follower.follow(module)
        for name, parameter in module.named_parameters():
            now = parameter.detach().double().numpy()
            expected[name] = momentum * expected[name] + (1 - momentum) * now
        for name, value in own.items():
            torch.testing.assert_close(
                value.double(), torch.from_numpy(expected[name]), rtol=1e-5, atol=1e-6
            )
    if momentum == 0.0:
        for a, b in zip(follower.copied.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_copy_of_equal_weights_keeps_its_bits_and_its_own_statistics() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    follower = MomentumCopy(module, momentum=0.999)
    module(torch.randn(8, 3))
    for _ in range(3):
        follower.follow(module)
    for a, b in zip(follower.copied.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(follower.copied[1].running_mean, torch.zeros(4), rtol=0, atol=0)
    follower.copied.load_state_dict(module.state_dict())
    torch.testing.assert_close(
        follower.copied[1].running_mean, module[1].running_mean, rtol=0, atol=0
    )


def test_no_gradient_reaches_the_copy_and_training_moves_its_statistics() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    follower = MomentumCopy(module, momentum=0.999)
    x = torch.randn(8, 3, requires_grad=True)
    assert not follower(x).requires_grad
    assert not any(p.requires_grad for p in follower.parameters())
    assert all(p.requires_grad for p in module.parameters())
    assert follower.copied[1].running_mean.abs().sum() > 0
    with pytest.raises(ValueError, match="MOMENTUM"):
        MomentumCopy(module, momentum=1.5)


def test_the_loss_is_cross_entropy_over_explicit_similarities() -> None:
    queries, keys, others = unit(4, 5), unit(4, 5), unit(7, 5)
    found = info_nce(similarity_logits(queries, keys, others, temperature=0.2))
    for i in range(4):
        q = queries[i].double().numpy()
        own = np.exp(sum(q[d] * float(keys[i, d]) for d in range(5)) / 0.2)
        rest = sum(
            np.exp(sum(q[d] * float(others[k, d]) for d in range(5)) / 0.2) for k in range(7)
        )
        expected = torch.tensor(-np.log(own / (own + rest)))
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_similarities_are_not_rounded_under_autocast() -> None:
    queries, keys, others = unit(4, 64), unit(4, 64), unit(50, 64)
    expected = similarity_logits(queries, keys, others, temperature=0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = similarity_logits(queries, keys, others, temperature=0.2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [False, True])
def test_the_head_reads_the_mean_of_the_map_and_the_first_token(tokens: bool) -> None:
    shapes = {"map": ShapeSpec(channels=6, stride=16)}
    features = {"map": torch.randn(3, 6, 2, 5)}
    expected = features["map"].flatten(2).mean(dim=2)
    if tokens:
        shapes["tokens"] = ShapeSpec(channels=4)
        features["tokens"] = torch.randn(3, 2, 4)
        expected = torch.cat([expected, features["tokens"][:, 0]], dim=1)
    head = ProjectionHead(input_shape=shapes, in_feature="map", hidden_dim=8, dim=5)
    assert set(head.in_features) == set(shapes)
    hidden = (expected @ head.hidden.weight.T + head.hidden.bias).clamp(min=0)
    projected = hidden @ head.out.weight.T + head.out.bias
    expected = projected / projected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(head(features), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head(features)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))  # float32, to its rounding
    with pytest.raises(ValueError):
        ProjectionHead(input_shape=shapes, in_feature="map", hidden_dim=0, dim=5)


def against_the_mean(images: Tensor) -> Tensor:
    """An encoder whose output depends on the images beside, as with BatchNorm."""
    pixels = images.flatten(1)
    return pixels - pixels.mean(dim=0)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_shuffled_groups_are_those_of_a_loop_over_images(groups: int) -> None:
    images = torch.randn(6, 1, 2, 2)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    found = embed_shuffled(against_the_mean, images, order, groups)
    size = 6 // groups
    for place, image in enumerate(order.tolist()):
        group = order[place // size * size : (place // size + 1) * size]
        mean = torch.stack([images[j].flatten() for j in group]).mean(dim=0)
        torch.testing.assert_close(found[image], images[image].flatten() - mean)


def test_queries_are_embedded_in_consecutive_groups() -> None:
    images = torch.randn(6, 1, 2, 2)
    found = embed_in_groups(against_the_mean, images, 2)
    expected = torch.cat([against_the_mean(images[:3]), against_the_mean(images[3:])])
    torch.testing.assert_close(found, expected)
    with_remainder = embed_in_groups(against_the_mean, torch.arange(10.0).view(10, 1, 1, 1), 4)
    # Of 3, 3, 2 and 2 images: four groups, none of a single image.
    expected = torch.tensor([-1.0, 0, 1, -1, 0, 1, -0.5, 0.5, -0.5, 0.5])
    torch.testing.assert_close(with_remainder.flatten(), expected)
    few = embed_in_groups(against_the_mean, images[:2], 5)  # more groups than images
    torch.testing.assert_close(few, torch.zeros(2, 4))
