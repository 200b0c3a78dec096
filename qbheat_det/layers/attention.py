# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Multi-head attention between a few queries and a large feature map, or vice versa.

``attend`` uses PyTorch's ``scaled_dot_product_attention`` if it has a fast kernel. On CPUs, PyTorch
has no fused kernel with dropout, and in bfloat16 the kernel's backward pass takes up to ten times
as long as matrix products. In these two cases, ``attend`` uses matrix products.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .cpu_kernels import draw_kept, exported_form, is_half_program, is_recorded, linear, rounded
from .mobile_former_block import FormerToMobile, MobileToFormer, Watcher

_PART = 1 << 20  # number of attention weights computed at a time (4 MiB in float32)
_MOST = 1 << 25  # maximum number of weights per image for matrix products in bfloat16


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masked: Tensor | None = None,
    dropout: float = 0.0,
    fused: bool = False,
) -> Tensor:
    """Computes multi-head attention by the implementation that is fastest on the device.

    Args:
        query: (N, heads, Q, d).
        key: (N, heads, L, d).
        value: (N, heads, L, d).
        masked: broadcastable to (N, heads, Q, L), True if a query may not attend to a key. Each
            query must attend to at least one key.
        dropout: probability, in [0, 1), of dropping a weight. Rounded to 16 bits on CPUs.
        fused: whether to use PyTorch's kernel also when compiling or exporting. Set it if the
            attention matrix (Q, L) is too large to store, as in self-attention over all positions
            of a feature map.

    Returns:
        The weighted values (N, Q, heads * d).
    """
    on_cpu = query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64)
    is_half = query.device.type == "cpu" and query.dtype == torch.bfloat16
    if is_half_program() or (is_half and not is_recorded()):
        most = _MOST if is_half_program() else _PART  # the backward pass needs the weights
        is_plain = query.shape[1] * query.shape[2] * key.shape[2] <= most
    elif on_cpu and dropout and not is_recorded():
        kept = draw_kept((*query.shape[:3], key.shape[2]), dropout)
        return _AttendInParts.apply(query, key, value, masked, kept, 1 - rounded(dropout))
    else:
        is_plain = on_cpu and is_recorded() and not (fused and not dropout)
    if not is_plain:
        seen = None if masked is None else ~masked
        attended = F.scaled_dot_product_attention(query, key, value, seen, dropout)
    else:
        if is_half_program():
            key, value = key.contiguous(), value.contiguous()
        attended = F.dropout(_attention_weights(query, key, masked), dropout) @ value
    return attended.transpose(1, 2).flatten(2)


def _attention_weights(query: Tensor, key: Tensor, masked: Tensor | None) -> Tensor:
    """Returns the attention weights (…, Q, L) by the plain formula, which compilers optimize."""
    logits = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if masked is not None:
        logits = logits.masked_fill(masked, float("-inf"))
    return logits.softmax(dim=-1)


