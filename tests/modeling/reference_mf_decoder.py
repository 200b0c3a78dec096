# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The MF-DETR decoder a second time, as plainly as possible: the oracle of its tests.

One unpadded image, evaluation mode. Letters: C, H, W a map, Q queries, d width of the decoder,
f query features and p query positions (Q, d), x a map (d, H, W), e its position code (HW, d).
"""

import math

import torch
from torch.nn import functional as F

from .reference_mobile_former import (
    attention,
    depthwise3x3,
    depthwise_norm,
    dynamic_relu,
    layer_norm,
    linear,
    pixels,
    pointwise,
    pointwise_norm,
)


def sine_code(height, width, dim):
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


def bilinear(x, size):
    return F.interpolate(x[None], size=tuple(size), mode="bilinear", align_corners=False)[0]


def multi_head(w, query, key, value, heads):
    dim = query.shape[-1]
    weights = w.read("in_proj_weight", 3 * dim, dim).chunk(3)
    biases = w.read("in_proj_bias", 3 * dim).chunk(3)
    projected = [
        torch.einsum("li,oi->lo", rows, weight) + bias
        for rows, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
    return linear(w.at("out_proj"), attention(*projected, heads), dim)


def feed_forward(w, u, hidden, last=3):
    return linear(w.at(last), F.relu(linear(w.at(0), u, hidden)), u.shape[-1])


def as_map(rows, like):
    """(HW, d) -> (d, H, W)."""
    return rows.T.reshape(like.shape)


def separable(w, x, dim, stride=1):
    u = F.relu6(depthwise_norm(w.at("depthwise"), x, x.shape[0], stride))
    return pointwise_norm(w.at("pointwise"), u, dim)


def up_conv(w, level, x, backbone_map):
    dim = x.shape[0]
    u = separable(w.at("up", level), bilinear(x, backbone_map.shape[1:]), dim)
    lateral = w.at("laterals", level)
    side = pointwise(lateral.at("conv"), backbone_map, dim)
    side = side + lateral.at("conv").read("bias", dim)[:, None, None]
    norm = lateral.at("norm").read("weight", dim), lateral.at("norm").read("bias", dim)
    return u + F.group_norm(side[None], 32, *norm)[0]


def query_side(w, f, p, x, e, heads, hidden):
    """Position adaptation, cross-attention, self-attention, feed-forward; post-norm."""
    p = p + feed_forward(w.at("adapt_position"), f, f.shape[1], last=2)
    memory = pixels(x)
    read = multi_head(w.at("cross_attention"), f + p, memory + e, memory, heads)
    f = layer_norm(w.at("cross_norm"), f + read)
    read = multi_head(w.at("self_attention"), f + p, f + p, f, heads)
    f = layer_norm(w.at("self_norm"), f + read)
    f = layer_norm(w.at("feed_forward_norm"), f + feed_forward(w.at("feed_forward"), f, hidden))
    return f, p


def encoder_layer(w, x, e, heads, hidden):
    rows = pixels(x)
    read = multi_head(w.at("attention"), rows + e, rows + e, rows, heads)
    rows = layer_norm(w.at("attention_norm"), rows + read)
    read = feed_forward(w.at("feed_forward"), rows, hidden)
    return as_map(layer_norm(w.at("feed_forward_norm"), rows + read), x)


def lite_bottleneck(w, x, f, expansion):
    u = depthwise3x3(w.at("depthwise"), x, expansion * x.shape[0], stride=1)
    return x + pointwise(w.at("pointwise"), dynamic_relu(w.at("act"), u, f[0]), x.shape[0])


def queries_to_map(w, x, e, f, p, heads):
    dim = f.shape[1]
    key, value = linear(w.at("key"), f + p, dim), linear(w.at("value"), f, dim)
    return x + as_map(attention(pixels(x) + e, key, value, heads), x)


def predict(w, f, classes):
    """Logits of the classes and of "no object", and boxes (cxcywh in [0, 1])."""
    dim = f.shape[1]
    box = w.at("bbox_embed")
    u = F.relu(linear(box.at("hidden", 0), f, dim))
    u = F.relu(linear(box.at("hidden", 1), u, dim))
    boxes = 1 / (1 + torch.exp(-linear(box.at("last"), u, 4)))
    return {"pred_logits": linear(w.at("class_embed"), f, classes + 1), "pred_boxes": boxes}


def mf_decoder(
    w, c8, c16, blocks, classes, *, queries=100, dim=256, heads=8, hidden=1024, expansion=6
):
    """Predictions after every block, first to last; ``blocks`` at strides 32, 16 and 8."""
    p = w.read("query_position.weight", queries, dim)
    f = torch.zeros_like(p)
    x = separable(w.at("down"), c16, dim, stride=2)
    predictions = []
    for level, count in enumerate(blocks):
        if level > 0:
            x = up_conv(w, level - 1, x, (c16, c8)[level - 1])
        e = pixels(sine_code(x.shape[1], x.shape[2], dim).to(x))
        for number in range(count):
            block = w.at("levels", level, number)
            f, p = query_side(block.at("query_layer"), f, p, x, e, heads, hidden)
            predictions.append(predict(w, f, classes))
            if len(predictions) == sum(blocks):
                break
            if level == 0:
                x = encoder_layer(block.at("mobile"), x, e, heads, hidden)
            else:
                x = lite_bottleneck(block.at("mobile"), x, f, expansion)
            x = queries_to_map(block.at("query_to_map"), x, e, f, p, heads)
    return predictions
