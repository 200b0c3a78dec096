# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recording of attention weights during a model's own forward pass.

The bridges hand the weights that they compute anyway to ``watchers``; hooks make other layers
compute their weights instead of using a fused kernel. Both are removed when the ``with`` block
ends.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .mobile_former_block import FormerToMobile, MobileToFormer


@dataclass(frozen=True)
class AttentionWeights:
    """Attention weights of one call of a layer, detached, on the model's device.

    Attributes:
        weights: of ``MobileToFormer`` (N, heads, M, HW), which sum to 1 over the pixels; of
            ``FormerToMobile`` also (N, heads, M, HW), which sum to 1 over the tokens; of any other
            layer (N, heads, queries, keys), which sum to 1 over the keys. Masked keys have 0.
        size: (H, W) of the map whose pixels are the last axis, row by row; None for layers other
            than the two bridges.
    """

    weights: Tensor
    size: tuple[int, int] | None = None

    def unflatten(self, size: tuple[int, int] | None = None) -> Tensor:
        """Returns the weights as maps, (N, heads, rows, H, W).

        Raises:
            ValueError: neither ``size`` nor ``self.size`` is set.
        """
        size = self.size or size
        if size is None:
            raise ValueError("these weights are over a sequence: pass the (H, W) of its map")
        return self.weights.unflatten(-1, size)


AttentionRecord = dict[str, list[AttentionWeights]]
"""Weights of each layer's calls, in order, by its name in the model."""


@contextmanager
def read_attention(
    model: nn.Module, names: Collection[str] | None = None
) -> Iterator[AttentionRecord]:
    """Records the attention weights of all calls of ``model`` within the block.

    Recorded are the two bridges, ``torch.nn.MultiheadAttention`` and the attention of timm's vision
    transformers. Outputs do not change: the bridges' to the bit, the others' up to rounding, since
    they otherwise use PyTorch's fused kernel. Blocks may be nested. In training, the weights of
    MultiheadAttention are those after dropout.

    Args:
        model: any module.
        names: of the layers to record, as in ``model.named_modules()``; all of them if None.

    Yields:
        A record that calls of the model add to; layers that were not called are not in it.

    Raises:
        ValueError: one of ``names`` is no attention layer of the model.
    """
    readers = {name: m for name, m in model.named_modules() if _find_reader(m) is not None}
    if unknown := sorted(set(names or ()) - set(readers)):
        raise ValueError(f"{unknown} are no attention layers; there are {sorted(readers)}")
    record: AttentionRecord = {}
    with ExitStack() as undo:
        for name, module in readers.items():
            if names is not None and name not in names:
                continue

            def note(
                weights: Tensor, size: tuple[int, int] | None = None, name: str = name
            ) -> None:
                read = AttentionWeights(weights.detach(), size)
                record.setdefault(name, []).append(read)

            reader = _find_reader(module)
            assert reader is not None
            reader(module, note, undo)
        yield record


_Note = Callable[..., None]
_Reader = Callable[[Any, _Note, ExitStack], None]


def _find_reader(module: nn.Module) -> _Reader | None:
    if isinstance(module, MobileToFormer | FormerToMobile):
        return _read_bridge
    if isinstance(module, nn.MultiheadAttention):
        return _read_multihead
    # timm has several classes with these attributes, in modules that depend on its version.
    drop = getattr(module, "attn_drop", None)
    if isinstance(getattr(module, "fused_attn", None), bool) and isinstance(drop, nn.Module):
        return _read_timm
    return None


def _read_bridge(bridge: MobileToFormer | FormerToMobile, note: _Note, undo: ExitStack) -> None:
    # Not a hook on a softmax module, which would change the encoder's ``repr``, the key of cached
    # features.
    bridge.watchers.append(note)
    undo.callback(bridge.watchers.remove, note)


def _read_multihead(attention: nn.MultiheadAttention, note: _Note, undo: ExitStack) -> None:
    signature = inspect.signature(attention.forward)
    asked: dict[str, bool] = {}

    def ask(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        for name, wanted in (("need_weights", True), ("average_attn_weights", False)):
            asked[name] = call.arguments[name]
            call.arguments[name] = wanted
        return call.args, call.kwargs

    def answer(
        _: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        attended, weights = output
        # Without a batch there is no axis of images: (heads, queries, keys).
        note(weights if weights.dim() == 4 else weights[None])
        if not asked["need_weights"]:
            return attended, None
        return attended, weights.mean(dim=-3) if asked["average_attn_weights"] else weights

    _hold(undo, attention.register_forward_pre_hook(ask, with_kwargs=True))
    # Prepended: of nested readers, the inner one asks last and must answer first.
    _hold(undo, attention.register_forward_hook(answer, prepend=True))


def _read_timm(attention: Any, note: _Note, undo: ExitStack) -> None:
    undo.callback(setattr, attention, "fused_attn", attention.fused_attn)
    attention.fused_attn = False
    hook = attention.attn_drop.register_forward_pre_hook(lambda _, args: note(args[0]))
    _hold(undo, hook)


def _hold(undo: ExitStack, hook: RemovableHandle) -> None:
    undo.callback(hook.remove)
