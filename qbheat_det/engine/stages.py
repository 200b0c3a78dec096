# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs of two stages: ``SOLVER.FIRST_STAGE`` names the config of the first one.

Usually the first stage trains a head on cached features of a frozen encoder, which takes minutes,
and the second stage trains all weights. Each stage is a run in a folder of its own.
"""

import dataclasses
import functools
import operator
from pathlib import Path

from detectron2.config import CfgNode

from qbheat_det.core.errors import UserError

from .resume import decide_to_resume, name_last_checkpoint
from .run_flags import WHOLE_BACKBONE, RunFlags, find_job

_FOLDER = "first_stage"
_WEIGHTS = "model_final.safetensors"
# Overrides that both stages share; all others are for the second stage.
_SHARED = ("DATALOADER.", "DATASETS.", "FLOAT32_PRECISION", "INPUT.FORMAT", "INPUT.TILE", "MODEL.",
           "SEED", "SOLVER.AMP.")  # fmt: skip
_OWN = ("DATASETS.UNLABELLED", "MODEL.BACKBONE.FREEZE_AT", "MODEL.CACHE_FEATURES.ENABLED",
        "MODEL.SEMI.")  # fmt: skip
# Keys that must be equal in both stages, so that the weights fit.
_EQUAL = ("MODEL.META_ARCHITECTURE", "MODEL.BACKBONE.NAME", "MODEL.FPN.BOTTOM_UP",
          "MODEL.FPN.OUT_CHANNELS")  # fmt: skip


def find_first_stage(flags: RunFlags) -> RunFlags | None:
    """Returns the flags of the first stage, or None if the run has none.

    The first stage has the same data, device and model. It is left out if the command evaluates,
    names weights or freezes the backbone, and if the second stage already has a checkpoint. It is
    resumed under the same conditions as the run. All processes must call this function.

    Raises:
        UserError: the config cannot be read, is for another model, or has a first stage itself.
    """
    cfg = flags.load_config()
    overrides = flags.overrides
    if not cfg.SOLVER.FIRST_STAGE or flags.eval_only or "MODEL.WEIGHTS" in overrides:
        return None
    folder = Path(cfg.OUTPUT_DIR)
    if cfg.MODEL.BACKBONE.FREEZE_AT >= WHOLE_BACKBONE or name_last_checkpoint(folder):
        return None
    shared = {
        k: v for k, v in overrides.items() if k.startswith(_SHARED) and not k.startswith(_OWN)
    }
    stage = dataclasses.replace(
        flags,
        config_file=cfg.SOLVER.FIRST_STAGE,
        output=str(folder / _FOLDER),
        unlabelled=(),
        device="",
        epochs=None,
        batch=None,
        image_size=None,
        tile=None,
        opts=[text for pair in shared.items() for text in pair],
    )
    _check(stage, cfg)
    stage.resume = decide_to_resume(stage)
    return stage


def _check(stage: RunFlags, cfg: CfgNode) -> None:
    """Raises a ``UserError`` if the weights of a first stage would not fit ``cfg``."""
    name = f"SOLVER.FIRST_STAGE '{stage.config_file}'"
    try:
        first = stage.load_config()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    if first.SOLVER.FIRST_STAGE:
        raise UserError(f"{name} has a SOLVER.FIRST_STAGE itself, but a run has two stages at most")
    if find_job(first) != find_job(cfg):
        raise UserError(f"{name} trains on {find_job(first)}, but the run on {find_job(cfg)}")
    for key in _EQUAL:
        one, other = (functools.reduce(operator.getitem, key.split("."), c) for c in (first, cfg))
        if one != other:
            raise UserError(f"{name} has {key} {one}, but the run has {other}")


def is_done(stage: RunFlags) -> bool:
    """Whether a resumed first stage already has its final weights."""
    return stage.resume and (Path(stage.output) / _WEIGHTS).is_file()


def start_from(stage: RunFlags, flags: RunFlags) -> RunFlags:
    """Returns the flags of the second stage, which starts from the weights of the first one."""
    weights = str(Path(stage.output) / _WEIGHTS)
    config = flags.config_file or flags.name_default_config()
    return dataclasses.replace(flags, config_file=config, weights=weights, resume=False)
