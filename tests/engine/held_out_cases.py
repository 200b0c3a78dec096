# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny pre-training runs from the command line's flags, for tests of what is held out."""

import argparse
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.config import get_config_path
from qbheat_det.engine import Trainer, build_config, evaluate, setup
from tests.data.pictures import draw, save
from tests.engine.tiny_pretraining import TINY_ENCODER
from tools.arguments import add_data_flags, add_image_flags

RECIPE = get_config_path("quick_schedules/qb_heat_285M_toy.yaml")
OPTS = {
    **TINY_ENCODER,
    "MODEL.DEVICE": "cpu",
    "MODEL.QB_HEAT.FEATURE_DIM": "16",
    "MODEL.QB_HEAT.DECODER_DEPTH": "1",
    "MODEL.QB_HEAT.DECODER_DIM": "16",
    "INPUT.PRETRAIN.SIZE": "64",
    "DATALOADER.NUM_WORKERS": "0",
    "SOLVER.IMS_PER_BATCH": "4",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.LOG_PERIOD": "1",
    "SOLVER.WARMUP_ITERS": "1",
    "VIS.ENABLED": "False",
    "SEED": "3",
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
    """Returns the config that a command line gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-file", default="")
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("opts", nargs="*", default=[])
    add_data_flags(parser)
    add_image_flags(parser)
    words = [word for pair in {**OPTS, **opts}.items() for word in pair]
    args = parser.parse_args(["--config-file", config, *flags, *words])
    return build_config(args), args


def train(
    output_dir: Path, opts: dict[str, str], *flags: str, config: str = RECIPE
) -> dict[str, Any]:
    """Trains to the end; returns the last results."""
    cfg, args = configure({**opts, "OUTPUT_DIR": str(output_dir)}, *flags, config=config)
    setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


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
