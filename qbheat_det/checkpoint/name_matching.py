# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where in the model the tensors of a file belong, by name.

Detectron2's heuristic lets each tensor find a place of its own by the end of its name, so that a
few tensors of another architecture can slip in. Here one change of prefix holds for the whole
file: it was saved from a wrapper, is a bare backbone, or its backbone stood in a pyramid.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from qbheat_det.core.errors import UserError

BACKBONE, BELOW_FPN = "backbone.", "backbone.bottom_up."
# DistributedDataParallel and AveragedModel, torch.compile, Lightning and other wrappers.
_WRAPPERS = ("module.", "_orig_mod.", "model.")
# Beside the weights proper: AveragedModel's counter.
_NO_WEIGHTS = "n_averaged"
# BatchNorm's counter, which nothing reads unless its momentum is None; RetinaNet's running mean
# of positives, which training finds again; and what the config sets, in old Detectron2 a state.
_OPTIONAL = ("num_batches_tracked", "loss_normalizer", "pixel_mean", "pixel_std")
_OLD_ANCHORS = "anchor_generator.cell_anchors"


@dataclass(frozen=True)
class _Shift:
    old: str
    new: str

    def __call__(self, name: str) -> str:
        return self.new + name[len(self.old) :] if name.startswith(self.old) else name


def match_names(
    model_names: Collection[str],
    file_names: Collection[str],
    *,
    file: str,
    private: Collection[str] = (),
) -> dict[str, str]:
    """Maps each name in a file to a name in the model, or to one that the model does not have.

    Args:
        model_names: names of the model's state.
        file_names: names of the tensors in the file.
        file: for the sentence.
        private: children of the model that only files which name them in full mean, such as a
            copy of its backbone.

    Raises:
        UserError: the tensors would fit in two places of the model.
    """
    model = set(model_names)
    bare = _without_wrappers(model, [name for name in file_names if name != _NO_WEIGHTS])
    names = set(bare.values())
    public = [name for name in model if name.partition(".")[0] not in private]
    added, taken = _longest_agreement(public, names), _longest_agreement(names, model)
    if len(added) > 1:
        whole = [p for p in added if _num_placed(_Shift("", p), model, names) == len(names)]
        if len(whole) > 1:
            raise UserError(
                f"'{file}' fits in more than one place of the model ({', '.join(whole)}): name its "
                "tensors in full, as the model does"
            )
        added = whole  # of parts that fit here as well as there, none is meant
    shifts = [
        _Shift("", ""),
        _Shift(BACKBONE, BELOW_FPN),
        _Shift(BELOW_FPN, BACKBONE),
        *(_Shift("", prefix) for prefix in added),
        *(_Shift(prefix, "") for prefix in taken),
    ]
    best = max(shifts, key=lambda shift: _num_placed(shift, model, names))
    return {name: best(short) for name, short in bare.items()}


def bare_backbone(names: Collection[str]) -> dict[str, str]:
    """Maps those names in a file that are of its backbone to what they are without a prefix.

    Of a feature pyramid it is the backbone below; the map is empty where a file has none.
    """
    short = _without_wrappers((), names)
    for prefix in (BELOW_FPN, BACKBONE):
        inside = {
            name: value.removeprefix(prefix)
            for name, value in short.items()
            if value.startswith(prefix)
        }
        if inside:
            return inside
    return {}


def is_optional(name: str) -> bool:
    """Whether a tensor may be missing in a file, or be left over, without harm."""
    return name.rpartition(".")[2] in _OPTIONAL or _OLD_ANCHORS in name


def _without_wrappers(model: Collection[str], names: Collection[str]) -> dict[str, str]:
    short = {name: name for name in names}
    for _ in _WRAPPERS:  # wrappers stand around each other
        for wrapper in _WRAPPERS:
            own = any(name.startswith(wrapper) for name in model)
            if short and not own and all(name.startswith(wrapper) for name in short.values()):
                short = {name: value[len(wrapper) :] for name, value in short.items()}
    return short


def _longest_agreement(longer: Collection[str], shorter: Collection[str]) -> list[str]:
    """The prefixes that most of ``longer`` have before a name of ``shorter``; several in a tie."""
    counts: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        for index in range(1, len(parts)):
            if ".".join(parts[index:]) in shorter:
                counts[".".join(parts[:index]) + "."] += 1
    most = max(counts.values(), default=0)
    return sorted(prefix for prefix, count in counts.items() if count == most)


def _num_placed(shift: _Shift, model: Collection[str], names: Collection[str]) -> int:
    shifted = [shift(name) for name in names]
    if len(set(shifted)) < len(shifted):  # two tensors would have one name
        return -1
    return sum(name in model for name in shifted)
