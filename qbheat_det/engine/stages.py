# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs of two stages: ``SOLVER.FIRST_STAGE`` names the config of the first one.

Usually the first stage trains a head on cached features of a frozen encoder, which takes minutes,
and the second stage trains all weights. Each stage is a run in a folder of its own.
"""

import dataclasses
from pathlib import Path

from .resume import name_last_checkpoint
from .run_flags import WHOLE_BACKBONE, RunFlags

_FOLDER = "first_stage"
_WEIGHTS = "model_final.safetensors"
# Overrides that both stages share; all others are for the second stage.
_SHARED = ("DATALOADER.", "DATASETS.", "FLOAT32_PRECISION", "INPUT.TILE", "MODEL.", "SEED",
           "SOLVER.AMP.")  # fmt: skip
_OWN = ("DATASETS.UNLABELLED", "MODEL.BACKBONE.FREEZE_AT", "MODEL.CACHE_FEATURES.ENABLED",
        "MODEL.SEMI.")  # fmt: skip


def find_first_stage(flags: RunFlags) -> RunFlags | None:
    """Returns the flags of the first stage, or None if the run has none.

    The first stage has the same data, device and model. It is left out if the command evaluates,
    names weights or freezes the backbone, and if the second stage already has a checkpoint.
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
    return dataclasses.replace(
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


def is_done(stage: RunFlags) -> bool:
    """Whether a first stage that is resumed has its final weights."""
    return stage.resume and (Path(stage.output) / _WEIGHTS).is_file()


def start_from(stage: RunFlags, flags: RunFlags) -> RunFlags:
    """Returns the flags of the second stage, which starts from the weights of the first one."""
    weights = str(Path(stage.output) / _WEIGHTS)
    config = flags.config_file or flags.name_default_config()
    return dataclasses.replace(flags, config_file=config, weights=weights, resume=False)
