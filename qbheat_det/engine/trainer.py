# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The one trainer of the package: Detectron2's, with mapper, optimizer and evaluator by config."""

import weakref
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader, build_detection_train_loader
from detectron2.engine import DefaultTrainer, HookBase
from detectron2.evaluation import DatasetEvaluator
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from qbheat_det.checkpoint import ExactCheckpointer, SafeCheckpointer
from qbheat_det.data import build_mapper
from qbheat_det.errors import UserError
from qbheat_det.evaluation import build_evaluator
from qbheat_det.solver import build_optimizer


class Trainer(DefaultTrainer):
    """Trains, evaluates and saves whatever model the config names."""

    def train(self) -> dict[str, Any]:
        """Trains from ``start_iter`` to ``SOLVER.MAX_ITER``.

        Returns:
            The last evaluation's results by task, such as ``{"bbox": {"AP": …}}``; empty on
            processes other than the main one.
        """
        super().train()
        return dict(getattr(self, "_last_eval_results", None) or {})

    def build_hooks(self) -> list[HookBase | None]:
        """Detectron2's hooks, the one that saves with a checkpointer that reads safely."""
        # DefaultTrainer makes its checkpointer without asking, then calls this method.
        self.checkpointer: SafeCheckpointer = SafeCheckpointer(
            self.checkpointer.model, self.cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        return list(super().build_hooks())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume; v0.6 of Detectron2 forgets the inner trainer."""
        return {**super().state_dict(), "_trainer": self._trainer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` gave, the optimizer's state included."""
        super().load_state_dict(state_dict)
        self._trainer.load_state_dict(state_dict["_trainer"])

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Detectron2's ``build_model``, on the configured device.

        Raises:
            UserError: the config describes no model; the sentence is the constructor's.
        """
        try:
            return super().build_model(cfg)
        except (AssertionError, IndexError, KeyError, ValueError) as error:
            raise UserError(
                f"no model can be built from this config: {error} (QBHEAT_TRACEBACK=1 shows where)"
            ) from error

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Optimizer:
        """See ``qbheat_det.solver.build_optimizer``."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> DataLoader[Any]:
        """Detectron2's loader with the mapper that ``INPUT.DATASET_MAPPER_NAME`` names."""
        return build_detection_train_loader(cfg, mapper=build_mapper(cfg, is_train=True))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> DataLoader[Any]:
        """Detectron2's loader with the mapper that ``INPUT.DATASET_MAPPER_NAME`` names."""
        mapper = build_mapper(cfg, is_train=False)
        return build_detection_test_loader(cfg, dataset_name, mapper=mapper)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """See ``qbheat_det.evaluation.build_evaluator``."""
        return build_evaluator(cfg, dataset_name)


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
    checkpointer = ExactCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
    if not cfg.MODEL.WEIGHTS and not checkpointer.has_checkpoint():
        raise UserError(f"--resume finds no checkpoint in '{cfg.OUTPUT_DIR}' to evaluate")
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)
    return dict(Trainer.test(cfg, model))
