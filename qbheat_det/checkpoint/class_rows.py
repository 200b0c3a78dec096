# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class layers of a model: their rows carried over to other classes by the classes' names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qbheat_det.core.errors import UserError


@dataclass(frozen=True)
class ClassChange:
    """How the classes of weights differ from those of the model, by name.

    ``kept`` and ``new`` together are the model's classes, ``kept`` and ``dropped`` the file's.
    """

    old: tuple[str, ...]
    now: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Classes of both, in the model's order."""
        return tuple(name for name in self.now if name in self.old)

    @property
    def new(self) -> tuple[str, ...]:
        """Classes that the weights do not know."""
        return tuple(name for name in self.now if name not in self.old)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Classes that the model does not have."""
        return tuple(name for name in self.old if name not in self.now)

    def __str__(self) -> str:
        groups = (("kept by name", self.kept), ("new", self.new), ("dropped", self.dropped))
        parts = [f"{what} ({len(names)}): {', '.join(names) or '-'}" for what, names in groups]
        return f"classes {'; '.join(parts)}"


@dataclass(frozen=True)
class _Layout:
    """Rows of a layer: (anchors, K, per_class) in this order, then ``trailing`` of no class."""

    names: re.Pattern[str]
    per_class: int = 1
    trailing: int = 0
    has_anchors: bool = False
    can_be_shared: bool = False  # one block of rows for all classes, where the config says so


_LAYOUTS = (
    # ImageClassifier.
    _Layout(re.compile(r"^decoder\.classifier\.(weight|bias)$")),
    # MF-DETR: no-object comes last.
    _Layout(re.compile(r"(^|\.)class_embed\.(weight|bias)$"), trailing=1),
    # RetinaNet, and FCOS with one anchor: for each anchor of a place, all classes.
    _Layout(re.compile(r"(^|\.)head\.cls_score\.(weight|bias)$"), has_anchors=True),
    # Faster R-CNN, and the stages of Cascade R-CNN: background comes last; four deltas a class.
    _Layout(re.compile(r"(^|\.)box_predictor(\.\d+)?\.cls_score\.(weight|bias)$"), trailing=1),
    _Layout(
        re.compile(r"(^|\.)box_predictor(\.\d+)?\.bbox_pred\.(weight|bias)$"),
        per_class=4,
        can_be_shared=True,
    ),
    _Layout(re.compile(r"(^|\.)mask_head\.predictor\.(weight|bias)$"), can_be_shared=True),
)


def compare_classes(old: Sequence[str], now: Sequence[str], *, file: str) -> ClassChange | None:
    """Returns how two lists of class names differ; None where they are equal or one is unknown.

    Args:
        old: names in the weights; empty if unknown.
        now: names in the model; empty if unknown.
        file: for the sentence.

    Raises:
        UserError: the lists differ, and a name stands twice in one of them.
    """
    if not old or not now or list(old) == list(now):
        return None
    for names, where in ((old, f"'{file}'"), (now, "the data")):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"'{file}' was trained on other classes, and rows cannot be kept by name: {where} "
                f"has two classes named '{twice[0]}'"
            )
    return ClassChange(tuple(old), tuple(now))


def is_class_layer(name: str) -> bool:
    """Whether a tensor of a model may have rows for each class."""
    return _find_layout(name) is not None


def carry_over_rows(name: str, stored: Tensor, fresh: Tensor, change: ClassChange) -> Tensor | None:
    """Returns the model's tensor with the rows of the kept classes taken from a file.

    Args:
        name: the tensor's name in the model.
        stored: (R_old, …), rows of the file's classes.
        fresh: (R_new, …), the model's own initialisation; its other rows stay. Not changed.
        change: the classes of both.

    Returns:
        A tensor like ``fresh``; ``stored`` itself where all classes share the rows; None where
        either tensor's rows are not those of its classes.
    """
    layout = _find_layout(name)
    if layout is None or stored.ndim == 0 or stored.shape[1:] != fresh.shape[1:]:
        return None
    if _is_shared(layout, stored, fresh, change):
        return stored
    blocks = _by_class(layout, stored, len(change.old))
    result = fresh.detach().clone()
    result_blocks = _by_class(layout, result, len(change.now))
    if blocks is None or result_blocks is None or len(blocks) != len(result_blocks):
        return None
    old_index = torch.tensor([change.old.index(name) for name in change.kept], dtype=torch.long)
    new_index = torch.tensor([change.now.index(name) for name in change.kept], dtype=torch.long)
    result_blocks[:, new_index] = blocks[:, old_index].to(result)
    if layout.trailing:
        result[-layout.trailing :] = stored[-layout.trailing :].to(result)
    return result


def _find_layout(name: str) -> _Layout | None:
    return next((layout for layout in _LAYOUTS if layout.names.search(name)), None)


def _is_shared(layout: _Layout, stored: Tensor, fresh: Tensor, change: ClassChange) -> bool:
    one_class = len(change.old) == len(change.now) == 1  # then a row of all is a row of the class
    rows = {len(stored), len(fresh)}
    return layout.can_be_shared and not one_class and rows == {layout.per_class}


def _by_class(layout: _Layout, tensor: Tensor, num_classes: int) -> Tensor | None:
    """A view (A, K, per_class, …) of the rows that belong to classes."""
    num_rows = len(tensor) - layout.trailing
    num_anchors, rest = divmod(num_rows, num_classes * layout.per_class)
    if rest or num_anchors < 1 or (num_anchors > 1 and not layout.has_anchors):
        return None
    shape = (num_anchors, num_classes, layout.per_class, *tensor.shape[1:])
    return tensor[:num_rows].view(shape)
