# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Matches the tensors of a file with a model, and reports which tensors were loaded.

Unlike Detectron2's heuristic, all names in the file get the same change of prefix. This change
accounts for wrappers, bare backbones, and backbones inside a feature pyramid. Rows of
classification layers are matched by class names.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qbheat_det.core.errors import UserError

from .report import ClassChange, GroupReport, LoadReport

BACKBONE = "backbone."
BELOW_FPN = "backbone.bottom_up."
# Prefixes of DistributedDataParallel and AveragedModel, of torch.compile, and of Lightning.
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_AVERAGED_MODEL_COUNTER = "n_averaged"
# BatchNorm's counter (unused unless momentum is None), RetinaNet's running mean of the number of
# positives (training estimates it again), and pixel statistics (the config sets them).
_OPTIONAL = ("num_batches_tracked", "loss_normalizer", "pixel_mean", "pixel_std")
_OLD_ANCHORS = "anchor_generator.cell_anchors"
_UNNAMED = "the file does not name its classes: their rows are taken in order where the number fits"


@dataclass(frozen=True)
class _Layout:
    """Order of a layer's rows: (anchors, K, per_class), then ``trailing`` rows without a class."""

    path: str  # pattern of the layer's path, or of its end
    per_class: int = 1
    trailing: int = 0
    has_anchors: bool = False
    class_agnostic: bool = False  # the config may choose one set of rows for all classes


_LAYOUTS = (
    # ImageClassifier.
    _Layout(r"decoder\.classifier"),
    # MF-DETR: the last row is "no object".
    _Layout(r"class_embed", trailing=1),
    # RetinaNet, and FCOS with one anchor: each anchor has rows for all classes.
    _Layout(r"head\.cls_score", has_anchors=True),
    # Faster R-CNN and the stages of Cascade R-CNN: the last row is background; 4 deltas per class.
    _Layout(r"box_predictor(\.\d+)?\.cls_score", trailing=1),
    _Layout(r"box_predictor(\.\d+)?\.bbox_pred", per_class=4, class_agnostic=True),
    _Layout(r"mask_head\.predictor", class_agnostic=True),
)


def fit_weights(
    stored: Mapping[str, Tensor],
    model_state: Mapping[str, Tensor],
    *,
    file: str,
    old_classes: Sequence[str] = (),
    classes: Sequence[str] = (),
    optional_modules: Sequence[str] = (),
    skip: Sequence[str] = (),
    private: Sequence[str] = (),
) -> tuple[dict[str, Tensor], LoadReport]:
    """Matches the tensors of a file with a model.

    Args:
        stored: the tensors in the file, by name.
        model_state: the tensors of the freshly initialized model, by name.
        file: path of the file, for messages.
        old_classes: class names in the file, in contiguous order; empty if unknown.
        classes: class names of the model, in contiguous order; empty if unknown.
        optional_modules: paths of modules that the model's config disables.
        skip: names of child modules whose tensors in the file are not loaded.
        private: see ``match_names``.

    Returns:
        The tensors that fit, by their names in the model, and a report.

    Raises:
        UserError: a tensor contains NaN or infinity, or the names fit several parts of the model.
    """
    # With a dot at the end, a child that is itself a parameter begins with its own prefix.
    dotted = [f"{key}." for key in stored]
    skipped = tuple(c for c in skip if any(key.startswith(f"{c}.") for key in dotted))
    skipped_prefixes = tuple(f"{child}." for child in skipped)
    stored = {k: t for k, t in stored.items() if not f"{k}.".startswith(skipped_prefixes)}
    for name, tensor in stored.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"'{file}': '{name}' contains NaN or infinity, as after a run that diverged"
            )
    change = compare_classes(old_classes, classes, file=file)
    names = match_names(model_state, stored, file=file, private=private)
    renamed = {name: stored[key] for key, name in names.items()}
    fitting, groups = _fill(model_state, renamed, change)
    unexpected: list[str] = []
    unused: list[str] = []
    prefixes = tuple(f"{module}." for module in optional_modules)
    for key, name in names.items():
        if name in model_state or is_optional(name):
            continue
        if name.startswith(prefixes):
            unused.append(key)
        else:
            unexpected.append(key)
    has_classes = any(_find_layout(name) for name in names.values() if name in model_state)
    is_unnamed = has_classes and classes and not old_classes
    return fitting, LoadReport(
        file=file,
        num_stored=len(names),
        groups=groups,
        unexpected=tuple(unexpected),
        unused=tuple(unused),
        skipped=skipped,
        class_change=change if has_classes else None,
        note=_UNNAMED if is_unnamed else "",
    )


def match_names(
    model_names: Collection[str],
    file_names: Collection[str],
    *,
    file: str,
    private: Collection[str] = (),
) -> dict[str, str]:
    """Maps each tensor name in a file to a name that the model may have.

    A prefix such as "backbone." is added or removed if the names then match. Prefixes of the child
    modules in ``private``, such as a copy of the backbone, are never added. Raises a ``UserError``
    if a file fits two parts of the model.
    """
    model = set(model_names)
    short = strip_wrappers(model, [name for name in file_names if name != _AVERAGED_MODEL_COUNTER])
    names = set(short.values())
    public = [name for name in model if name.partition(".")[0] not in private]
    added = _longest_agreement(public, names)
    removed = _longest_agreement(names, model)
    if len(added) > 1:
        whole = [p for p in added if _num_matched(("", p), model, names) == len(names)]
        if len(whole) > 1:
            parts = ", ".join(whole)
            raise UserError(f"'{file}' fits in more than one part of the model ({parts})")
        added = whole  # if several parts agree only partially, no prefix is added
    changes = [
        ("", ""),
        (BACKBONE, BELOW_FPN),
        (BELOW_FPN, BACKBONE),
        *(("", prefix) for prefix in added),
        *((prefix, "") for prefix in removed),
    ]
    best = max(changes, key=lambda change: _num_matched(change, model, names))
    return {name: _change_prefix(best, value) for name, value in short.items()}


