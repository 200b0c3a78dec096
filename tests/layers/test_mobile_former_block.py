# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The parts of a block, and whole blocks, against naive loops and under padding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qbheat_det.layers import (
    DownMobile,
    Former,
    FormerToMobile,
    LiteBottleneck,
    Mobile,
    MobileFormerBlock,
    MobileToFormer,
    padding_mask,
)

from ..modeling.reference_mobile_former import (
    Weights,
    down,
    former,
    former_to_mobile,
    lite,
    mobile_to_former,
    plain,
    randomise_,
)

SIZES = [(5, 4), (1, 1), (3, 7), (6, 2)]


def random(module: nn.Module) -> nn.Module:
    randomise_(module.double().eval())
    return module


def plain_mobile(channels: int, out: int) -> nn.Module:
    widths = {"in_channels": channels, "hidden": 18, "out_channels": out, "token_dim": 16}
    return random(Mobile(**widths, norm="BN"))


def down_mobile() -> nn.Module:
    widths = {"in_channels": 6, "hidden": 18, "out_channels": 8, "second_hidden": 24}
    return random(DownMobile(**widths, token_dim=16, norm="BN"))


def block(kind: str) -> nn.Module:
    if kind == "lite":
        return random(LiteBottleneck(in_channels=6, hidden=12, out_channels=6, norm="BN"))
    out = 8 if kind == "down" else 6
    whole = MobileFormerBlock(
        mobile=down_mobile() if kind == "down" else plain_mobile(6, 6),
        former=Former(token_dim=16),
        to_former=MobileToFormer(token_dim=16, channels=6),
        to_mobile=FormerToMobile(token_dim=16, channels=out),
    )
    return random(whole)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, 6, 7, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(2)).double()


def test_lite_bottleneck_equals_the_naive_loop_and_passes_the_tokens_on(
    x: Tensor, tokens: Tensor
) -> None:
    layer = block("lite")
    weights = Weights(layer)
    y, same_tokens = layer(x, tokens)
    assert_close(y, torch.stack([lite(weights, image, 12, 6) for image in x]))
    assert_close(same_tokens, tokens, rtol=0, atol=0)
    assert weights.names_read == set(weights.tensors)


@pytest.mark.parametrize("out", [6, 10], ids=["identity", "no identity"])
def test_mobile_equals_the_naive_loop(x: Tensor, tokens: Tensor, out: int) -> None:
    layer = plain_mobile(6, out)
    weights = Weights(layer)
    expected = [plain(weights, image, 18, out, z[0]) for image, z in zip(x, tokens, strict=True)]
    assert_close(layer(x, tokens[:, 0]), torch.stack(expected))
    assert weights.names_read == set(weights.tensors)


@pytest.mark.parametrize("size", [(6, 7), (1, 1)])
def test_down_mobile_equals_the_naive_loop(
    x: Tensor, tokens: Tensor, size: tuple[int, int]
) -> None:
    layer, x = down_mobile(), x[:, :, : size[0], : size[1]]
    weights = Weights(layer)
    expected = [down(weights, image, 18, 8, 24, z[0]) for image, z in zip(x, tokens, strict=True)]
    assert_close(layer(x, tokens[:, 0]), torch.stack(expected))
    assert weights.names_read == set(weights.tensors)


@pytest.mark.parametrize("kind", ["lite", "plain", "down"])
def test_a_padded_batch_gives_what_the_images_give_alone(
    x: Tensor, tokens: Tensor, kind: str
) -> None:
    layer = block(kind)
    padding = padding_mask(torch.tensor(SIZES), x.shape[-2:])
    y, z = layer(x.masked_fill(padding, 1e4), tokens, padding)
    for n, (height, width) in enumerate(SIZES):
        own = slice(n, n + 1)
        y_alone, z_alone = layer(x[own, :, :height, :width], tokens[own])
        assert_close(y[own, :, : y_alone.shape[2], : y_alone.shape[3]], y_alone)
        assert_close(z[own], z_alone)


def test_the_first_token_alone_drives_the_dynamic_relu(x: Tensor, tokens: Tensor) -> None:
    layer = block("plain")
    seen: list[Tensor] = []
    for name in ("expand_act", "depthwise_act"):
        getattr(layer.mobile, name).register_forward_hook(lambda _m, args, _o: seen.append(args[1]))
    updated = layer(x, tokens)[1]
    assert_close(seen[0], updated[:, 0])
    assert_close(seen[1], updated[:, 0])


@pytest.mark.parametrize(
    ("layer", "naive"),
    [
        (MobileToFormer(token_dim=16, channels=6), mobile_to_former),
        (FormerToMobile(token_dim=16, channels=6), former_to_mobile),
        (Former(token_dim=16), lambda w, x, z: former(w, z)),
    ],
    ids=["mobile to former", "former to mobile", "former"],
)
def test_the_token_side_equals_the_naive_loop(
    x: Tensor, tokens: Tensor, layer: nn.Module, naive: Callable[..., Tensor]
) -> None:
    weights = Weights(random(layer))
    expected = torch.stack([naive(weights, *pair) for pair in zip(x, tokens, strict=True)])
    arguments = {"MobileToFormer": (tokens, x), "FormerToMobile": (x, tokens)}
    assert_close(layer(*arguments.get(type(layer).__name__, (tokens,))), expected)
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
