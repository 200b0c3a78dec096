# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation of weights that were trained before."""

import logging
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import print_csv_format
from detectron2.utils import comm

from qbheat_det.checkpoint import ExactCheckpointer
from qbheat_det.core.errors import UserError
from qbheat_det.deployment import deploy_by_config

from .evaluation import Evaluation
from .knn_look import NeighbourScorer, names_neighbours
from .trainer import Trainer

logger = logging.getLogger(__name__)


def evaluate(cfg: CfgNode, *, resume: bool = False) -> dict[str, Any]:
    """Evaluates ``MODEL.WEIGHTS``, or the last checkpoint of ``OUTPUT_DIR`` with ``resume``.

    Returns:
        Results by task, as ``Trainer.train``.

    Raises:
        UserError: there are no weights to evaluate, or they do not fit the model exactly.
    """
    if not cfg.MODEL.WEIGHTS and not resume:
        raise UserError("--eval-only needs weights: add MODEL.WEIGHTS FILE, or --resume")
    model = Trainer.build_model(cfg)
    checkpointer = ExactCheckpointer(model, cfg.OUTPUT_DIR, class_names=cfg.MODEL.CLASS_NAMES)
    if resume and not checkpointer.has_checkpoint():
        raise UserError(f"--resume finds no checkpoint in '{cfg.OUTPUT_DIR}' to evaluate")
    path = checkpointer.find_checkpoint_to_resume() if resume else cfg.MODEL.WEIGHTS
    checkpointer.load(path, checkpointables=[])
    if cfg.MODEL.DEPLOY.ENABLED:
        model = deploy_by_config(model.eval(), cfg.MODEL.DEPLOY)
        logger.info(f"Deployed:\n{model.report}")
    evaluation = Evaluation(
        cfg, build_loader=Trainer.build_test_loader, build_evaluator=Trainer.build_evaluator
    )
    results = evaluation(model)
    if names_neighbours(cfg) and comm.is_main_process():
        model.eval()
        results = {**results, "knn": NeighbourScorer(cfg, model)(model).to_dict()}
        print_csv_format({"knn": results["knn"]})
    return results
