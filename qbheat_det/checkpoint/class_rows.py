# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class layers: their rows are carried over to another data set by the names of the classes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qbheat_det.core.errors import UserError


@dataclass(frozen=True)
class ClassChange:
    """Classes of a file (``old``) and of a model (``now``), in contiguous order."""

    old: tuple[str, ...]
    now: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Classes of both, in the model's order."""
        return tuple(name for name in self.now if name in self.old)

    def __str__(self) -> str:
        groups = {
            "kept by name": self.kept,
            "new": [name for name in self.now if name not in self.old],
            "dropped": [name for name in self.old if name not in self.now],
        }
        parts = (f"{what} ({len(n)}): {', '.join(n) or '-'}" for what, n in groups.items())
        return f"classes {'; '.join(parts)}"


@dataclass(frozen=True)
class _Layout:
    """Rows of a layer: (anchors, K, per_class) in this order, then ``trailing`` of no class."""

    names: re.Pattern[str]
    per_class: int = 1
    trailing: int = 0
    has_anchors: bool = False
    class_agnostic: bool = False  # one block of rows for all classes, if the config says so


_LAYOUTS = (
    # ImageClassifier.
    _Layout(re.compile(r"^decoder\.classifier\.(weight|bias)$")),
    # MF-DETR: no-object comes last.
    _Layout(re.compile(r"(^|\.)class_embed\.(weight|bias)$"), trailing=1),
    # RetinaNet, and FCOS with one anchor: all classes for each anchor.
    _Layout(re.compile(r"(^|\.)head\.cls_score\.(weight|bias)$"), has_anchors=True),
    # Faster R-CNN and the stages of Cascade R-CNN: background comes last; four deltas a class.
    _Layout(re.compile(r"(^|\.)box_predictor(\.\d+)?\.cls_score\.(weight|bias)$"), trailing=1),
    _Layout(
        re.compile(r"(^|\.)box_predictor(\.\d+)?\.bbox_pred\.(weight|bias)$"),
        per_class=4,
        class_agnostic=True,
    ),
    _Layout(re.compile(r"(^|\.)mask_head\.predictor\.(weight|bias)$"), class_agnostic=True),
)


def compare_classes(old: Sequence[str], now: Sequence[str], *, file: str) -> ClassChange | None:
    """Returns how the classes of a file and of a model differ; None if equal or one is unknown.

    Raises:
        UserError: the lists differ, and one has a name twice.
    """
    if not old or not now or list(old) == list(now):
        return None
    for names, where in ((old, f"'{file}'"), (now, "the data")):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"rows of '{file}' cannot be kept by name: {where} has two classes '{twice[0]}'"
            )
    return ClassChange(tuple(old), tuple(now))


def is_class_layer(name: str) -> bool:
    """Whether a tensor of a model may have rows for each class."""
    return _find_layout(name) is not None


def carry_over_rows(name: str, stored: Tensor, fresh: Tensor, change: ClassChange) -> Tensor | None:
    """Returns the model's tensor with the rows of the kept classes taken from a file.

    ``stored`` (R_old, …) has the rows of the file's classes, ``fresh`` (R_new, …) the model's
    initialisation. The result is ``stored`` itself if all classes share the rows, and None if the
    rows of either tensor are not those of its classes.
    """
    layout = _find_layout(name)
    if layout is None or stored.ndim == 0 or stored.shape[1:] != fresh.shape[1:]:
        return None
    one_class = len(change.old) == len(change.now) == 1  # then shared rows are those of the class
    if layout.class_agnostic and not one_class and {len(stored), len(fresh)} == {layout.per_class}:
        return stored
    result = fresh.detach().clone()
    old_rows = _split_by_class(layout, stored, len(change.old))
    new_rows = _split_by_class(layout, result, len(change.now))
    if old_rows is None or new_rows is None or len(old_rows) != len(new_rows):
        return None
    old_index = torch.tensor([change.old.index(name) for name in change.kept], dtype=torch.long)
    new_index = torch.tensor([change.now.index(name) for name in change.kept], dtype=torch.long)
    new_rows[:, new_index] = old_rows[:, old_index].to(result)
    if layout.trailing:
        result[-layout.trailing :] = stored[-layout.trailing :].to(result)
    return result


def _find_layout(name: str) -> _Layout | None:
    return next((layout for layout in _LAYOUTS if layout.names.search(name)), None)


def _split_by_class(layout: _Layout, tensor: Tensor, num_classes: int) -> Tensor | None:
    """Returns a view (A, K, per_class, …) of the rows that belong to classes."""
    num_rows = len(tensor) - layout.trailing
    num_anchors, rest = divmod(num_rows, num_classes * layout.per_class)
    if rest or num_anchors < 1 or (num_anchors > 1 and not layout.has_anchors):
        return None
    shape = (num_anchors, num_classes, layout.per_class, *tensor.shape[1:])
    return tensor[:num_rows].view(shape)
