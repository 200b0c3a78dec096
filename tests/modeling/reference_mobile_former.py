# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former a second time, as plainly as possible: the oracle of the encoder's tests.

One image at a time, every head and every kernel tap in a loop, no module of the package and no
layer of PyTorch. Slow and easy to check against the paper; evaluation mode only. Letters:
C, H, W a map, M tokens, D token width.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class Weights:
    """Named tensors that remember which of them were read, and check every shape."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.names_read: set[str] = set()
        self.prefix = ""

    def at(self, *parts: object) -> "Weights":
        """The same tensors seen from one name further down."""
        child = object.__new__(type(self))
        child.__dict__.update(self.__dict__)
        child.prefix = self.prefix + "".join(f"{part}." for part in parts)
        return child

    def read(self, name: str, *shape: int) -> Tensor:
        """Returns one tensor, which must have this shape."""
        full_name = self.prefix + name
        tensor = self.tensors[full_name]
        assert tuple(tensor.shape) == shape, f"{full_name}: {tuple(tensor.shape)}, not {shape}"
        self.names_read.add(full_name)
        return tensor


@dataclass(frozen=True)
class Plan:
    """Widths of one variant; a block is (kind, hidden, out, second hidden)."""

    token_dim: int
    stem: int
    blocks: tuple[tuple[str, int, int, int], ...]
    expanded: int


PLANS = {
    "3.7G": Plan(
        256,
        64,
        (
            ("lite", 128, 64, 0),
            ("down", 384, 112, 448),
            ("plain", 336, 112, 0),
            ("down", 672, 192, 576),
            ("plain", 576, 192, 0),
            ("plain", 576, 192, 0),
            ("down", 1152, 352, 1408),
            ("plain", 1408, 352, 0),
            ("plain", 1408, 352, 0),
            ("plain", 2112, 480, 0),
            ("plain", 2880, 480, 0),
            ("plain", 2880, 480, 0),
        ),
        2880,
    ),
    "1.0G": Plan(
        256,
        32,
        (
            ("lite", 64, 32, 0),
            ("down", 192, 56, 224),
            ("plain", 168, 56, 0),
            ("down", 336, 96, 288),
            ("plain", 288, 96, 0),
            ("plain", 288, 96, 0),
            ("down", 576, 176, 704),
            ("plain", 704, 176, 0),
            ("plain", 704, 176, 0),
            ("plain", 1056, 240, 0),
            ("plain", 1440, 240, 0),
            ("plain", 1440, 240, 0),
        ),
        1440,
    ),
    "285M": Plan(
        192,
        16,
        (
            ("lite", 32, 16, 0),
            ("down", 96, 28, 112),
            ("plain", 84, 28, 0),
            ("down", 168, 48, 144),
            ("plain", 144, 48, 0),
            ("plain", 144, 48, 0),
            ("down", 240, 80, 320),
            ("plain", 320, 88, 0),
            ("plain", 480, 88, 0),
            ("plain", 528, 120, 0),
            ("plain", 720, 120, 0),
            ("plain", 720, 120, 0),
        ),
        720,
    ),
}


def relu(u: Tensor) -> Tensor:
    return torch.where(u > 0, u, torch.zeros_like(u))


def relu6(u: Tensor) -> Tensor:
    return torch.where(u > 6, torch.full_like(u, 6.0), relu(u))


def hard_sigmoid(u: Tensor) -> Tensor:
    return relu6(u + 3) / 6


def gelu(u: Tensor) -> Tensor:
    return u * (1 + torch.erf(u / math.sqrt(2))) / 2


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis."""
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return powers / powers.sum(dim=-1, keepdim=True)


def linear(w: Weights, u: Tensor, out: int) -> Tensor:
    return torch.einsum("...i,oi->...o", u, w.read("weight", out, u.shape[-1])) + w.read(
        "bias", out
    )


def layer_norm(w: Weights, u: Tensor) -> Tensor:
    width = u.shape[-1]
    mean = u.sum(dim=-1, keepdim=True) / width
    variance = ((u - mean) ** 2).sum(dim=-1, keepdim=True) / width
    return (u - mean) / torch.sqrt(variance + 1e-5) * w.read("weight", width) + w.read(
        "bias", width
    )


def batch_norm(w: Weights, x: Tensor) -> Tensor:
    """With the stored statistics; x is (C, H, W)."""
    channels = x.shape[0]
    columns = [
        w.read(name, channels)[:, None, None]
        for name in ("weight", "bias", "running_mean", "running_var")
    ]
    weight, bias, mean, variance = columns
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def taps(x: Tensor, stride: int) -> Iterable[tuple[int, int, Tensor]]:
    """The nine shifted copies of (C, H, W) that a 3x3 kernel with a border of zeros sees."""
    channels, height, width = x.shape
    bordered = x.new_zeros(channels, height + 2, width + 2)
    bordered[:, 1:-1, 1:-1] = x
    for row in range(3):
        for column in range(3):
            shifted = bordered[:, row : row + height : stride, column : column + width : stride]
            yield row, column, shifted


def conv3x3(w: Weights, x: Tensor, out: int, stride: int) -> Tensor:
    kernel = w.read("weight", out, x.shape[0], 3, 3)
    return sum(
        torch.einsum("oi,ihw->ohw", kernel[:, :, row, column], shifted)
        for row, column, shifted in taps(x, stride)
    )


