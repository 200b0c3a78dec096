# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation of trained weights, without training."""

import logging
from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import print_csv_format
from detectron2.utils import comm
from torch import nn

from qbheat_det.checkpoint import ExactCheckpointer
from qbheat_det.core.errors import UserError

from .evaluation import Evaluation
from .hooks import NeighbourScorer, scores_neighbours
from .trainer import Trainer

logger = logging.getLogger(__name__)


def evaluate(
    cfg: CfgNode, *, resume: bool = False, prepare: Callable[[nn.Module], nn.Module] | None = None
) -> dict[str, Any]:
    """Evaluates ``MODEL.WEIGHTS``, or with ``resume`` the last checkpoint of ``OUTPUT_DIR``.

    Args:
        cfg: of the weights and the data.
        resume: see above.
        prepare: called with the model in eval mode; what it returns is evaluated, for example a
            deployed form. The nearest-neighbour score is always that of the model itself.

    Returns:
        Results by task, as ``Trainer.train``.

    Raises:
        UserError: there are no weights, or they do not fit the model exactly.
    """
    if not cfg.MODEL.WEIGHTS and not resume:
        raise UserError("--eval-only needs weights: add MODEL.WEIGHTS FILE, or --resume")
    model = Trainer.build_model(cfg).eval()
    checkpointer = ExactCheckpointer(model, cfg.OUTPUT_DIR, class_names=cfg.MODEL.CLASS_NAMES)
    if resume and not checkpointer.has_checkpoint():
        raise UserError(f"--resume finds no checkpoint in '{cfg.OUTPUT_DIR}' to evaluate")
    path = checkpointer.find_checkpoint_to_resume() if resume else cfg.MODEL.WEIGHTS
    checkpointer.load(path, checkpointables=[])
    evaluation = Evaluation(
        cfg, build_loader=Trainer.build_test_loader, build_evaluator=Trainer.build_evaluator
    )
    results = evaluation(prepare(model) if prepare else model)
    if scores_neighbours(cfg) and comm.is_main_process():
        results = {**results, "knn": NeighbourScorer(cfg, model)(model)}
        print_csv_format({"knn": results["knn"]})
    return results
