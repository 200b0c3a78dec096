# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Mobile-Former a second time, as plainly as possible: the oracle of the encoder's tests.

One image at a time, every head in a loop, no module of the package; only the names of weights and
the table of widths are the package's. Slow and easy to check against the paper; evaluation mode
only. Letters: C, H, W a map, M tokens, D token width.
"""

import copy
import math

import torch
from torch.nn import functional as F


class Weights:
    """A module's tensors by name, which remember that they were read, and check every shape."""

    def __init__(self, module):
        state = module.state_dict().items()
        self.tensors = {name: value for name, value in state if value.is_floating_point()}
        self.names_read = set()
        self.prefix = ""

    def at(self, *parts):
        """The same tensors seen from one name further down."""
        child = copy.copy(self)
        child.prefix = self.prefix + "".join(f"{part}." for part in parts)
        return child

    def read(self, name, *shape):
        """Returns one tensor, which must have this shape."""
        full_name = self.prefix + name
        tensor = self.tensors[full_name]
        assert tuple(tensor.shape) == shape, f"{full_name}: {tuple(tensor.shape)}, not {shape}"
        self.names_read.add(full_name)
        return tensor


def randomise_(module, *, gain=1.2, seed=0):
    """Fills every parameter and statistic, so that nothing hides behind a zero or a one.

    Norm scales and variances lie in [0.5, 1.5]; other vectors, among them the means, have standard
    deviation 0.2; matrices and kernels multiply sizes by ``gain``; learned tokens and query
    positions are standard normal.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        if name.endswith(("tokens", "query_position.weight")):
            value = torch.randn(tensor.shape, generator=generator)
        elif tensor.ndim >= 2:
            noise = torch.randn(tensor.shape, generator=generator)
            value = noise * gain * (tensor.shape[0] / tensor.numel()) ** 0.5
        elif name.endswith(("weight", "running_var")):
            value = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            value = 0.2 * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(value)


def linear(w, u, out):
    return u @ w.read("weight", out, u.shape[-1]).T + w.read("bias", out)


def layer_norm(w, u):
    width = u.shape[-1]
    return F.layer_norm(u, (width,), w.read("weight", width), w.read("bias", width))


def batch_norm(w, x):
    """With the stored statistics; x is (C, H, W)."""
    names = ("running_mean", "running_var", "weight", "bias")
    return F.batch_norm(x[None], *(w.read(name, x.shape[0]) for name in names))[0]


def conv3x3(w, x, out, stride):
    return F.conv2d(x, w.read("weight", out, x.shape[0], 3, 3), None, stride, 1)


def depthwise3x3(w, x, out, stride):
    """Output channel o reads input channel o // (out / C) alone."""
    return F.conv2d(x, w.read("weight", out, 1, 3, 3), None, stride, 1, groups=x.shape[0])


def pointwise(w, x, out):
    return F.conv2d(x, w.read("weight", out, x.shape[0], 1, 1))


