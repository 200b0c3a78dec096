# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What keys mean together: schedules in epochs or iterations, timm's names, the memory format."""

import ast
import difflib
from collections.abc import Mapping, Sequence

import torch
from detectron2.config import CfgNode

from qbheat_det.core.errors import UserError


def find_memory_format(cfg: CfgNode) -> torch.memory_format:
    """Returns the layout that ``MODEL.CHANNELS_LAST`` asks for, on ``MODEL.DEVICE`` if it is None.

    Args:
        cfg: with this package's keys.

    Raises:
        UserError: ``MODEL.CHANNELS_LAST`` is something else than True, False and None.
    """
    asked = cfg.MODEL.CHANNELS_LAST
    if asked not in (None, True, False):  # next to None, configs take any type
        raise UserError(
            f"MODEL.CHANNELS_LAST is True, False or None (the device's own), not '{asked}'"
        )
    on_cpu = torch.device(cfg.MODEL.DEVICE).type == "cpu"
    innermost = on_cpu if asked is None else asked
    return torch.channels_last if innermost else torch.contiguous_format


# A key in epochs, and the key of Detectron2 in iterations that is worked out from it.
EPOCH_KEYS = {
    "SOLVER.EPOCHS": "SOLVER.MAX_ITER",
    "SOLVER.STEP_EPOCHS": "SOLVER.STEPS",
    "SOLVER.WARMUP_EPOCHS": "SOLVER.WARMUP_ITERS",
    "SOLVER.CHECKPOINT_EPOCHS": "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_EPOCHS": "TEST.EVAL_PERIOD",
    "VIS.EPOCHS": "VIS.PERIOD",
}
# Those that the config of every run holds; VIS came later.
_OLDER = {key for pair in EPOCH_KEYS.items() for key in pair if not key.startswith("VIS.")}


def switch_off_overruled_epochs(cfg: CfgNode, layers: Sequence[Mapping[str, object]]) -> None:
    """Switches off, in place, each key in epochs that a later layer gave in iterations.

    So ``SOLVER.MAX_ITER 100`` on the command line trains 100 iterations of a recipe in epochs.

    Args:
        cfg: the config with all layers merged.
        layers: dotted keys and values as they were written, the lowest ``_BASE_`` first and the
            command line last.

    Raises:
        UserError: one layer gives both. The config of a finished run does, and is understood:
            its iterations were worked out from its epochs.
    """
    overruled: set[str] = set()
    for layer in layers:
        is_whole_config = set(layer) >= _OLDER
        for epochs, iterations in EPOCH_KEYS.items():
            if epochs in layer:
                overruled.discard(epochs)
                if iterations in layer and _is_on(layer[epochs]) and not is_whole_config:
                    raise UserError(
                        f"{epochs} {layer[epochs]} and {iterations} {layer[iterations]} are given "
                        "side by side and mean the same thing: leave one out"
                    )
            elif iterations in layer:
                overruled.add(epochs)
    for key in overruled:
        section, name = key.split(".")
        cfg[section][name] = type(cfg[section][name])()


def _is_on(value: object) -> bool:
    """Tells a key in epochs that is set from one that is 0 or empty, also as it is typed."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # merging has its own sentence for what is no number
            return True
    return bool(value)


TIMM_PREFIX = "timm:"
"""What stands before the name of a timm model where a config names a backbone."""


def check_timm_name(name: str) -> None:
    """
    Raises:
        UserError: timm has no model of that name, and the sentence has the nearest ones; or the
            name goes on with the tag of weights.
    """
    import timm  # takes seconds, and most configs name none of its models

    model, _, tag = name.partition(".")
    if not timm.is_model(model):
        near = difflib.get_close_matches(model, timm.list_models(), n=3, cutoff=0.3)
        raise UserError(
            f"timm {timm.__version__} has no model '{model}'; did you mean "
            f"{', '.join(near) or 'resnet50'}?"
        )
    if tag:
        raise UserError(
            f"'{name}' names weights, the model is '{model}': to start from these weights, set "
            f"MODEL.WEIGHTS to 'timm://{name}'"
        )


def check_timm_backbones(cfg: CfgNode) -> None:
    """Checks the two keys that can name a timm model as ``timm:<name>``.

    Raises:
        UserError: see ``check_timm_name``.
    """
    for key, value in (
        ("MODEL.BACKBONE.NAME", cfg.MODEL.BACKBONE.NAME),
        ("MODEL.FPN.BOTTOM_UP", cfg.MODEL.FPN.BOTTOM_UP),
    ):
        if value.startswith(TIMM_PREFIX):
            try:
                check_timm_name(value.removeprefix(TIMM_PREFIX))
            except UserError as error:
                raise UserError(f"{key} '{value}': {error}") from None
