# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Decides whether a command starts a run or resumes one, and checks that it can.

- ``decide_to_resume`` runs first: it fetches the run from ``SOLVER.CHECKPOINT_URL`` and detects a
  restart by torchrun.
- ``check_start`` refuses a second run in one folder, and other weights for a resumed run.
- ``check_same_config`` and ``check_same_images`` compare a resumed run with its checkpoint.
"""

import argparse
import fnmatch
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import nn

from qbheat_det.checkpoint import info_of
from qbheat_det.config.loading import list_leaves
from qbheat_det.core.errors import UserError
from qbheat_det.data import TrainStream
from qbheat_det.modeling.contracts import get_backbone, get_encoder

from .mirror import fetch_run
from .run_flags import RunFlags
from .run_record import RUN_FILE, find_launch, name_last_checkpoint, read_run_record

logger = logging.getLogger(__name__)

# Keys that may change in a resumed run: device, speed, length and logs.
_FREE = (
    "CUDNN_BENCHMARK",
    "DATALOADER.CACHE_GB",
    "DATALOADER.NUM_WORKERS",
    "DATALOADER.RETRY_SECONDS",
    "DATASETS.CHECK_IMAGES",
    "DATASETS.TEST",
    "FLOAT32_PRECISION",
    "VIS.*",
    "MODEL.ACTIVATION_CHECKPOINTING",
    "MODEL.CACHE_FEATURES.FOLDER",
    "MODEL.CHANNELS_LAST",
    "MODEL.DEPLOY.*",
    "MODEL.DEVICE",
    "MODEL.WEIGHTS",
    "OUTPUT_DIR",
    "SOLVER.ACCUMULATE",
    "SOLVER.CHECKPOINT*",
    "SOLVER.KEEP_MEMORY",
    "SOLVER.LOG_*",
    "SOLVER.WANDB_PROJECT",
    "TEST.*",
    "VIS_PERIOD",
)
_END = ("SOLVER.EPOCHS", "SOLVER.MAX_ITER")


def check_same_config(saved: str, cfg: CfgNode) -> None:
    """Compares the config of a resumed run with its checkpoint, and logs allowed changes.

    Args:
        saved: YAML in the checkpoint; may be empty.
        cfg: config of the resumed run.

    Raises:
        UserError: a key differs that must not change.
    """
    before = dict(list_leaves(yaml.safe_load(saved) or {}))
    now = dict(list_leaves(yaml.safe_load(cfg.dump())))
    if cfg.SEED < 0:  # keeps the seed of the run
        now["SEED"] = before.get("SEED", -1)
    changed = {
        key: f"{key} {before[key]} -> {now[key]}"
        for key in now.keys() & before.keys()
        if before[key] != now[key]
    }
    refused = [
        change
        for key, change in sorted(changed.items())
        if key not in _END and not any(fnmatch.fnmatch(key, pattern) for pattern in _FREE)
    ]
    if refused:
        raise UserError(
            f"--resume continues a run unchanged, but the config differs: {'; '.join(refused)}"
        )
    for key, change in changed.items():
        level = logging.WARNING if key in _END else logging.INFO
        logger.log(level, f"Changed since the checkpoint: {change}")


def check_same_images(state: Mapping[str, Any], stream: TrainStream) -> None:
    """Checks that a resumed run has the training images of its checkpoint.

    Raises:
        UserError: they differ, or another trainer wrote the checkpoint.
    """
    if "num_images" not in state:
        raise UserError(
            "--resume needs a checkpoint of this package's trainer: start a new run with "
            "MODEL.WEIGHTS"
        )
    before, now = state["num_images"], stream.num_images
    if (before, state["fingerprint"]) == (now, stream.fingerprint):
        return
    found = f"there are {now} now" if before != now else "their order or their boxes have changed"
    raise UserError(f"--resume continues a run on {before} training images, but {found}")


def check_start(cfg: CfgNode, flags: RunFlags) -> None:
    """Checks that a command either resumes a run or starts one.

    Raises:
        UserError: ``--resume`` has other weights than the run started from, or the folder of a new
            run contains a run.
    """
    given = cfg.MODEL.WEIGHTS if "MODEL.WEIGHTS" in flags.overrides else ""
    folder, last = Path(cfg.OUTPUT_DIR), name_last_checkpoint(Path(cfg.OUTPUT_DIR))
    if flags.eval_only:
        if flags.resume and given:
            raise UserError(f"--resume evaluates a checkpoint, not MODEL.WEIGHTS '{given}'")
    elif last and not flags.resume:
        raise UserError(
            f"OUTPUT_DIR '{folder}' contains a run up to {last}: add --resume to continue it, or "
            "name another --output"
        )
    elif flags.resume and given and not (last and given == _initial_weights(folder)):
        raise UserError(
            f"--resume continues the run in OUTPUT_DIR '{folder}', but MODEL.WEIGHTS '{given}' "
            "starts a new one: leave one of them out"
        )


def warn_of_weights(model: nn.Module, cfg: CfgNode) -> None:
    """Warns of a frozen encoder without ``MODEL.WEIGHTS``, and of weights for other pixels."""
    weights, backbone = cfg.MODEL.WEIGHTS, get_backbone(model)
    if weights and (info := info_of(weights)) and info.pixel_mean:
        used = cfg.INPUT.FORMAT, tuple(cfg.MODEL.PIXEL_MEAN), tuple(cfg.MODEL.PIXEL_STD)
        if used != (info.pixel_format, info.pixel_mean, info.pixel_std):
            logger.warning(
                f"'{weights}' is for {info.pixel_format} pixels of mean {list(info.pixel_mean)} "
                f"and deviation {list(info.pixel_std)}: set INPUT.FORMAT, MODEL.PIXEL_MEAN and "
                "MODEL.PIXEL_STD to these"
            )
    if weights or backbone is None:
        return
    encoder = get_encoder(backbone)
    parameters = list(encoder.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        logger.warning(
            f"The {type(encoder).__name__} is frozen with random weights: set MODEL.WEIGHTS, "
            "unless this is a baseline"
        )


def _initial_weights(folder: Path) -> str:
    try:
        content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return str(content["MODEL"]["WEIGHTS"])
    except (OSError, KeyError, TypeError, UnicodeDecodeError, yaml.YAMLError):
        return ""


def decide_to_resume(args: argparse.Namespace | RunFlags) -> bool:
    """Returns whether to resume the run in ``OUTPUT_DIR``; equal on all processes.

    True with ``--resume``. Also true if the folder has a checkpoint, and the run's last start had
    the same ``--rdzv-id`` of torchrun: torchrun or the job's queue has restarted it. A run without
    a checkpoint starts from the beginning.

    Raises:
        UserError: the processes find different checkpoints, or ``SOLVER.CHECKPOINT_URL`` cannot
            be read.
    """
    flags = RunFlags.read(args)
    if flags.eval_only:
        return flags.resume
    cfg = flags.load_config()
    if cfg.SOLVER.CHECKPOINT_URL:
        if comm.get_local_rank() == 0:
            fetch_run(cfg)
        comm.synchronize()
    folder = Path(cfg.OUTPUT_DIR)
    last = name_last_checkpoint(folder)
    is_restart = bool(last) and not flags.resume and _began_in_this_launch(folder)
    views = comm.all_gather((last, flags.resume or is_restart))
    main, resumes = views[0]
    if not resumes:
        return False
    if others := {name for name, _ in views} - {main}:
        raise UserError(
            f"OUTPUT_DIR '{folder}' ends with '{main or 'nothing'}' on the first machine, but with "
            f"'{others.pop() or 'nothing'}' on another: all must see one folder, or bring the run "
            "from SOLVER.CHECKPOINT_URL"
        )
    return True


def _began_in_this_launch(folder: Path) -> bool:
    launch, starts = find_launch(), read_run_record(folder / RUN_FILE)
    return bool(launch and starts and starts[-1].get("launch") == launch)
