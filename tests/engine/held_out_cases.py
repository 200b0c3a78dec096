# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny pre-training runs from the command line's flags, for tests of what is held out."""

import argparse
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.engine import build_config, evaluate
from tests.data.pictures import draw, save
from tests.engine.tiny_pretraining import OPTS as PRETRAINING_OPTS
from tests.engine.tiny_pretraining import RECIPE
from tests.engine.tiny_training import parse_run, start_run

OPTS = {
    **PRETRAINING_OPTS,
    "DATALOADER.NUM_WORKERS": "0",
    "SOLVER.IMS_PER_BATCH": "4",
    "SOLVER.ACCUMULATE": "1",
    "SOLVER.MAX_ITER": "2",
}


def make_folder(folder: Path, count: int, *, first: int = 0) -> Path:
    """Draws pictures of 40 pixels as JPEGs."""
    folder.mkdir(parents=True)
    for i in range(first, first + count):
        save(folder / f"{i}.jpg", draw(40, 40, seed=i))
    return folder


def configure(
    opts: dict[str, str], *flags: str, config: str = RECIPE
) -> tuple[CfgNode, argparse.Namespace]:
    """Returns the config that a command line gives, and its arguments."""
    args = parse_run(config, {**OPTS, **opts}, *flags)
    return build_config(args), args


def train(
    output_dir: Path, opts: dict[str, str], *flags: str, config: str = RECIPE
) -> dict[str, Any]:
    """Trains to the end; returns the last results."""
    args = parse_run(config, {**OPTS, **opts, "OUTPUT_DIR": str(output_dir)}, *flags)
    return start_run(args).train()


def evaluate_weights(args: argparse.Namespace) -> dict[str, Any]:
    """The job of one process: ``--eval-only`` of ``args.weights`` on ``args.folder``.

    Where there are ``args.classes``, they vote on themselves.
    """
    flags = ["--eval-only", "--val-image-folder", args.folder]
    if hasattr(args, "classes"):
        flags += ["--knn-train-folder", args.classes, "--knn-val-folder", args.classes]
    cfg, _ = configure({"MODEL.WEIGHTS": args.weights, "OUTPUT_DIR": args.output_dir}, *flags)
    try:
        return evaluate(cfg)
    finally:
        for name in (*cfg.DATASETS.TEST, *cfg.TEST.KNN.TRAIN, *cfg.TEST.KNN.VAL):
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
