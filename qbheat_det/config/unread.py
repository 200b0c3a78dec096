# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds config keys that a run does not read, so that their values have no effect."""

import contextlib
import copy
import logging
from collections.abc import Collection, ItemsView, Iterator, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from .loading import get_value, with_values

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
    "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE",
    "MODEL.SEMI.",
    "MODEL.TEACHER.",
    "MODEL.WEIGHTS",
)
_MULTI_STEP = ("SOLVER.LR_SCHEDULER_NAME", ("WarmupMultiStepLR",))
_FIXED_GAMMA = ("SOLVER.LR_SCHEDULER_NAME", ("WarmupStepWithFixedGammaLR",))
# Keys that are read only if another key has one of these values.
_NEEDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "SOLVER.BETAS": ("SOLVER.OPTIMIZER", ("ADAMW",)),
    "SOLVER.EMA.DECAY": ("SOLVER.EMA.ENABLED", (True,)),
    "SOLVER.GAMMA": (
        "SOLVER.LR_SCHEDULER_NAME",
        ("WarmupMultiStepLR", "WarmupStepWithFixedGammaLR"),
    ),
    "SOLVER.MOMENTUM": ("SOLVER.OPTIMIZER", ("SGD",)),
    "SOLVER.NESTEROV": ("SOLVER.OPTIMIZER", ("SGD",)),
    "SOLVER.NUM_DECAYS": _FIXED_GAMMA,
    "SOLVER.RESCALE_INTERVAL": _FIXED_GAMMA,
    "SOLVER.STEPS": _MULTI_STEP,
    "SOLVER.STEP_EPOCHS": _MULTI_STEP,
}
# Last words that keys of different meanings share. No such key is suggested for another.
_COMMON_WORDS = ("ENABLED", "NAME", "NORM", "NUM_CLASSES", "WEIGHT")
_MAX_SUGGESTIONS = 2


def describe_unread(stages: Sequence[tuple[CfgNode, Collection[str]]]) -> str:
    """Returns a line about the keys that the user has set, but no stage of a run reads.

    Examples are ``MODEL.FCOS.NMS_THRESH_TEST 0.5`` for a RetinaNet, and ``SOLVER.STEPS (500,)`` for
    a cosine schedule. Other keys than those of the model, the optimizer and the schedule are taken
    as read.

    Args:
        stages: the config of each stage, and the dotted keys that the user has set for it.

    Returns:
        The line, with what the user may have meant; "" if all keys are read.
    """
    questions: dict[str, str] = {}  # by key that a stage does not read
    read: set[str] = set()
    for cfg, keys in stages:
        unread = find_unread(cfg, keys)
        questions |= unread
        read |= set(keys) - set(unread)
    found = [key + question for key, question in questions.items() if key not in read]
    if not found:
        return ""
    names = dict.fromkeys(cfg.MODEL.META_ARCHITECTURE for cfg, _ in stages)
    return f"Overrides without effect on {' and '.join(names)}: {', '.join(found)}"


def warn_of_unread(cfgs: Sequence[CfgNode], keys: Sequence[str]) -> None:
    """Warns of those of the dotted ``keys`` of ``MODEL`` that no model reads.

    For commands without training, which read no key of ``SOLVER``.
    """
    of_model = [key for key in keys if key.startswith("MODEL.")]
    text = describe_unread([(cfg, of_model) for cfg in cfgs])
    if text:
        logger.warning(text)


def find_unread(cfg: CfgNode, keys: Collection[str]) -> dict[str, str]:
    """Finds those of the dotted ``keys`` whose values have no effect.

    Of ``MODEL``, these are the keys that are not read when the model is built, except those that
    the data, the training or the inference read. Of ``SOLVER``, they are the keys of another
    optimizer or schedule.

    Returns:
        What the user may have meant, in brackets, by key; "" if this is unknown.
    """
    unread: dict[str, str] = {}
    for key in keys:
        if key in _NEEDS and get_value(cfg, key):  # not an empty value, such as SOLVER.STEPS ()
            other, values = _NEEDS[key]
            if get_value(cfg, other) not in values:
                unread[key] = f" (it needs {other} {' or '.join(map(str, values))})"
    of_model = [
        key for key in keys if key.startswith("MODEL.") and not key.startswith(_READ_ELSEWHERE)
    ]
    if of_model:
        read = _list_read(cfg)
        unread |= {key: _suggest(key, read) for key in of_model if key not in read}
    return unread


def _suggest(key: str, read: Collection[str]) -> str:
    """Returns a question that names the keys in ``read`` with the same last word, or ""."""
    word = key.rpartition(".")[2]
    others = [
        other
        for other in sorted(read)
        if other.endswith(f".{word}") and not other.startswith(_READ_ELSEWHERE)
    ]
    if not others or len(others) > _MAX_SUGGESTIONS or word in _COMMON_WORDS:
        return ""
    return f" (do you mean {' or '.join(others)}?)"


class _AllKeys(frozenset[str]):
    """Stands for the keys of a model that may read any key, also later."""

    def __contains__(self, key: object) -> bool:
        return True


def _list_read(cfg: CfgNode) -> Collection[str]:
    """Returns the dotted keys that are read when the model of ``cfg`` is built.

    Builds the model on the CPU, without changes to the random state and without messages. Returns
    ``_AllKeys`` if this fails, or if the model keeps the config.
    """
    read: set[str] = set()
    recording = _Recording.of(with_values(cfg, {"MODEL.DEVICE": "cpu"}), read)
    try:
        with _without_messages(), torch.random.fork_rng(devices=[]):
            model = build_model(recording)
    except Exception:  # the caller builds the model too, and reports the error
        logger.debug("The model cannot be built on the CPU", exc_info=True)
        return _AllKeys()
    values = [value for module in model.modules() for value in vars(module).values()]
    if any(isinstance(value, CfgNode) for value in values):
        return _AllKeys()
    # Values that each part of joined detectors has in place of the config's.
    parts = cfg.MODEL.JOINED.PARTS
    replaced = set.intersection(*(set(part) for part in parts)) if parts else set()
    return read - replaced


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Context without messages of any logger."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


class _Recording(CfgNode):
    """A config that notes which of its values are read. Copies of it do so too."""

    @classmethod
    def of(cls, cfg: CfgNode, read: set[str], prefix: str = "") -> "_Recording":
        """Returns a copy of a config, which adds the dotted keys of values to ``read``.

        ``prefix`` is that of the keys of ``cfg``, such as "MODEL.".
        """
        node = cls()
        # Not attributes, which would be keys of the config.
        node.__dict__.update(cfg.__dict__, read=read, prefix=prefix)
        for key, value in dict.items(cfg):
            if isinstance(value, CfgNode):
                value = cls.of(value, read, f"{prefix}{key}.")
            dict.__setitem__(node, key, value)
        return node

    def _note(self, key: str) -> None:
        if key in self and not isinstance(dict.__getitem__(self, key), CfgNode):
            self.__dict__["read"].add(self.__dict__["prefix"] + key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:  # makes dict(node) and **node read the values
        return super().__iter__()

    def items(self) -> ItemsView[str, Any]:
        for key in self:
            self._note(key)
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Recording":
        node = type(self)()
        node.__dict__.update(self.__dict__)
        for key in self:
            dict.__setitem__(node, key, copy.deepcopy(dict.__getitem__(self, key), memo))
        return node
