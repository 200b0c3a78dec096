# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds config keys that a run does not read, so that their values have no effect."""

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.modeling import build_model

from .loading import get_value, list_leaves, with_values

logger = logging.getLogger(__name__)

# Keys, or beginnings of keys, that the data, the training or the inference read.
_READ_ELSEWHERE = (
    "MODEL.CACHE_FEATURES.",
    "MODEL.CATEGORY_IDS",
    "MODEL.CHANNELS_LAST",
    "MODEL.CLASS_NAMES",
    "MODEL.DEPLOY.",
    "MODEL.DEVICE",
    "MODEL.KEEP_CLASSES.",
    "MODEL.KEYPOINT_ON",
    "MODEL.LOAD_PROPOSALS",
    "MODEL.MASK_ON",
    "MODEL.SEMI.",
    "MODEL.TEACHER.",
    "MODEL.WEIGHTS",
)

_MULTI_STEP = ("SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR")
# Keys that are read only if another key has this value.
_NEEDS: dict[str, tuple[str, object]] = {
    "SOLVER.BETAS": ("SOLVER.OPTIMIZER", "ADAMW"),
    "SOLVER.EMA.DECAY": ("SOLVER.EMA.ENABLED", True),
    "SOLVER.GAMMA": _MULTI_STEP,
    "SOLVER.MOMENTUM": ("SOLVER.OPTIMIZER", "SGD"),
    "SOLVER.NESTEROV": ("SOLVER.OPTIMIZER", "SGD"),
    "SOLVER.STEPS": _MULTI_STEP,
    "SOLVER.STEP_EPOCHS": _MULTI_STEP,
}


def warn_of_unread(cfgs: Sequence[CfgNode], keys: Iterable[str]) -> None:
    """Warns of keys that the user has set, but no stage of the run reads.

    Examples are ``MODEL.FCOS.NMS_THRESH_TEST 0.5`` for a RetinaNet, and ``SOLVER.STEPS (500,)`` for
    a cosine schedule.

    Args:
        cfgs: configs of the stages.
        keys: the dotted keys that the user has set.
    """
    unread = list(keys)
    try:
        for cfg in cfgs:
            unread = find_unread(cfg, unread)
        found = [key + _suggest(cfgs[-1], key) for key in unread]
    except Exception:  # the caller builds the models too, and reports the error
        return
    if found:
        names = dict.fromkeys(cfg.MODEL.META_ARCHITECTURE for cfg in cfgs)
        logger.warning(f"Overrides without effect on {' and '.join(names)}: {', '.join(found)}")


def _suggest(cfg: CfgNode, key: str) -> str:
    """Returns, in brackets, what the user may have meant: "" if this is unknown.

    These are the value of another key that ``key`` needs, or the keys with the same last word that
    the model reads.
    """
    if key in _NEEDS:
        other, value = _NEEDS[key]
        return f" (it needs {other} {value})"
    word = key.rpartition(".")[2]
    others = [
        other
        for other, _ in list_leaves(cfg.MODEL, "MODEL.")
        if other.endswith(f".{word}") and other != key
    ]
    unread = find_unread(cfg, others)
    read = [other for other in others if other not in unread]
    if not read:
        return ""
    return f" (do you mean {' or '.join(read)}?)"


def find_unread(cfg: CfgNode, keys: Iterable[str]) -> list[str]:
    """Returns those of the dotted ``keys`` whose values have no effect, in their order.

    Of ``MODEL``, these are the keys that are not read when the model is built, except those that
    the data, the training or the inference read. Of ``SOLVER``, they are the keys of another
    optimizer or schedule.
    """
    is_unread: dict[str, bool] = {}
    of_model = []
    for key in keys:
        is_unread[key] = False
        if key in _NEEDS:
            other, value = _NEEDS[key]
            is_off = not get_value(cfg, key)  # such as SOLVER.STEPS ()
            is_unread[key] = not is_off and get_value(cfg, other) != value
        elif key.startswith("MODEL.") and not key.startswith(_READ_ELSEWHERE):
            of_model.append(key)
    if of_model:
        read: set[str] = set()
        build_model(_Recording.of(with_values(cfg, {"MODEL.DEVICE": "cpu"}), read))
        is_unread |= {key: key not in read for key in of_model}
    return [key for key, unread in is_unread.items() if unread]


class _Recording(CfgNode):
    """A config that notes which of its keys are read. Copies of it do so too."""

    @classmethod
    def of(cls, cfg: CfgNode, read: set[str], prefix: str = "") -> "_Recording":
        """Returns a copy of a config, which adds the dotted keys of values to ``read``.

        ``prefix`` is that of the keys of ``cfg``, such as "MODEL.".
        """
        node = cls()
        # Not attributes, which would be keys of the config.
        node.__dict__.update(cfg.__dict__, read=read, prefix=prefix)
        for key, value in cfg.items():
            if isinstance(value, CfgNode):
                value = cls.of(value, read, f"{prefix}{key}.")
            dict.__setitem__(node, key, value)
        return node

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if not isinstance(value, CfgNode):
            self.__dict__["read"].add(self.__dict__["prefix"] + key)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Recording":
        node = type(self)()
        node.__dict__.update(self.__dict__)
        for key, value in self.items():
            dict.__setitem__(node, key, copy.deepcopy(value, memo))
        return node
