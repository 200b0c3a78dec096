# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The hand-over of weights: from a file's tensors to a model's state, with an account of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.contracts import (
    optional_modules,
    pretrain_only_modules,
    train_only_modules,
)

from .class_rows import ClassChange, carry_over_rows, compare_classes, is_class_layer
from .load_report import GroupReport, LoadReport
from .name_matching import BELOW_FPN, is_optional, match_names

_UNNAMED = "the file does not name its classes: their rows are taken in order where the number fits"


@dataclass
class _Group:
    num_loaded: int = 0
    adapted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    def report(self) -> GroupReport:
        lists = (tuple(names) for names in (self.adapted, self.missing, self.misfits))
        return GroupReport(self.num_loaded, *lists)


def fit_weights(
    stored: Mapping[str, Tensor],
    model_state: Mapping[str, Tensor],
    *,
    file: str,
    old_classes: Sequence[str] = (),
    classes: Sequence[str] = (),
    unbuilt: Sequence[str] = (),
    left_behind: Sequence[str] = (),
    private: Sequence[str] = (),
) -> tuple[dict[str, Tensor], LoadReport]:
    """Finds the place of each tensor of a file; changes nothing.

    Args:
        stored: the file's tensors by name.
        model_state: the model's, freshly initialised.
        file: name of the file, for sentences.
        old_classes: names of the classes in the file, contiguous order; empty if unknown.
        classes: names of the model's classes; empty if unknown.
        unbuilt: beginnings of the names of parts that the model's config leaves out.
        left_behind: children of the model in the file that this model does not take over, even
            where it has parts of the same names.
        private: see ``match_names``.

    Returns:
        Tensors for ``load_state_dict``, by the model's names, and the report. Nothing is said
        about whether what fits is enough.

    Raises:
        UserError: a tensor holds NaN or infinity, or names are ambiguous.
    """
    behind = tuple(name for name in left_behind if any(_is_of(name, key) for key in stored))
    stored = without_children(stored, behind)
    check_finite(stored, file)
    change = compare_classes(old_classes, classes, file=file)
    places = match_names(model_state, stored, file=file, private=private)
    fitting, groups = _fit_all(stored, model_state, places, change)
    without_place = {
        key: name
        for key, name in places.items()
        if name not in model_state and not is_optional(name)
    }
    spare = tuple(key for key, name in without_place.items() if name.startswith(tuple(unbuilt)))
    has_classes = any(is_class_layer(name) for name in places.values() if name in model_state)
    return fitting, LoadReport(
        file=file,
        num_stored=len(places),
        groups={name: group.report() for name, group in groups.items()},
        left_over=tuple(key for key in without_place if key not in spare),
        spare=spare,
        left_behind=behind,
        class_change=change if has_classes else None,
        note=_UNNAMED if has_classes and classes and not old_classes else "",
    )


def find_left_behind(model: nn.Module, written: Sequence[str]) -> Sequence[str]:
    """Returns which parts of a file ``model`` does not take over.

    A pre-training method says in ``pretrain_only_modules`` which of its children serve it alone,
    and its files repeat that. Only a model that says the same, as when it goes on, takes them.

    Args:
        model: to load into.
        written: what the file says.
    """
    return () if pretrain_only_modules(model) == tuple(written) else written


def find_training_only(
    model: nn.Module, stored: Mapping[str, Tensor], *, keep_equal: bool
) -> list[str]:
    """Returns which parts that serve training alone are neither taken over nor missed.

    A model names them in ``train_only_modules``: nothing that it predicts depends on them, and no
    file of trained weights has them, but a checkpoint does.

    Args:
        model: to load into.
        stored: the file's tensors by name.
        keep_equal: leave out those of which the file has just what the model has.
    """
    state = model.state_dict()
    return [
        name
        for name in train_only_modules(model)
        if not (keep_equal and _shapes_of(name, state) == _shapes_of(name, stored))
    ]


def without_children(state: Mapping[str, Tensor], children: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors that belong to none of these children of a model."""
    return {
        key: tensor
        for key, tensor in state.items()
        if not any(_is_of(name, key) for name in children)
    }


def find_unbuilt(model: nn.Module) -> list[str]:
    """Beginnings of the names of what a model leaves out, and files for it may hold.

    A module names its own missing children in ``optional_modules``.
    """
    return [f"{path}." for path in optional_modules(model)]


def check_finite(tensors: Mapping[str, Tensor], file: str) -> None:
    """
    Raises:
        UserError: a tensor holds NaN or infinity.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"'{file}': '{name}' holds NaN or infinity, as after a run that diverged; take an "
                "earlier checkpoint"
            )


def _is_of(child: str, name: str) -> bool:
    return name == child or name.startswith(f"{child}.")


def _shapes_of(child: str, state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in state.items() if _is_of(child, key)}


def _fit_all(
    stored: Mapping[str, Tensor],
    model_state: Mapping[str, Tensor],
    places: Mapping[str, str],
    change: ClassChange | None,
) -> tuple[dict[str, Tensor], dict[str, _Group]]:
    group_of = _group_names(model_state)
    groups = {group: _Group() for group in group_of.values()}
    stored_names = {name: key for key, name in places.items()}
    fitting: dict[str, Tensor] = {}
    for name, fresh in model_state.items():
        group = groups[group_of[name]]
        if name not in stored_names:
            if not is_optional(name):
                group.missing.append(name)
            continue
        tensor = stored[stored_names[name]]
        fitted = _fit(name, tensor, fresh, change)
        if fitted is None:
            group.misfits.append(f"{name} {tuple(tensor.shape)} instead of {tuple(fresh.shape)}")
            continue
        fitting[name] = fitted
        if fitted is tensor:
            group.num_loaded += 1
        else:
            group.adapted.append(name)
    return fitting, groups


def _fit(name: str, tensor: Tensor, fresh: Tensor, change: ClassChange | None) -> Tensor | None:
    """Returns ``tensor`` itself, or its rows in another order; None where it does not fit."""
    if change is not None and is_class_layer(name):
        return carry_over_rows(name, tensor, fresh, change)
    return tensor if tensor.shape == fresh.shape else None


def _group_names(names: Iterable[str]) -> dict[str, str]:
    """The model's child that each tensor belongs to; of a pyramid, "backbone" below it or "fpn"."""
    groups = {name: name.split(".")[0] if "." in name else "top-level" for name in names}
    if any(name.startswith(BELOW_FPN) for name in groups):
        for name, group in groups.items():
            if group == "backbone" and not name.startswith(BELOW_FPN):
                groups[name] = "fpn"
    return groups
