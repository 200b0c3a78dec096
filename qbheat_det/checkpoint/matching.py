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
_LAST_STAGE = "roi_heads.res5."
# Prefixes of DistributedDataParallel and AveragedModel, of torch.compile, and of Lightning.
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_AVERAGED_MODEL_COUNTER = "n_averaged"
# BatchNorm's counter (unused unless momentum is None), RetinaNet's running mean of the number of
# positives (training estimates it again), and pixel statistics (the config sets them).
_OPTIONAL = ("num_batches_tracked", "loss_normalizer", "pixel_mean", "pixel_std")
_OLD_ANCHORS = "anchor_generator.cell_anchors"
_UNNAMED = "the file does not name its classes: their rows are taken in order where the number fits"
_PrefixChange = tuple[str, str]
"""The prefix of a name in the file, and the prefix that replaces it."""


@dataclass(frozen=True)
class _Layout:
    """The order of the rows (output channels) of a layer that predicts K classes.

    The rows are anchors x K x ``per_class``, followed by ``trailing`` rows.
    """

    path: str  # regular expression for the end of the layer's path
    per_class: int = 1  # rows per class
    trailing: int = 0  # rows for "no object" or background
    has_anchors: bool = False  # False: 1 anchor
    class_agnostic: bool = False  # whether a config can share the rows of one class for all


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
        private: names of child modules of the model, such as a copy of the backbone, that a bare
            backbone in the file is not loaded into.

    Returns:
        The tensors that fit, by their names in the model, and a report.

    Raises:
        UserError: a tensor contains NaN or infinity, or the names fit several parts of the model.
    """
    skipped = tuple(child for child in skip if any(_is_inside(name, child) for name in stored))
    loaded: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if not any(_is_inside(name, child) for child in skipped):
            loaded[name] = tensor
    for name, tensor in loaded.items():
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"'{file}': '{name}' contains NaN or infinity, as after a run that diverged"
            )
    change = compare_classes(old_classes, classes, file=file)
    names = match_names(model_state, loaded, file=file, private=private)
    renamed = {name: loaded[key] for key, name in names.items()}
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
    lacks_class_names = has_classes and classes and not old_classes
    return fitting, LoadReport(
        file=file,
        num_stored=len(names),
        groups=groups,
        unexpected=tuple(unexpected),
        unused=tuple(unused),
        skipped=skipped,
        class_change=change if has_classes else None,
        note=_UNNAMED if lacks_class_names else "",
    )


def _is_inside(name: str, module: str) -> bool:
    """Whether a tensor belongs to a module, or is itself a parameter with this name."""
    return name == module or name.startswith(f"{module}.")


def match_names(
    model_names: Collection[str],
    file_names: Collection[str],
    *,
    file: str,
    private: Collection[str] = (),
) -> dict[str, str]:
    """Maps each tensor name in a file to the name that it has in the model.

    All names get the same change of prefix, for example "stem.weight" becomes
    "backbone.stem.weight". The change with the most names of the model is used. Names that the
    model does not have are also in the result.

    Args:
        model_names: names of the model's tensors.
        file_names: names of the tensors in the file.
        file: path of the file, for messages.
        private: names of child modules whose prefix is never added, such as a copy of the backbone.

    Raises:
        UserError: all names fit two or more parts of the model.
    """
    model = set(model_names)
    short = strip_wrappers(model, [name for name in file_names if name != _AVERAGED_MODEL_COUNTER])
    names = set(short.values())
    public = [name for name in model if name.partition(".")[0] not in private]
    added_prefixes = _find_extra_prefixes(public, names)
    removed_prefixes = _find_extra_prefixes(names, model)
    if len(added_prefixes) > 1:
        # Several parts of the model have modules with the same names. Only a part that has all
        # names of the file can be meant.
        num_names = len(names)
        fitting_all = [
            p for p in added_prefixes if _num_matched(("", p), model, names) == num_names
        ]
        if len(fitting_all) > 1:
            parts = ", ".join(fitting_all)
            raise UserError(f"'{file}' fits in more than one part of the model ({parts})")
        added_prefixes = fitting_all
    changes: list[_PrefixChange] = [("", ""), (BACKBONE, BELOW_FPN), (BELOW_FPN, BACKBONE)]
    changes += [("", prefix) for prefix in added_prefixes]
    changes += [(prefix, "") for prefix in removed_prefixes]
    best = max(changes, key=lambda change: _num_matched(change, model, names))
    return {name: _change_prefix(best, value) for name, value in short.items()}


def bare_backbone(names: Collection[str]) -> dict[str, str]:
    """Maps the names of a backbone's tensors in a file to names without the backbone's prefix.

    For example, "backbone.stem.weight" is mapped to "stem.weight". If the backbone is a feature
    pyramid, the result has only the tensors of its bottom-up network. Returns {} if no name has the
    prefix of a backbone.
    """
    short = strip_wrappers((), names)
    for prefix in (BELOW_FPN, BACKBONE):
        bare_names = {}
        for name, value in short.items():
            if value.startswith(prefix):
                bare_names[name] = value.removeprefix(prefix)
        if bare_names:
            return bare_names
    return {}


def is_optional(name: str) -> bool:
    """Whether a tensor may be missing from a file, or be in the file but not in the model."""
    return name.rpartition(".")[2] in _OPTIONAL or _OLD_ANCHORS in name


def _fill(
    model_state: Mapping[str, Tensor], stored: Mapping[str, Tensor], change: ClassChange | None
) -> tuple[dict[str, Tensor], dict[str, GroupReport]]:
    """Returns the tensors of a file that fit, and a report for each part of the model.

    Args:
        model_state: the model's initial tensors, by name.
        stored: the tensors in the file, by their names in the model.
        change: how the classes differ; None if they are equal or unknown.
    """
    group_names = _find_groups(model_state)
    groups = {group_name: GroupReport() for group_name in group_names.values()}
    fitting: dict[str, Tensor] = {}
    for name, fresh in model_state.items():
        group = groups[group_names[name]]
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
    """Maps the name of each tensor to the part of the model that reports count it in.

    Parts are child modules. If the backbone is a feature pyramid, "backbone" is its bottom-up
    network, and "fpn" its other modules. In Detectron2's C4 models, the last stage of the ResNet is
    in the head, and is a part of its own, as ImageNet weights have it without the rest of the head.
    """
    has_pyramid = any(name.startswith(BELOW_FPN) for name in names)
    groups: dict[str, str] = {}
    for name in names:
        child, dot, _ = name.partition(".")
        if not dot:
            groups[name] = "top-level"
        elif has_pyramid and child == "backbone" and not name.startswith(BELOW_FPN):
            groups[name] = "fpn"
        elif name.startswith(_LAST_STAGE):
            groups[name] = _LAST_STAGE.removesuffix(".")
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
            is_in_model = any(name.startswith(wrapper) for name in model)
            is_in_whole_file = all(name.startswith(wrapper) for name in short.values())
            if is_in_whole_file and not is_in_model:
                short = {name: value.removeprefix(wrapper) for name, value in short.items()}
    return short


def _find_extra_prefixes(longer: Collection[str], shorter: Collection[str]) -> list[str]:
    """Returns the prefix that most names in ``longer`` have in addition to a name in ``shorter``.

    If several prefixes are equally frequent, returns all of them, sorted.
    """
    counts: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        for index in range(1, len(parts)):
            rest = ".".join(parts[index:])
            if rest in shorter:
                prefix = ".".join(parts[:index]) + "."
                counts[prefix] += 1
    highest_count = max(counts.values(), default=0)
    return sorted(prefix for prefix, count in counts.items() if count == highest_count)


def _change_prefix(change: _PrefixChange, name: str) -> str:
    old, new = change
    if not name.startswith(old):
        return name
    return new + name.removeprefix(old)


def _num_matched(change: _PrefixChange, model: Collection[str], names: Collection[str]) -> int:
    """Returns the number of changed names that the model has; -1 if two names become equal."""
    changed = [_change_prefix(change, name) for name in names]
    if len(set(changed)) < len(changed):
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
    """Copies the rows of the classes that file and model share from the file's tensor.

    Args:
        name: the tensor's name in the model, which determines the layout of the rows.
        stored: the file's tensor (R_old, …).
        fresh: the model's initial tensor (R_new, …), whose rows the new classes keep.
        change: the classes of the file and of the model.

    Returns:
        A tensor (R_new, …). It is ``stored`` if all classes share the rows, as in class-agnostic
        box regression. None if the rows do not fit.
    """
    layout = _find_layout(name)
    if layout is None or stored.ndim == 0 or stored.shape[1:] != fresh.shape[1:]:
        return None
    # With one class, rows for this class and rows that classes share are equally many. The rows are
    # then copied only if the class is the same.
    has_one_class = len(change.old) == 1 and len(change.now) == 1
    is_shared = len(stored) == layout.per_class and len(fresh) == layout.per_class
    if layout.class_agnostic and is_shared and not has_one_class:
        return stored
    result = fresh.detach().clone()
    old_rows = _split_by_class(layout, stored, len(change.old))  # (A, K_old, per_class, …)
    new_rows = _split_by_class(layout, result, len(change.now))  # (A, K_new, per_class, …)
    if old_rows is None or new_rows is None or len(old_rows) != len(new_rows):
        return None
    old_indices = [change.old.index(class_name) for class_name in change.kept]
    new_indices = [change.now.index(class_name) for class_name in change.kept]
    # ``new_rows`` is a view, so this writes into ``result``.
    new_rows[:, new_indices] = old_rows[:, old_indices].to(result)
    if layout.trailing:
        result[-layout.trailing :] = stored[-layout.trailing :].to(result)
    return result


def _find_layout(name: str) -> _Layout | None:
    for layout in _LAYOUTS:
        if re.fullmatch(rf"(.*\.)?{layout.path}\.(weight|bias)", name):
            return layout
    return None


def _split_by_class(layout: _Layout, tensor: Tensor, num_classes: int) -> Tensor | None:
    """Returns a view (A, K, per_class, …) of a tensor (R, …), without the trailing rows.

    A is the number of anchors, and K the number of classes. Returns None if the number R of rows
    does not fit the layout.
    """
    num_rows = len(tensor) - layout.trailing
    num_anchors, remainder = divmod(num_rows, num_classes * layout.per_class)
    if remainder or num_anchors < 1:
        return None
    if num_anchors > 1 and not layout.has_anchors:
        return None
    shape = (num_anchors, num_classes, layout.per_class, *tensor.shape[1:])
    return tensor[:num_rows].view(shape)
