# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The parts of MoCo against second implementations in NumPy and in loops."""

from collections import deque

import pytest
import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn

from qbheat_det.modeling.pretrain import FeatureQueue, ProjectionHead
from qbheat_det.modeling.pretrain.moco import MomentumCopy
from qbheat_det.modeling.pretrain.shuffled_batch_norm import (
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
