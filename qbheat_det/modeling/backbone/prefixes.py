# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Lets Detectron2's ``DetectionCheckpointer`` load backbones from files with other prefixes.

For most file formats, ``DetectionCheckpointer`` compares names exactly. If the prefixes differ, it
loads nothing and only logs a warning. The checkpointers of this package match names themselves.
"""

from typing import Any

from detectron2.modeling import Backbone
from torch import Tensor

from qbheat_det.core.errors import UserError

_PYRAMID = "bottom_up."
_PREFIXES = ("backbone.bottom_up.", "backbone.", _PYRAMID)


def accept_prefixes(backbone: Backbone) -> None:
    """Lets ``load_state_dict`` find weights of a backbone or bottom-up network under any prefix.

    Loading raises a ``UserError`` if the file contains only a part of the encoder, or none of it.
    """
    backbone.register_load_state_dict_pre_hook(_find_own)


def _find_own(
    backbone: Backbone,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    names = list(backbone.state_dict())
    below = _PYRAMID if any(name.startswith(_PYRAMID) for name in names) else ""
    encoder = [name.removeprefix(below) for name in names if name.startswith(below)]
    own = prefix + below
    if not any(own + name in state_dict for name in encoder):
        # If this backbone is a child of another module, all names begin with that module's prefix.
        others = [each for each in (prefix, *(prefix + p for p in _PREFIXES)) if each != own]
        found = max(others, key=lambda each: sum(each + name in state_dict for name in encoder))
        moved = {found + name: own + name for name in encoder}
        around = found.removesuffix(_PYRAMID)
        moved |= {around + n: prefix + n for n in names if below and not n.startswith(below)}
        for old, new in moved.items():
            if old in state_dict:
                state_dict[new] = state_dict.pop(old)
    needed = [name for name in encoder if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if own + name not in state_dict]
    is_wrong_file = bool(unexpected_keys if prefix else state_dict)
    if missing and (len(missing) < len(needed) or is_wrong_file):
        raise UserError(
            f"the file has {len(needed) - len(missing)} of the {len(needed)} tensors of "
            f"{type(backbone).__name__}, and lacks '{missing[0]}': use weights of the same variant "
            "and outputs. Inside a model of another package, names without a prefix need a file in "
            "Detectron2's format {'model': …, 'matching_heuristics': True}, as qbheat://NAME has. "
            "To load only a part, use qbheat_det.checkpoint.SafeCheckpointer(model, "
            "allow_partial=True)"
        )