def dynamic_relu(w, x, driver):
    """max(a1 x, a2 x) per channel, with slopes computed from one vector."""
    channels = x.shape[0]
    hidden = F.relu(linear(w.at("squeeze"), driver, len(driver) // 4))
    theta = F.hardsigmoid(linear(w.at("slopes"), hidden, 2 * channels))
    a1 = 1 + 2 * (theta[:channels] - 0.5)
    a2 = 2 * (theta[channels:] - 0.5)
    return torch.maximum(a1[:, None, None] * x, a2[:, None, None] * x)


def attention(query, key, value, heads):
    """(A, E), (B, E), (B, E) -> (A, E): each head has its own slice of the channels."""
    width = query.shape[-1] // heads
    parts = []
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        scores = torch.einsum("ae,be->ab", query[:, own], key[:, own]) / math.sqrt(width)
        parts.append(torch.einsum("ab,be->ae", scores.softmax(dim=-1), value[:, own]))
    return torch.cat(parts, dim=-1)


def pixels(x):
    """(C, H, W) -> (HW, C), row by row."""
    return torch.stack([x[:, i, j] for i in range(x.shape[1]) for j in range(x.shape[2])])


def mobile_to_former(w, x, z):
    channels, token_dim = x.shape[0], z.shape[1]
    memory = pixels(x)
    read = attention(linear(w.at("query"), z, channels), memory, memory, heads=2)
    gate = 2 * F.hardsigmoid(linear(w.at("gate"), z, channels))
    return layer_norm(w.at("norm"), z + linear(w.at("project"), gate * read, token_dim))


def former(w, z):
    dim = z.shape[1]
    read = attention(linear(w.at("query"), z, dim), z, z, heads=4)
    z = layer_norm(w.at("attention_norm"), z + linear(w.at("project"), read, dim))
    hidden = F.gelu(linear(w.at("mlp", 0), z, 2 * dim))
    return layer_norm(w.at("mlp_norm"), z + linear(w.at("mlp", 2), hidden, dim))


def former_to_mobile(w, x, z):
    channels, height, width = x.shape
    key, value = linear(w.at("key"), z, channels), linear(w.at("value"), z, channels)
    read = attention(pixels(x), key, value, heads=2)
    return x + read.T.reshape(channels, height, width)


def pointwise_norm(w, x, out):
    return batch_norm(w.at("norm"), pointwise(w, x, out))


def depthwise_norm(w, x, out, stride=1):
    return batch_norm(w.at("norm"), depthwise3x3(w, x, out, stride))


def lite(w, x, hidden, out):
    u = F.relu6(depthwise_norm(w.at("depthwise"), x, hidden))
    return x + pointwise_norm(w.at("pointwise"), u, out)


def plain(w, x, hidden, out, driver):
    u = dynamic_relu(w.at("expand_act"), pointwise_norm(w.at("expand"), x, hidden), driver)
    u = dynamic_relu(w.at("depthwise_act"), depthwise_norm(w.at("depthwise"), u, hidden), driver)
    u = pointwise_norm(w.at("reduce"), u, out)
    return x + u if x.shape[0] == out else u


def down(w, x, hidden, out, hidden2, driver):
    u = dynamic_relu(w.at("down_act"), depthwise_norm(w.at("down"), x, hidden, 2), driver)
    y = pointwise_norm(w.at("down_reduce"), u, out)
    u = dynamic_relu(w.at("depthwise_act"), depthwise_norm(w.at("depthwise"), y, hidden2), driver)
    return y + pointwise_norm(w.at("reduce"), u, out)


def mobile_former(w, arch, image):
    """The encoder of one image (3, H, W): the last map of every stride, C16 and the tokens."""
    z = w.read("tokens", arch.num_tokens, arch.token_dim)
    stem = w.at("stem")
    x = F.relu6(batch_norm(stem.at("norm"), conv3x3(stem, image, arch.stem, stride=2)))
    stage, place, outputs = 0, -1, {}
    for spec in arch.blocks:
        stage, place = (stage + 1, 0) if spec.kind == "down" else (stage, place + 1)
        block = w.at("stages", stage, place)
        if spec.kind == "lite":
            x = lite(block, x, spec.hidden, spec.out)
        else:
            z = former(block.at("former"), mobile_to_former(block.at("mobile_to_former"), x, z))
            if spec.kind == "down":
                second = spec.second_hidden
                x = down(block.at("mobile"), x, spec.hidden, spec.out, second, z[0])
            else:
                x = plain(block.at("mobile"), x, spec.hidden, spec.out, z[0])
            x = former_to_mobile(block.at("former_to_mobile"), x, z)
        outputs[f"s{2 ** (stage + 1)}"] = x
    x = F.relu6(pointwise_norm(w.at("expand"), x, arch.expanded))
    return {**outputs, "s16_expanded": x, "tokens": z}
