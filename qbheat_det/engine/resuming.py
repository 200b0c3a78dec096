# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two verbs that are never mixed: continuing a run, and starting one from weights."""

import argparse
import fnmatch
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.data import TrainStream
from qbheat_det.modeling.contracts import get_backbone, get_encoder

logger = logging.getLogger(__name__)

# What may change when a run goes on: where and how it computes, how far, and what it tells. All
# else would make another run of it.
_FREE = (
    "CUDNN_BENCHMARK",
    "DATALOADER.NUM_WORKERS",
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
    "SOLVER.LOG_PERIOD",
    "SOLVER.WANDB_PROJECT",
    "TEST.*",
    "VIS_PERIOD",
)
_END = ("SOLVER.EPOCHS", "SOLVER.MAX_ITER")


def check_continues(saved: str, cfg: CfgNode) -> None:
    """Checks that a config is that of the run whose checkpoint is continued.

    Args:
        saved: YAML of the run's config, as the checkpoint holds it; empty where it holds none.
        cfg: of the command that resumes it, resolved.

    Raises:
        UserError: something differs that would make it another run.
    """
    before = dict(_leaves(yaml.safe_load(saved) or {}))
    now = dict(_leaves(yaml.safe_load(cfg.dump())))
    if now["SEED"] < 0:  # not asked for: the run keeps its own
        now["SEED"] = before.get("SEED", -1)
    changed = [key for key in now if key in before and before[key] != now[key]]
    refused = [
        f"{key} {before[key]} -> {now[key]}"
        for key in changed
        if key not in _END and not any(fnmatch.fnmatch(key, free) for free in _FREE)
    ]
    if refused:
        raise UserError(
            f"--resume continues a run as it was, but the config has changed: "
            f"{'; '.join(refused)}. Undo that, or start a new run from its weights: MODEL.WEIGHTS "
            "FILE and another OUTPUT_DIR, without --resume"
        )
    for key in changed:
        if key in _END:
            logger.warning("The run's end moved: %s %s -> %s", key, before[key], now[key])
        else:
            logger.info("Changed since the checkpoint: %s %s -> %s", key, before[key], now[key])


def check_same_images(state: Mapping[str, Any], stream: TrainStream) -> None:
    """Checks that a run is continued on the images that it began with.

    Args:
        state: of the trainer, as the checkpoint holds it.
        stream: of the command that resumes it.

    Raises:
        UserError: there are others, or the checkpoint is of another trainer.
    """
    if "num_images" not in state:
        raise UserError(
            "--resume continues runs of this package's trainer, but the checkpoint is of another: "
            "start a new run from its weights with MODEL.WEIGHTS, without --resume"
        )
    before, now = state["num_images"], stream.num_images
    found = f"there are {now} now" if before != now else "their order or their boxes are others now"
    if (before, state["fingerprint"]) != (now, stream.fingerprint):
        raise UserError(
            f"--resume continues a run on {before} training images, but {found}: restore the "
            "data, or start a new run from its weights with MODEL.WEIGHTS"
        )


def check_verbs(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Checks that a command either continues a run or starts one, before anything is written.

    Raises:
        UserError: ``--resume`` with other weights than the run began with, or a new run in a
            folder that holds one.
    """
    asked_for = cfg.MODEL.WEIGHTS if "MODEL.WEIGHTS" in args.opts[::2] else ""
    if args.eval_only:
        if args.resume and asked_for:
            raise UserError(
                "--eval-only --resume evaluates the last checkpoint of OUTPUT_DIR, but "
                f"MODEL.WEIGHTS '{asked_for}' names other weights: leave one of them out"
            )
        return
    folder = Path(cfg.OUTPUT_DIR)
    last = _last_checkpoint(folder)
    if not last:
        if args.resume and asked_for:
            raise UserError(
                f"--resume finds no run in '{folder}' to continue, and MODEL.WEIGHTS "
                f"'{asked_for}' starts a new one: leave --resume out to start, or name the "
                "OUTPUT_DIR of the run"
            )
        return
    if not args.resume:
        raise UserError(
            f"'{folder}' holds a run up to {last}: add --resume to continue it, or name another "
            "OUTPUT_DIR for a new run"
        )
    if asked_for and asked_for != _weights_of(folder):
        raise UserError(
            f"--resume continues the run in '{folder}' from {last}, but MODEL.WEIGHTS "
            f"'{asked_for}' starts a new one: leave MODEL.WEIGHTS out to continue, or leave "
            "--resume out and name another OUTPUT_DIR to start"
        )


def describe_resumption(*, iteration: int, processes: tuple[int, int]) -> str:
    """Returns the line that says where a run goes on and what is not as before.

    Args:
        iteration: the last one that is done.
        processes: how many there were and are.
    """
    before, now = processes
    line = f"Continuing after iteration {iteration}"
    if before == now:
        return f"{line}, with the same images, augmentations and dropout as without a break."
    return (
        f"{line} with {now} processes instead of {before}: the batches are the same images, "
        "augmented the same; dropout and the batch statistics of BatchNorm differ."
    )


def with_seed(cfg: CfgNode, seed: int) -> CfgNode:
    """Returns the config of a run that is continued with its own seed."""
    kept: CfgNode = cfg.clone()
    kept.defrost()
    kept.SEED = seed
    kept.freeze()
    return kept


def warn_of_random_encoder(model: nn.Module, weights: str) -> None:
    """Says so where a head is going to be trained on an encoder that has learned nothing.

    Args:
        model: whose backbone may be frozen to its end, or have its place taken by cached features.
        weights: ``MODEL.WEIGHTS``.
    """
    backbone = get_backbone(model)
    encoder = None if backbone is None else get_encoder(backbone)
    parameters = [] if encoder is None else list(encoder.parameters())
    if not weights and parameters and not any(p.requires_grad for p in parameters):
        logger.warning(
            "The %s is frozen and its weights are random: a head learns little on it. Set "
            "MODEL.WEIGHTS to pre-trained weights, unless this is a baseline",
            type(encoder).__name__,
        )


def holds_run(folder: str) -> bool:
    """Whether a folder has checkpoints to continue from, tagged or not."""
    return bool(_last_checkpoint(Path(folder)))


def find_last_checkpoint(folder: str) -> str:
    """Returns the path of the newest checkpoint in a folder; empty where there is none."""
    name = _last_checkpoint(Path(folder))
    return str(Path(folder) / name) if name and (Path(folder) / name).is_file() else ""


def _last_checkpoint(folder: Path) -> str:
    try:
        return (folder / "last_checkpoint").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return max((path.name for path in folder.glob("model_*.pth")), default="")


def _weights_of(folder: Path) -> str:
    """Returns what the run in a folder began from, as its config.yaml says."""
    config_file = folder / "config.yaml"
    if not config_file.is_file():
        return ""
    try:
        content = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        return str(content["MODEL"]["WEIGHTS"])
    except (KeyError, TypeError, UnicodeDecodeError, yaml.YAMLError):  # written by someone else
        return ""


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