def depthwise3x3(w: Weights, x: Tensor, out: int, stride: int) -> Tensor:
    """Output channel o reads input channel o // (out / C) alone."""
    repeats = out // x.shape[0]
    assert repeats * x.shape[0] == out
    kernel = w.read("weight", out, 1, 3, 3)
    source = [channel // repeats for channel in range(out)]
    return sum(
        kernel[:, 0, row, column, None, None] * shifted[source]
        for row, column, shifted in taps(x, stride)
    )


def pointwise(w: Weights, x: Tensor, out: int) -> Tensor:
    return torch.einsum("oi,ihw->ohw", w.read("weight", out, x.shape[0], 1, 1)[:, :, 0, 0], x)


def dynamic_relu(w: Weights, x: Tensor, driver: Tensor) -> Tensor:
    """max(a1 x, a2 x) per channel, with slopes computed from one vector."""
    channels = x.shape[0]
    theta = hard_sigmoid(
        linear(w.at("expand"), relu(linear(w.at("reduce"), driver, len(driver) // 4)), 2 * channels)
    )
    a1 = 1 + 2 * (theta[:channels] - 0.5)
    a2 = 2 * (theta[channels:] - 0.5)
    return torch.maximum(a1[:, None, None] * x, a2[:, None, None] * x)


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """(A, E), (B, E), (B, E) -> (A, E): each head has its own slice of the channels."""
    width = query.shape[-1] // heads
    parts = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        scores = torch.einsum("ae,be->ab", query[:, own], key[:, own]) / math.sqrt(width)
        parts.append(torch.einsum("ab,be->ae", softmax(scores), value[:, own]))
    return torch.cat(parts, dim=-1)


def pixels(x: Tensor) -> Tensor:
    """(C, H, W) -> (HW, C), row by row."""
    return torch.stack([x[:, i, j] for i in range(x.shape[1]) for j in range(x.shape[2])])


def mobile_to_former(w: Weights, x: Tensor, z: Tensor) -> Tensor:
    channels, token_dim = x.shape[0], z.shape[1]
    memory = pixels(x)
    read = attention(linear(w.at("query"), z, channels), memory, memory, heads=2)
    gate = 2 * hard_sigmoid(linear(w.at("gate"), z, channels))
    return layer_norm(w.at("norm"), z + linear(w.at("out"), gate * read, token_dim))


def former(w: Weights, z: Tensor) -> Tensor:
    dim = z.shape[1]
    read = attention(linear(w.at("query"), z, dim), z, z, heads=4)
    z = layer_norm(w.at("norm1"), z + linear(w.at("out"), read, dim))
    hidden = gelu(linear(w.at("fc1"), z, 2 * dim))
    return layer_norm(w.at("norm2"), z + linear(w.at("fc2"), hidden, dim))


def former_to_mobile(w: Weights, x: Tensor, z: Tensor) -> Tensor:
    channels, height, width = x.shape
    key, value = linear(w.at("key"), z, channels), linear(w.at("value"), z, channels)
    read = attention(pixels(x), key, value, heads=2)
    return x + read.T.reshape(channels, height, width)


def lite(w: Weights, x: Tensor, hidden: int, out: int) -> Tensor:
    u = relu6(batch_norm(w.at("bn1"), depthwise3x3(w.at("dw"), x, hidden, stride=1)))
    return x + batch_norm(w.at("bn2"), pointwise(w.at("pw"), u, out))


def plain(w: Weights, x: Tensor, hidden: int, out: int, driver: Tensor) -> Tensor:
    u = batch_norm(w.at("bn1"), pointwise(w.at("pw1"), x, hidden))
    u = dynamic_relu(w.at("act1"), u, driver)
    u = batch_norm(w.at("bn2"), depthwise3x3(w.at("dw"), u, hidden, stride=1))
    u = dynamic_relu(w.at("act2"), u, driver)
    u = batch_norm(w.at("bn3"), pointwise(w.at("pw2"), u, out))
    return x + u if x.shape[0] == out else u


def down(w: Weights, x: Tensor, hidden: int, out: int, hidden2: int, driver: Tensor) -> Tensor:
    u = batch_norm(w.at("bn1"), depthwise3x3(w.at("dw1"), x, hidden, stride=2))
    u = dynamic_relu(w.at("act1"), u, driver)
    y = batch_norm(w.at("bn2"), pointwise(w.at("pw1"), u, out))
    u = batch_norm(w.at("bn3"), depthwise3x3(w.at("dw2"), y, hidden2, stride=1))
    u = dynamic_relu(w.at("act2"), u, driver)
    return y + batch_norm(w.at("bn4"), pointwise(w.at("pw2"), u, out))


def mobile_former(w: Weights, plan: Plan, image: Tensor) -> dict[str, Tensor]:
    """The encoder of one image (3, H, W): the last map of every stride, C16 and the tokens."""
    z = w.read("tokens", 6, plan.token_dim)
    stem = w.at("stem")
    x = relu6(batch_norm(stem.at("bn"), conv3x3(stem.at("conv"), image, plan.stem, stride=2)))
    stride, outputs = 2, {}
    for number, (kind, hidden, out, hidden2) in enumerate(plan.blocks, start=1):
        block = w.at("block", number)
        mobile = block.at("mobile")
        if kind == "lite":
            x = lite(mobile, x, hidden, out)
        else:
            z = former(block.at("former"), mobile_to_former(block.at("to_former"), x, z))
            if kind == "down":
                x, stride = down(mobile, x, hidden, out, hidden2, z[0]), stride * 2
            else:
                x = plain(mobile, x, hidden, out, z[0])
            x = former_to_mobile(block.at("to_mobile"), x, z)
        outputs[f"s{stride}"] = x
    last = w.at("expand")
    x = relu6(batch_norm(last.at("bn"), pointwise(last.at("conv"), x, plan.expanded)))
    return {**outputs, "s16_expanded": x, "tokens": z}
