# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A whole run of QB-Heat in seconds, from a shipped recipe."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from qbheat_det.config import get_config_path
from qbheat_det.engine import Trainer, build_config, setup
from tools.arguments import add_data_flags, add_training_flags

from .gradient_cases import BLOCKS

RECIPE = get_config_path("quick_schedules/qb_heat_285M_toy.yaml")
TINY_ENCODER = {
    "MODEL.MOBILE_FORMER.VARIANT": "custom",
    "MODEL.MOBILE_FORMER.BLOCKS": str(BLOCKS),
    "MODEL.MOBILE_FORMER.STEM_CHANNELS": "8",
    "MODEL.MOBILE_FORMER.TOKEN_DIM": "16",
    "MODEL.MOBILE_FORMER.EXPANDED_CHANNELS": "32",
}
"""Overrides that put a Mobile-Former of some thousand parameters in place of a recipe's."""
OPTS = {
    **TINY_ENCODER,
    "MODEL.DEVICE": "cpu",
    "MODEL.QB_HEAT.FEATURE_DIM": "16",
    "MODEL.QB_HEAT.DECODER_DEPTH": "1",
    "MODEL.QB_HEAT.DECODER_DIM": "16",
    "INPUT.PRETRAIN.SIZE": "64",
    "SOLVER.IMS_PER_BATCH": "5",
    "SOLVER.ACCUMULATE": "2",
    "SOLVER.MAX_ITER": "4",
    "SOLVER.CHECKPOINT_PERIOD": "2",
    "SOLVER.LOG_PERIOD": "1",
    "SOLVER.BASE_LR": "0.1",  # for 256 images
    "SOLVER.WARMUP_ITERS": "1",
    "VIS.ENABLED": "False",
    "SEED": "3",
}


def train(output_dir: Path, opts: Mapping[str, str], *flags: str) -> Trainer:
    """Trains to the end, as ``tools/train_net.py`` does; the data set is named in ``opts``."""
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    add_data_flags(parser)
    pairs = {**OPTS, **opts, "OUTPUT_DIR": str(output_dir)}
    words = [word for pair in pairs.items() for word in pair]
    args = parser.parse_args(["--config-file", RECIPE, *flags, *words])
    cfg = build_config(args)
    setup(cfg, args)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    trainer.train()
    return trainer
