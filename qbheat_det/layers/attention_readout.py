# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reading out where a model attends, from its own forward pass.

The layers compute as always: the bridges tell the weights that they compute anyway, others are
asked, by hooks, for the weights instead of a fused kernel. Watchers and hooks are gone when the
``with`` block ends; outside of one nothing of this file runs.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .cross_attention import FormerToMobile, MobileToFormer


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one call of an attention layer, detached, on the model's device.

    Attributes:
        weights: of ``MobileToFormer`` (N, heads, M, HW), which sum to 1 over the pixels; of
            ``FormerToMobile`` also (N, heads, M, HW), which sum to 1 over the tokens; of any other
            layer (N, heads, queries, keys), which sum to 1 over the keys. Masked keys have 0.
        size: (H, W) of the map whose pixels the last axis holds, row by row; None where the layer
            is not one of the two bridges and does not know.
    """

    weights: Tensor
    size: tuple[int, int] | None = None

    def unflatten(self, size: tuple[int, int] | None = None) -> Tensor:
        """Returns the weights as maps, (N, heads, rows, H, W).

        Args:
            size: (H, W), for a layer that does not know it.

        Raises:
            ValueError: neither the layer nor the caller knows the size.
        """
        size = self.size or size
        if size is None:
            raise ValueError("these weights lie over a sequence: name the (H, W) of its map")
        return self.weights.unflatten(-1, size)


AttentionRecord = dict[str, list[AttentionWeights]]
"""By the name of the layer in the model: the weights of its calls, in their order."""


@contextmanager
def read_attention(
    model: nn.Module, names: Collection[str] | None = None
) -> Iterator[AttentionRecord]:
    """Notes the attention weights of all that ``model`` computes within the block.

    Read are the two bridges, ``torch.nn.MultiheadAttention`` and the attention of timm's vision
    transformers. The outputs are those of the same layers outside the block: the bridges' to the
    bit, the others' up to rounding, since these take PyTorch's fused kernel while nobody reads
    them. Blocks may be nested. In training, MultiheadAttention's weights are those after dropout.

    Args:
        model: any module.
        names: of the layers to read, as in ``model.named_modules()``; all of them if None.

    Yields:
        A record that fills while the model runs; layers that did not run are not in it.

    Raises:
        ValueError: one of ``names`` is no attention layer of the model.
    """
    readers = {name: m for name, m in model.named_modules() if _find_reader(m) is not None}
    if unknown := sorted(set(names or ()) - set(readers)):
        raise ValueError(f"no attention to read in {unknown}; there is {sorted(readers)}")
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
    # timm has this in several classes, whose places in it have moved.
    drop = getattr(module, "attn_drop", None)
    if isinstance(getattr(module, "fused_attn", None), bool) and isinstance(drop, nn.Module):
        return _read_timm
    return None


def _read_bridge(bridge: MobileToFormer | FormerToMobile, note: _Note, undo: ExitStack) -> None:
    # No module for the softmax, with a hook: it would stand in the encoder's ``repr``, by which
    # caches of features are known.
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
        gathered, weights = output
        # Without a batch there is no axis of images: (heads, queries, keys).
        note(weights if weights.dim() == 4 else weights[None])
        if not asked["need_weights"]:
            return gathered, None
        return gathered, weights.mean(dim=-3) if asked["average_attn_weights"] else weights

    _hold(undo, attention.register_forward_pre_hook(ask, with_kwargs=True))
    # In front: of nested readers the inner one asks last, so it must answer first.
    _hold(undo, attention.register_forward_hook(answer, prepend=True))


def _read_timm(attention: Any, note: _Note, undo: ExitStack) -> None:
    undo.callback(setattr, attention, "fused_attn", attention.fused_attn)
    attention.fused_attn = False
    hook = attention.attn_drop.register_forward_pre_hook(lambda _, args: note(args[0]))
    _hold(undo, hook)


def _hold(undo: ExitStack, hook: RemovableHandle) -> None:
    undo.callback(hook.remove)
