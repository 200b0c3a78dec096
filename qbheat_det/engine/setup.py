# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prepares the output folder, the logs and the random seeds of a stage."""

import logging

import torch
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng

from qbheat_det.config import dump_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable

from .logs import open_log
from .run import Stage

logger = logging.getLogger(__name__)


def setup(stage: Stage, *, eval_only: bool = False) -> None:
    """Prepares the output folder, logs and random seed, like Detectron2's ``default_setup``.

    Writes the files of ``RunData.write_files``. ``Trainer.train`` writes ``config.yaml``.

    Raises:
        UserError: the folder is not writable.
    """
    cfg = stage.cfg
    folder = stage.folder
    rank = comm.get_rank()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"OUTPUT_DIR '{folder}': {error.strerror}") from error
    check_writable(folder / "config.yaml")
    stage.data.register()
    open_log(folder, rank=rank)
    if stage.title:
        logger.info(stage.title)
    if rank == 0:
        stage.data.write_files(folder, is_temporary=stage.is_temporary)
    if not eval_only:
        logger.info(f"Output goes to '{folder}', with all messages in log.txt")
    stage.data.log(folder, is_temporary=stage.is_temporary)
    logger.debug(f"Process {rank} of {comm.get_world_size()}")
    logger.debug(f"Environment:\n{collect_env_info()}")
    logger.debug(f"Config:\n{dump_config(cfg)}")
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + rank)
    if eval_only:
        return
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    precision = cfg.get("FLOAT32_PRECISION", "")  # missing in Detectron2 0.6
    if precision:
        torch.set_float32_matmul_precision(precision)
