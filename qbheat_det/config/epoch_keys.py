# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which of two spellings of a schedule holds, epochs or iterations: the one that came last."""

import ast
from collections.abc import Mapping, Sequence

from detectron2.config import CfgNode

from qbheat_det.errors import UserError

# A key in epochs, and the key of Detectron2 in iterations that is worked out from it.
EPOCH_KEYS = {
    "SOLVER.EPOCHS": "SOLVER.MAX_ITER",
    "SOLVER.STEP_EPOCHS": "SOLVER.STEPS",
    "SOLVER.WARMUP_EPOCHS": "SOLVER.WARMUP_ITERS",
    "SOLVER.CHECKPOINT_EPOCHS": "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_EPOCHS": "TEST.EVAL_PERIOD",
    "LOOK.EPOCHS": "LOOK.PERIOD",
}
# Those that the config of every run holds; LOOK came later.
_OLDER = {key for pair in EPOCH_KEYS.items() for key in pair if not key.startswith("LOOK.")}


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
