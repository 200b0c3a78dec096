# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A whole run of QB-Heat in seconds, from a shipped recipe, and folders of pictures for it."""

from qbheat_det.config import get_config_path
from tests.data.pictures import draw, save

from .tiny_training import TINY_ENCODER, read_opts, train_recipe

RECIPE = get_config_path("quick_schedules/qb_heat_285M_cells.yaml")
OPTS = {
    **TINY_ENCODER,
    **read_opts("""
MODEL.DEVICE cpu MODEL.QB_HEAT.FEATURE_DIM 16 MODEL.QB_HEAT.DECODER_DEPTH 1
MODEL.QB_HEAT.DECODER_DIM 16 INPUT.PRETRAIN.SIZE 64 DATALOADER.NUM_WORKERS 0 SOLVER.IMS_PER_BATCH 5
SOLVER.ACCUMULATE 2 SOLVER.MAX_ITER 4 SOLVER.CHECKPOINT_PERIOD 2 SOLVER.LOG_PERIOD 1
SOLVER.BASE_LR 0.1 SOLVER.WARMUP_ITERS 1 SEED 3
"""),
}


def make_folder(folder, count, *, first=0):
    """Draws pictures of 40 pixels as JPEGs."""
    folder.mkdir(parents=True)
    for i in range(first, first + count):
        save(folder / f"{i}.jpg", draw(40, 40, seed=i))
    return folder


def train(output_dir, opts, *flags):
    """Trains to the end; the data set is named in ``opts``."""
    return train_recipe(RECIPE, output_dir, {**OPTS, **opts}, *flags)