def bare_backbone(names: Collection[str]) -> dict[str, str]:
    """Maps the names of a backbone's tensors in a file to names without the backbone's prefix.

    Of a feature pyramid, only the bottom-up network is used. Returns {} if there is no backbone.
    """
    short = strip_wrappers((), names)
    for prefix in (BELOW_FPN, BACKBONE):
        inside = {n: v.removeprefix(prefix) for n, v in short.items() if v.startswith(prefix)}
        if inside:
            return inside
    return {}


def is_optional(name: str) -> bool:
    """Whether a tensor may be missing from a file, or be in the file but not in the model."""
    return name.rpartition(".")[2] in _OPTIONAL or _OLD_ANCHORS in name


def _fill(
    model_state: Mapping[str, Tensor], stored: Mapping[str, Tensor], change: ClassChange | None
) -> tuple[dict[str, Tensor], dict[str, GroupReport]]:
    group_of = _find_groups(model_state)
    groups = {group: GroupReport() for group in group_of.values()}
    fitting: dict[str, Tensor] = {}
    for name, fresh in model_state.items():
        group = groups[group_of[name]]
        tensor = stored.get(name)
        if tensor is None:
            if not is_optional(name):
                group.missing.append(name)
            continue
        if change is not None and _find_layout(name):
            fitted = carry_over_rows(name, tensor, fresh, change)
        elif tensor.shape == fresh.shape:
            fitted = tensor
        else:
            fitted = None
        if fitted is None:
            group.mismatched.append(f"{name} {tuple(tensor.shape)} instead of {tuple(fresh.shape)}")
            continue
        group.num_loaded += 1
        fitting[name] = fitted
    return fitting, groups


def _find_groups(names: Collection[str]) -> dict[str, str]:
    """Maps each tensor to its child module; a feature pyramid is split in "fpn" and "backbone"."""
    has_pyramid = any(name.startswith(BELOW_FPN) for name in names)
    groups: dict[str, str] = {}
    for name in names:
        child, dot, _ = name.partition(".")
        if not dot:
            groups[name] = "top-level"
        elif has_pyramid and child == "backbone" and not name.startswith(BELOW_FPN):
            groups[name] = "fpn"
        else:
            groups[name] = child
    return groups


def strip_wrappers(model: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Maps each name in a file to the name without the prefixes of wrappers, such as "module.".

    A prefix is removed if all names in the file have it, and no name in the model has it.
    """
    short = {name: name for name in names}
    for _ in _WRAPPERS:  # wrappers may be nested in any order
        for wrapper in _WRAPPERS:
            is_of_model = any(name.startswith(wrapper) for name in model)
            is_of_file = all(name.startswith(wrapper) for name in short.values())
            if is_of_file and not is_of_model:
                short = {name: value.removeprefix(wrapper) for name, value in short.items()}
    return short


def _longest_agreement(longer: Collection[str], shorter: Collection[str]) -> list[str]:
    """Returns the most frequent prefixes whose removal maps ``longer`` to ``shorter`` names."""
    counts: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        for index in range(1, len(parts)):
            if ".".join(parts[index:]) in shorter:
                counts[".".join(parts[:index]) + "."] += 1
    most = max(counts.values(), default=0)
    return sorted(prefix for prefix, count in counts.items() if count == most)


def _change_prefix(change: tuple[str, str], name: str) -> str:
    old, new = change
    if not name.startswith(old):
        return name
    return new + name.removeprefix(old)


def _num_matched(change: tuple[str, str], model: Collection[str], names: Collection[str]) -> int:
    changed = [_change_prefix(change, name) for name in names]
    if len(set(changed)) < len(changed):  # two tensors would get one name
        return -1
    return sum(name in model for name in changed)


def compare_classes(old: Sequence[str], now: Sequence[str], *, file: str) -> ClassChange | None:
    """Returns how the classes of a file (``old``) and a model (``now``) differ.

    Returns None if they are equal, or if one of the lists is empty (unknown). Raises a
    ``UserError`` if they differ and one of the lists has a duplicate name.
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


def carry_over_rows(name: str, stored: Tensor, fresh: Tensor, change: ClassChange) -> Tensor | None:
    """Returns the model's tensor with the rows of the kept classes copied from a file.

    Takes the file's tensor ``stored`` (R_old, …) and the model's initial tensor ``fresh``
    (R_new, …), and returns a tensor (R_new, …). Returns ``stored`` if the rows do not depend on the
    class, as in class-agnostic box regression, and None if the rows do not fit. ``name`` is the
    tensor's name in the model, which determines the layout of the rows.
    """
    layout = _find_layout(name)
    if layout is None or stored.ndim == 0 or stored.shape[1:] != fresh.shape[1:]:
        return None
    one_class = len(change.old) == len(change.now) == 1  # then shared rows belong to that class
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
    for layout in _LAYOUTS:
        if re.fullmatch(rf"(.*\.)?{layout.path}\.(weight|bias)", name):
            return layout
    return None


def _split_by_class(layout: _Layout, tensor: Tensor, num_classes: int) -> Tensor | None:
    """Returns a view (A, K, per_class, …) of the rows that belong to classes; None if wrong."""
    num_rows = len(tensor) - layout.trailing
    num_anchors, rest = divmod(num_rows, num_classes * layout.per_class)
    if rest or num_anchors < 1 or (num_anchors > 1 and not layout.has_anchors):
        return None
    shape = (num_anchors, num_classes, layout.per_class, *tensor.shape[1:])
    return tensor[:num_rows].view(shape)