class _AttendInParts(torch.autograd.Function):
    """Attention with dropout by matrix products, for some heads of an image at a time.

    The weights of these heads fit into the CPU cache. The backward pass recomputes them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masked: Tensor | None,
        kept: Tensor,
        share: float,
    ) -> Tensor:
        num_images, num_heads, num_queries, width = query.shape
        out = query.new_empty(num_images, num_queries, num_heads, width)
        shape = (num_images, num_heads, num_queries, key.shape[2])
        masked = None if masked is None else masked.expand(shape)
        for part in _parts(shape):
            mask = None if masked is None else masked[part]
            weights = _attention_weights(query[part], key[part], mask)
            found = torch.bmm(weights.mul_(kept[part]), value[part])
            out.transpose(1, 2)[part] = found.div_(share)
        ctx.save_for_backward(query, key, value, masked, kept, out)
        ctx.share = share
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, masked, kept, out = ctx.saved_tensors
        arrived = gradient.view_as(out).transpose(1, 2)
        # The backward pass of softmax subtracts this mean, which is computed from the output.
        mean = (gradient.view_as(out) * out).sum(dim=-1, keepdim=True).transpose(1, 2)
        grads = [_empty_by_rows(each) for each in (query, key, value)]
        for part in _parts((*query.shape[:3], key.shape[2])):
            mask = None if masked is None else masked[part]
            weights = _attention_weights(query[part], key[part], mask)
            above = arrived[part] / ctx.share
            inner = torch.bmm(above, value[part].transpose(1, 2)).mul_(kept[part])
            inner.sub_(mean[part]).mul_(weights)
            grads[2][part] = torch.bmm(weights.mul_(kept[part]).transpose(1, 2), above)
            scale = query.shape[-1] ** -0.5
            grads[0][part] = torch.bmm(inner, key[part]).mul_(scale)
            grads[1][part] = torch.bmm(inner.transpose(1, 2), query[part]).mul_(scale)
        return *grads, None, None, None


def _parts(shape: tuple[int, int, int, int]) -> Iterator[tuple[int, slice]]:
    num_images, num_heads, num_queries, num_keys = shape
    step = max(1, min(num_heads, _PART // max(1, num_queries * num_keys)))
    for image in range(num_images):
        for head in range(0, num_heads, step):
            yield image, slice(head, head + step)


def _empty_by_rows(like: Tensor) -> Tensor:
    """Returns an empty (N, heads, length, d) in the memory layout of (N, length, heads, d)."""
    num_images, num_heads, length, width = like.shape
    return like.new_empty(num_images, length, num_heads, width).transpose(1, 2)


class MapAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` for inputs (N, length, C), which calls ``attend``."""

    def __init__(
        self, *, dim: int, num_heads: int, dropout: float = 0.0, fused: bool = False
    ) -> None:
        """Takes the width C, divisible by ``num_heads``. For the rest, see ``attend``."""
        super().__init__(dim, num_heads, dropout=dropout, batch_first=True)
        self.fused = fused
        self.watchers: list[Watcher] = []

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Takes queries (N, Q, C), keys and values (N, L, C). Returns (N, Q, C).

        ``key_padding_mask`` (N, L) is True at keys that all queries ignore.
        """
        if self.watchers:
            found, weights = super().forward(
                query, key, value, key_padding_mask, average_attn_weights=False
            )
            for watch in self.watchers:
                watch(cast(Tensor, weights))
            return found
        masked = None if key_padding_mask is None else key_padding_mask[:, None, None]
        if exported_form.get() == "int8" and not self.fused:
            return self._attend_in_int8(query, key, value, masked)
        assert self.in_proj_weight is not None, "keys and values are as wide as the queries"
        layers = zip(self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        heads = (
            linear(x, *layer).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for x, layer in zip((query, key, value), layers, strict=True)
        )
        dropout = self.dropout if self.training else 0.0
        attended = attend(*heads, masked=masked, dropout=dropout, fused=self.fused)
        return linear(attended, self.out_proj.weight, self.out_proj.bias)

    def _attend_in_int8(
        self, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None
    ) -> Tensor:
        """Attention for INT8 files. Convolutions, which are quantized, project keys and values."""
        weights = self.in_proj_weight.chunk(3)
        query_bias, _, value_bias = self.in_proj_bias.chunk(3)
        heads = self.num_heads, -1
        query = F.linear(query, weights[0], query_bias).unflatten(2, heads).transpose(1, 2)
        # Softmax is invariant to the bias of keys. The bias of values is added to the result.
        maps = (x.transpose(1, 2)[..., None] for x in (key, value))  # (N, C, L, 1)
        keys, values = (
            F.conv2d(x, weight[:, :, None, None]).squeeze(3).unflatten(1, heads)
            for x, weight in zip(maps, weights[1:], strict=True)
        )
        logits = (query * query.shape[-1] ** -0.5) @ keys
        if masked is not None:
            logits = logits.masked_fill(masked, float("-inf"))
        attended = logits.softmax(dim=-1) @ values.transpose(2, 3)
        attended = attended.transpose(1, 2).flatten(2) + value_bias
        return F.linear(attended, self.out_proj.weight, self.out_proj.bias)


AttentionRecord = dict[str, list[Tensor]]
"""Detached attention weights by layer name, one tensor per call of the layer.

``MobileToFormer``: (N, heads, M, H, W), which sum to 1 over pixels. ``FormerToMobile``: (N, heads,
M, H, W), which sum to 1 over tokens. ``MapAttention``: (N, heads, queries, keys), which sum to 1
over keys. The weights of masked keys are 0.
"""


@contextmanager
def read_attention(
    model: nn.Module, names: Collection[str] | None = None
) -> Iterator[AttentionRecord]:
    """Records the attention weights of all layers of ``model``, or of the layers in ``names``.

    While recording, outputs of ``MapAttention`` change by rounding errors. Outputs of all other
    layers do not change. Contexts may be nested. In training, the weights of ``MapAttention`` are
    recorded after dropout.
    """
    record: AttentionRecord = {}
    with ExitStack() as undo:
        for name, module in model.named_modules():
            watched = isinstance(module, MobileToFormer | FormerToMobile | MapAttention)
            if watched and (names is None or name in names):

                def watch(weights: Tensor, name: str = name) -> None:
                    record.setdefault(name, []).append(weights.detach())

                module.watchers.append(watch)
                undo.callback(module.watchers.remove, watch)
        yield record
