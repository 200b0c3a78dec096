# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile->Former, Former and Mobile<-Former against naive loops, and under padding."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.layers import Former, FormerToMobile, MobileToFormer

from ..modeling.parameter_names import FORMER, TO_FORMER, TO_MOBILE, randomise_, renamed
from ..modeling.reference_mobile_former import (
    Weights,
    former,
    former_to_mobile,
    mobile_to_former,
)

SIZES = [(5, 4), (1, 1), (3, 6), (2, 1)]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 12, 5, 6, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(2)).double()


def random(module: nn.Module) -> nn.Module:
    randomise_(module.double().eval())
    return module


def test_mobile_to_former_equals_the_naive_loop(x: torch.Tensor, tokens: torch.Tensor) -> None:
    bridge = random(MobileToFormer(token_dim=16, channels=12))
    weights = Weights(renamed(bridge, TO_FORMER))
    expected = [mobile_to_former(weights, *pair) for pair in zip(x, tokens, strict=True)]
    assert_close(bridge(tokens, x), torch.stack(expected))
    assert weights.names_read == set(weights.tensors)


def test_former_equals_the_naive_loop(tokens: torch.Tensor) -> None:
    layer = random(Former(token_dim=16))
    weights = Weights(renamed(layer, FORMER))
    assert_close(layer(tokens), torch.stack([former(weights, z) for z in tokens]))
    assert weights.names_read == set(weights.tensors)


def test_former_to_mobile_equals_the_naive_loop(x: torch.Tensor, tokens: torch.Tensor) -> None:
    bridge = random(FormerToMobile(token_dim=16, channels=12))
    weights = Weights(renamed(bridge, TO_MOBILE))
    expected = [former_to_mobile(weights, *pair) for pair in zip(x, tokens, strict=True)]
    assert_close(bridge(x, tokens), torch.stack(expected))
    assert weights.names_read == set(weights.tensors)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_order_of_maps_in_memory_changes_nothing(padded: bool) -> None:
    torch.manual_seed(0)
    to_former = MobileToFormer(token_dim=12, channels=8).double()
    to_mobile = FormerToMobile(token_dim=12, channels=8).double()
    tokens = torch.randn(3, 4, 12).double()
    plain = torch.randn(3, 8, 5, 6).double().requires_grad_()
    turned = plain.detach().to(memory_format=torch.channels_last).requires_grad_()
    padding = (torch.rand(3, 1, 5, 6) < 0.3) if padded else None
    results = []
    for x in (plain, turned):
        found = to_mobile(x, to_former(tokens, x, padding))
        results.append((found, *torch.autograd.grad(found.square().sum(), x)))
    for first, second in zip(*results, strict=True):
        assert_close(first, second)
    assert results[1][0].is_contiguous(memory_format=torch.channels_last)
