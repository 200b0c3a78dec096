# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The MF-DETR decoder a second time, as plainly as possible: the oracle of its tests.

One unpadded image, evaluation mode. Letters: C, H, W a map, Q queries, d width of the decoder,
f query features and p query positions (Q, d), x a map (d, H, W), e its position code (HW, d).
"""

import math

import torch
from torch import Tensor

from .reference_mobile_former import (
    Weights,
    attention,
    batch_norm,
    depthwise3x3,
    dynamic_relu,
    layer_norm,
    linear,
    pixels,
    pointwise,
    relu,
    relu6,
)


def sine_code(height: int, width: int, dim: int) -> Tensor:
    """(dim, H, W), float64: dim/2 channels of y, then dim/2 of x; even sine, odd cosine."""
    half = dim // 2
    code = torch.zeros(dim, height, width, dtype=torch.float64)
    for i in range(height):
        for j in range(width):
            y = (i + 1) / (height + 1e-6) * 2 * math.pi
            x = (j + 1) / (width + 1e-6) * 2 * math.pi
            for pair in range(half // 2):
                period = 10000.0 ** (2 * pair / half)
                code[2 * pair, i, j] = math.sin(y / period)
                code[2 * pair + 1, i, j] = math.cos(y / period)
                code[half + 2 * pair, i, j] = math.sin(x / period)
                code[half + 2 * pair + 1, i, j] = math.cos(x / period)
    return code


def bilinear(x: Tensor, height: int, width: int) -> Tensor:
    """Resize (C, H, W); pixel centres at half-integers, border pixels repeated outwards."""

    def neighbours(index: int, size_in: int, size_out: int) -> tuple[int, int, float]:
        centre = max((index + 0.5) * size_in / size_out - 0.5, 0.0)
        low = min(int(centre), size_in - 1)
        return low, min(low + 1, size_in - 1), centre - low

    resized = x.new_zeros(x.shape[0], height, width)
    for i in range(height):
        top, bottom, down = neighbours(i, x.shape[1], height)
        for j in range(width):
            left, right, across = neighbours(j, x.shape[2], width)
            upper = (1 - across) * x[:, top, left] + across * x[:, top, right]
            lower = (1 - across) * x[:, bottom, left] + across * x[:, bottom, right]
            resized[:, i, j] = (1 - down) * upper + down * lower
    return resized


def group_norm(w: Weights, x: Tensor, groups: int) -> Tensor:
    channels = x.shape[0]
    size = channels // groups
    parts = []
    for start in range(0, channels, size):
        part = x[start : start + size]
        mean = part.mean()
        parts.append((part - mean) / torch.sqrt(((part - mean) ** 2).mean() + 1e-5))
    weight, bias = w.read("weight", channels), w.read("bias", channels)
    return torch.cat(parts) * weight[:, None, None] + bias[:, None, None]


def multi_head(w: Weights, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    dim = query.shape[-1]
    read = attention(
        linear(w.at("query"), query, dim),
        linear(w.at("key"), key, dim),
        linear(w.at("value"), value, dim),
        heads,
    )
    return linear(w.at("out"), read, dim)


def feed_forward(w: Weights, u: Tensor, hidden: int) -> Tensor:
    return linear(w.at("fc2"), relu(linear(w.at("fc1"), u, hidden)), u.shape[-1])


def as_map(rows: Tensor, like: Tensor) -> Tensor:
    """(HW, d) -> (d, H, W)."""
    return rows.T.reshape(like.shape)


def down_conv(w: Weights, c16: Tensor, dim: int) -> Tensor:
    u = depthwise3x3(w.at("dw"), c16, c16.shape[0], stride=2)
    u = relu6(batch_norm(w.at("bn1"), u))
    return batch_norm(w.at("bn2"), pointwise(w.at("pw"), u, dim))


def up_conv(w: Weights, x: Tensor, lateral: Tensor) -> Tensor:
    dim = x.shape[0]
    u = bilinear(x, lateral.shape[1], lateral.shape[2])
    u = relu6(batch_norm(w.at("bn1"), depthwise3x3(w.at("dw"), u, dim, stride=1)))
    u = batch_norm(w.at("bn2"), pointwise(w.at("pw"), u, dim))
    side = pointwise(w.at("lateral"), lateral, dim)
    side = side + w.at("lateral").read("bias", dim)[:, None, None]
    return u + group_norm(w.at("lateral_norm"), side, groups=32)


def query_side(
    w: Weights, f: Tensor, p: Tensor, x: Tensor, e: Tensor, heads: int, hidden: int
) -> tuple[Tensor, Tensor]:
    """Position adaptation, cross-attention, self-attention, feed-forward; post-norm."""
    p = p + feed_forward(w.at("position"), f, f.shape[1])
    memory = pixels(x)
    read = multi_head(w.at("cross"), f + p, memory + e, memory, heads)
    f = layer_norm(w.at("cross_norm"), f + read)
    f = layer_norm(w.at("self_norm"), f + multi_head(w.at("self"), f + p, f + p, f, heads))
    f = layer_norm(w.at("ffn_norm"), f + feed_forward(w.at("ffn"), f, hidden))
    return f, p


def encoder_layer(w: Weights, x: Tensor, e: Tensor, heads: int, hidden: int) -> Tensor:
    rows = pixels(x)
    read = multi_head(w.at("self"), rows + e, rows + e, rows, heads)
    rows = layer_norm(w.at("self_norm"), rows + read)
    rows = layer_norm(w.at("ffn_norm"), rows + feed_forward(w.at("ffn"), rows, hidden))
    return as_map(rows, x)


def lite_bottleneck(w: Weights, x: Tensor, f: Tensor, expansion: int) -> Tensor:
    u = depthwise3x3(w.at("dw"), x, expansion * x.shape[0], stride=1)
    return x + pointwise(w.at("pw"), dynamic_relu(w.at("act"), u, f[0]), x.shape[0])


def queries_to_map(w: Weights, x: Tensor, e: Tensor, f: Tensor, p: Tensor, heads: int) -> Tensor:
    dim = f.shape[1]
    key, value = linear(w.at("key"), f + p, dim), linear(w.at("value"), f, dim)
    return x + as_map(attention(pixels(x) + e, key, value, heads), x)


def predict(w: Weights, f: Tensor, classes: int) -> dict[str, Tensor]:
    """Logits of the classes and of "no object", and boxes (cxcywh in [0, 1])."""
    dim = f.shape[1]
    u = relu(linear(w.at("box", 1), f, dim))
    u = relu(linear(w.at("box", 2), u, dim))
    boxes = 1 / (1 + torch.exp(-linear(w.at("box", 3), u, 4)))
    return {"pred_logits": linear(w.at("class"), f, classes + 1), "pred_boxes": boxes}


def mf_decoder(
    w: Weights,
    c8: Tensor,
    c16: Tensor,
    blocks: tuple[int, int, int],
    classes: int,
    *,
    queries: int = 100,
    dim: int = 256,
    heads: int = 8,
    hidden: int = 1024,
    expansion: int = 6,
) -> list[dict[str, Tensor]]:
    """Predictions after every block, first to last; ``blocks`` at strides 32, 16 and 8."""
    p = w.read("queries", queries, dim)
    f = torch.zeros_like(p)
    x = down_conv(w.at("down"), c16, dim)
    predictions = []
    for level, count in enumerate(blocks):
        if level > 0:
            x = up_conv(w.at("up", level), x, (c16, c8)[level - 1])
        e = pixels(sine_code(x.shape[1], x.shape[2], dim).to(x))
        for number in range(count):
            block = w.at("level", level, number)
            f, p = query_side(block, f, p, x, e, heads, hidden)
            predictions.append(predict(w, f, classes))
            if len(predictions) == sum(blocks):
                break
            if level == 0:
                x = encoder_layer(block.at("mobile"), x, e, heads, hidden)
            else:
                x = lite_bottleneck(block.at("mobile"), x, f, expansion)
            x = queries_to_map(block.at("to_map"), x, e, f, p, heads)
    return predictions
