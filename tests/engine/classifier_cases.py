# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny classifiers from the command line's flags."""

from qbheat_det.config import get_config_path
from tests.engine.tiny_pretraining import make_folder
from tests.engine.tiny_training import build_config, parse_run, read_opts, train_recipe

RECIPE = get_config_path("objectives/supervised.yaml")
OPTS = read_opts("""
MODEL.DEVICE cpu MODEL.BACKBONE.NAME timm:resnet10t MODEL.BACKBONE.FREEZE_AT 0
MODEL.CLASSIFIER.IN_FEATURE s16 INPUT.PRETRAIN.SIZE 32 INPUT.CLASSIFY.RAND_AUGMENT [9,0.5]
INPUT.CLASSIFY.RANDOM_ERASING 0.25 DATALOADER.NUM_WORKERS 0 SOLVER.IMS_PER_BATCH 4
SOLVER.MAX_ITER 4 SOLVER.CHECKPOINT_PERIOD 2 SOLVER.CHECKPOINTS_KEPT 3 SOLVER.LOG_PERIOD 1
SOLVER.WARMUP_ITERS 1 SEED 3
""")


def make_classes(folder, counts, *, first=0):
    """Draws pictures in class folders, so many in each; returns the folder."""
    for i, (name, count) in enumerate(counts.items()):
        make_folder(folder / name, count, first=first + 20 * i)
    return str(folder)


def configure(opts, *flags, config=RECIPE):
    """Returns the config that a command line gives, and its arguments."""
    args = parse_run(config, {**OPTS, **opts}, *flags)
    return build_config(args), args


def train(output_dir, opts, *flags):
    """Trains to the end, and leaves the last results in ``_last_eval_results``."""
    return train_recipe(RECIPE, output_dir, {**OPTS, **opts}, *flags)
