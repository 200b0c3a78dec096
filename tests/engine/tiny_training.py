# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A whole training run of seconds, in this process or in one that a test can kill."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils import events

import qbheat_det  # noqa: F401  registers models and data
from qbheat_det.config import get_config_path
from qbheat_det.config.loading import EPOCH_KEYS
from qbheat_det.engine import RunFlags, Trainer, assemble_evaluation, assemble_run, setup
from qbheat_det.engine.registered_sets import CUSTOM_SETS
from tests.tool_modules import load_tool
from tools.train_net import parse_args

from .gradient_cases import BLOCKS


def read_opts(text):
    """Returns overrides by key, of words none of which has a space."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def words_of(opts):
    """Returns the words that ``read_opts`` reads."""
    return [word for pair in opts.items() for word in pair]


CONFIG = get_config_path("quick_schedules/retinanet_small_cells.yaml")
TINY_ENCODER = {
    "MODEL.MOBILE_FORMER.VARIANT": "custom",
    "MODEL.MOBILE_FORMER.BLOCKS": str(BLOCKS),
    "MODEL.MOBILE_FORMER.STEM_CHANNELS": "8",
    "MODEL.MOBILE_FORMER.TOKEN_DIM": "16",
    "MODEL.MOBILE_FORMER.EXPANDED_CHANNELS": "32",
}
"""Overrides that replace a recipe's Mobile-Former by one of some thousand parameters."""
TINY = {
    **TINY_ENCODER,
    **read_opts("""
MODEL.FPN.OUT_CHANNELS 16 MODEL.RETINANET.NUM_CONVS 1 SOLVER.IMS_PER_BATCH 2 SOLVER.LOG_PERIOD 1
SOLVER.WARMUP_ITERS 2 SOLVER.MAX_ITER 5 SOLVER.CHECKPOINT_PERIOD 2 DATALOADER.NUM_WORKERS 0
INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64 TEST.EVAL_PERIOD 0 SEED 3
"""),
}
MF_DETR = read_opts("""
MODEL.META_ARCHITECTURE MFDETR MODEL.BACKBONE.NAME MobileFormer MODEL.MF_DETR.NUM_BLOCKS [1,1,1]
MODEL.MF_DETR.HIDDEN_DIM 16 MODEL.MF_DETR.NHEADS 2 MODEL.MF_DETR.DIM_FEEDFORWARD 32
MODEL.MF_DETR.NUM_OBJECT_QUERIES 8 MODEL.MF_DETR.DROPOUT 0.2 MODEL.MOBILE_FORMER.DROP_PATH 0.2
INPUT.DATASET_MAPPER_NAME detr INPUT.DETR_CROP_RESIZE [64,80] INPUT.DETR_CROP_RANGE [40,64]
""")
"""Overrides that replace the tiny RetinaNet by an MF-DETR with dropout everywhere."""


def forget_runs():
    """Removes what a run leaves in Detectron2's global state."""
    for name in CUSTOM_SETS:
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
    events._CURRENT_STORAGE_STACK.clear()
    for logger in map(logging.getLogger, ("detectron2", "fvcore", "qbheat_det")):
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True


def parse_run(config, opts, *flags):
    """Returns the arguments of ``tools/train_net.py``, for a run as in a new process."""
    forget_runs()
    return parse_args(["--config-file", config, *flags, *words_of(opts)])


def run_tool(argv):
    """Runs ``tools/train_net.py`` in this process; returns its results."""
    results = []
    forget_runs()
    with pytest.MonkeyPatch.context() as patch:
        run_here = lambda main, args: results.append(main(args))  # noqa: E731
        patch.setattr("qbheat_det.engine.run_distributed", run_here)
        load_tool("train_net").invoke_main(argv)
    return results[0]


def assemble(args):
    """Returns the last stage of a run, from parsed arguments or ``RunFlags``."""
    flags = args if isinstance(args, RunFlags) else RunFlags.from_args(args)
    return assemble_evaluation(flags) if flags.eval_only else assemble_run(flags)[-1]


def build_config(args):
    """Returns the config of the last stage of a run."""
    return assemble(args).cfg


def start_run(args):
    """Does what ``tools/train_net.py`` does before the first step."""
    stage = assemble(args)
    setup(stage)
    trainer = Trainer(stage.cfg)
    trainer.resume_or_load(resume=stage.resume)
    return trainer


def train_recipe(config, output_dir, opts, *flags):
    """Trains to the end, and leaves the last results in ``_last_eval_results``."""
    trainer = start_run(parse_run(config, {**opts, "OUTPUT_DIR": str(output_dir)}, *flags))
    trainer.train()
    return trainer


def parse(output_dir, data, opts, *flags):
    """Returns the arguments of a tiny run of a detector."""
    json_file, images = str(data / "annotations.json"), str(data / "images")
    overruled = {iterations for epochs, iterations in EPOCH_KEYS.items() if epochs in opts}
    defaults = {key: value for key, value in TINY.items() if key not in overruled}
    paths = ["--data", json_file, "--val", json_file, "--images", images]
    return parse_run(CONFIG, {**defaults, **opts, "OUTPUT_DIR": str(output_dir)}, *flags, *paths)


def train(output_dir, data, opts, *flags):
    """Trains a detector to the end; returns the last results."""
    return start_run(parse(output_dir, data, opts, *flags)).train()


def train_in_own_process(output_dir, data, opts):
    """What a killed process was doing; quiet, on one thread."""
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    train(Path(output_dir), Path(data), opts, "--resume")


def losses(output_dir):
    """Returns the total loss of every iteration that ``metrics.json`` holds."""
    found = {}
    for line in (output_dir / "metrics.json").read_text().splitlines():
        entry = json.loads(line)
        if "total_loss" in entry:
            assert entry["iteration"] not in found, "an iteration was written twice"
            found[entry["iteration"]] = entry["total_loss"]
    return found


def state(output_dir, name="model_final"):
    """Returns a checkpoint."""
    return dict(torch.load(output_dir / f"{name}.pth", weights_only=True))
