# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains every model of the package: Detectron2's ``DefaultTrainer`` with some parts replaced.

The data stream can start at any step. Steps can accumulate gradients, and weights can be averaged.
A resumed run gives bit-identical weights to an uninterrupted one.
"""

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase, TrainerBase, hooks
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from qbheat_det.checkpoint import (
    ExactCheckpointer,
    SafeCheckpointer,
    WeightsInfo,
    info_of,
    save_weights,
)
from qbheat_det.config import (
    dump_config,
    find_memory_format,
    reads_our_keys,
    refuse_bad_values,
    with_values,
)
from qbheat_det.core.environment import find_commit
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.data import ImageBatches, TrainStream, build_train_stream
from qbheat_det.fast import Form, optimize
from qbheat_det.feature_cache import DistillationTargets, use_cached_features
from qbheat_det.feature_cache.filling import Fill, fill
from qbheat_det.modeling.contracts import (
    SupportsKeptClasses,
    needs_targets,
    pretrain_only_modules,
)
from qbheat_det.solver import (
    MovableLR,
    build_lr_scheduler,
    build_optimizer,
    describe_schedule,
    resolve_schedule,
)
from qbheat_det.tasks import find_task

from .evaluation import Evaluation
from .hooks import EvalHook, PeriodicCheckpointer, SkippedImages, keep_memory
from .launch import distribute
from .logs import PeriodicWriter, describe_model, warn_of_weights
from .mean_teacher import MeanTeacher, build_eval_hooks
from .old_detector import build_old_detector
from .resume import StopSignals, YieldToNewerStart, check_same_config, check_same_images
from .step import StepTrainer, choose_precision
from .time_limit import EndInTime, TimeLimit

logger = logging.getLogger(__name__)
Hook = TypeVar("Hook", bound=HookBase)


class Trainer(DefaultTrainer):
    """Trains, evaluates and saves the model that a config names.

    Attributes:
        cfg: resolved config, with the iterations and learning rate computed from the data.
        bare_model: the model without the distributed wrapper.
        cached_features: the feature cache; None unless ``MODEL.CACHE_FEATURES`` is enabled.
        targets: cached features that the model learns to predict in distillation; None for other
            models.
        resumed_from: checkpoint that the run was resumed from; None for a new run.
    """

    @reads_our_keys
    def __init__(
        self,
        cfg: CfgNode,
        *,
        allow_partial: bool = False,
        fill: Fill = fill,
        limit: TimeLimit | None = None,
    ) -> None:
        """
        Args:
            cfg: complete config.
            allow_partial: accept weights that lack tensors of the model or have extra ones.
            fill: encodes the missing views of a feature cache.
            limit: the time of the run; None for a run that takes as long as it takes.
        """
        TrainerBase.__init__(self)  # DefaultTrainer's would build parts that are replaced here
        data_loader = self.build_train_loader(cfg)
        # The images determine the iterations of a schedule in epochs.
        self.cfg = resolve_schedule(cfg, num_images=data_loader.num_images)
        logger.info(describe_schedule(cfg, self.cfg, data_loader.num_images))
        cfg = self.cfg
        self.bare_model = self.build_model(cfg)
        optimize(self.bare_model, choose_form(cfg))
        logger.info(describe_model(cfg, self.bare_model))
        # Before the optimizer is built, as it replaces a frozen encoder.
        self.cached_features = use_cached_features(cfg, self.bare_model, fill=fill)
        self.targets = None
        if needs_targets(self.bare_model):
            self.targets = DistillationTargets(cfg, fill=fill)
        precision = choose_precision(cfg)
        optimizer = self.build_optimizer(cfg, self.bare_model)
        self._average = None
        self._mean_teacher = None
        if cfg.SOLVER.EMA.ENABLED:
            self._average = ModelEmaV3(self.bare_model, decay=cfg.SOLVER.EMA.DECAY, use_warmup=True)
            if cfg.DATASETS.UNLABELLED:
                self._mean_teacher = MeanTeacher(self._average.module, precision=precision)
                data_loader.burn_in = round(cfg.MODEL.SEMI.BURN_IN * cfg.SOLVER.MAX_ITER)
        self._old_detector = build_old_detector(cfg, self.bare_model, precision=precision)
        self._trainer = StepTrainer(
            distribute(self.bare_model),
            data_loader,
            optimizer,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            accumulate=cfg.SOLVER.ACCUMULATE,
            precision=precision,
            seed=data_loader.seed,
            log_period=cfg.SOLVER.LOG_PERIOD,
            mean_teacher=self._mean_teacher,
            old_detector=self._old_detector,
        )
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        checkpointables: dict[str, Any] = {"trainer": weakref.proxy(self)}
        if self._average:
            checkpointables["ema"] = self._average.module
        self.checkpointer = SafeCheckpointer(
            self.bare_model,
            cfg.OUTPUT_DIR,
            class_names=cfg.MODEL.CLASS_NAMES,
            allow_partial=allow_partial,
            **checkpointables,
        )
        self.resumed_from: str | None = None
        self._images_seen_before = 0  # in the runs that trained the weights of the start
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        build_test_loader = (self.cached_features or self.targets or self).build_test_loader
        self._evaluation = Evaluation(cfg, build_test_loader)
        self._last_eval_results: dict[str, Any] = {}
        self._limit = limit
        self.register_hooks(self.build_hooks())

    @property
    def evaluated_model(self) -> nn.Module:
        """The model with the moving average of the weights if there is one, else ``bare_model``."""
        return self._average.module if self._average else self.bare_model

    @property
    def seed(self) -> int:
        """Seed for the order and augmentation of images, and for randomness in the model."""
        return self._trainer.seed

    @property
    def stops(self) -> bool:
        """Whether a signal ends the run after this step; the value is equal on all processes."""
        return self._trainer.stops

    def ask_to_stop(self) -> None:
        """Ends the run after this step, with a checkpoint. Signal handlers call this method."""
        self._trainer.asked_to_stop = True

    def resume_or_load(self, resume: bool = True) -> None:
        """Resumes the run in ``OUTPUT_DIR``, or starts a new one from ``MODEL.WEIGHTS``.

        Raises:
            UserError: the weights do not fit the model, or a resumed run has a different config.
        """
        if not (resume and self.checkpointer.has_checkpoint()):
            if resume:
                logger.warning(f"There is no run in '{self.cfg.OUTPUT_DIR}': starting a new one")
            warn_of_weights(self.bare_model, self.cfg)
            self.checkpointer.load(self.cfg.MODEL.WEIGHTS, checkpointables=[])
            if self.checkpointer.info is not None:
                self._images_seen_before = self.checkpointer.info.images_seen or 0
            if self._average:
                self._average.set(self.bare_model)
            if self._old_detector:
                self._old_detector.load(self.cfg.MODEL.WEIGHTS, self.cfg.MODEL.CLASS_NAMES)
            else:
                self._advise_to_keep_classes()
            return
        self.resumed_from = self.checkpointer.find_checkpoint_to_resume()
        info = info_of(self.resumed_from)
        saved = info.config if info else ""
        self._images_seen_before = info.images_seen_before if info else 0
        before = check_same_config(saved, self.cfg)
        self.checkpointer.resume(self.resumed_from)
        self.start_iter = self.iter + 1
        weights = str(before.get("MODEL.WEIGHTS", self.cfg.MODEL.WEIGHTS))  # of the run's start
        self.cfg = with_values(self.cfg, {"SEED": self.seed, "MODEL.WEIGHTS": weights})
        self.cfg.freeze()
        if self._old_detector:
            self._old_detector.load_again(weights, self.cfg.MODEL.CLASS_NAMES)
        self.data_loader.start = self.start_iter
        self.data_loader.seed = self.seed

    def _advise_to_keep_classes(self) -> None:
        """Names the ways to keep classes of the initial weights that the model drops."""
        report = self.checkpointer.report
        is_possible = isinstance(self.bare_model, SupportsKeptClasses)
        if is_possible and report and report.class_change and report.class_change.dropped:
            logger.info(
                "The dropped classes are forgotten: --keep-classes keeps them; or, if the encoder "
                "stays frozen, qbheat join joins both detectors afterwards"
            )

    def train(self) -> dict[str, Any]:
        """Trains from ``start_iter`` to ``max_iter``, which hooks may change.

        Returns:
            Results of the last evaluation by task, such as ``{"bbox": {"AP": …}}``. Empty if all
            iterations were already done, and on all processes except the main one.
        """
        evaluation = self.find_hook(EvalHook)
        if self.start_iter >= self.max_iter and not (evaluation and evaluation.is_owed):
            logger.warning(
                f"All {self.start_iter} iterations are done; a higher SOLVER.MAX_ITER or "
                "SOLVER.EPOCHS continues the run"
            )
            return {}
        if self.cached_features:
            self._evaluation.forget()  # loaders may read the cache of other weights
            self.cached_features.prepare(self.data_loader)
        if self.targets:
            self.targets.prepare(self.data_loader)
        if comm.is_main_process():
            path = Path(self.cfg.OUTPUT_DIR) / "config.yaml"
            write_atomically(path, dump_config(self.cfg).encode())
        try:
            self._run_steps()
        finally:  # otherwise workers wait for the garbage collector
            self._trainer.close()
        logger.info(self._describe_end())
        return self._last_eval_results

    def _run_steps(self) -> None:
        """Does what ``TrainerBase.train`` does, for a run whose end can move."""
        self.iter = self.start_iter
        with EventStorage(self.start_iter) as self.storage:
            try:
                self.before_train()
                try:
                    while self.iter < self.max_iter:
                        self.before_step()
                        self.run_step()
                        self.after_step()
                        self.iter += 1
                finally:  # but not if a hook has not begun
                    self.after_train()
            except UserError:
                raise  # the command prints it
            except Exception:
                logger.exception("Exception during training:")
                raise

    def move_end(self, max_iter: int) -> None:
        """Makes the run end after ``max_iter`` iterations. The learning rate follows.

        Only hooks that run before ``PeriodicCheckpointer`` may call this method, on all processes.
        """
        self.scheduler.move_end(max_iter)
        self.max_iter = max_iter

    def _describe_end(self) -> str:
        """Says where the weights are, and how good the best and the last ones are."""
        folder = Path(self.cfg.OUTPUT_DIR)
        text = f"Done after {self.max_iter:,} iterations"
        hook = self.find_hook(EvalHook)
        if hook is None or not hook.best:
            return f"{text}: weights in '{folder / 'model_final.safetensors'}'"
        metric = self.cfg.TEST.BEST_METRIC
        best = hook.best["value"]
        text += f". Commands that name '{folder}' use its best weights, model_best.safetensors: "
        text += f"{metric} {best:.4g}"
        if hook.best["iteration"] == self.max_iter - 1:
            return f"{text}, after the last iteration"
        text += f", after {hook.best['iteration'] + 1:,} iterations"
        if hook.value is not None:
            text += f". The last weights, model_final.safetensors, have {hook.value:.4g}"
        return text

    def build_hooks(self) -> list[HookBase | None]:
        """Returns the hooks in the order in which they run."""
        cfg = self.cfg
        is_main = comm.is_main_process()
        end_in_time = None
        if self._limit is not None:
            end_in_time = EndInTime(
                self._limit, max_iter=self.max_iter, eval_period=cfg.TEST.EVAL_PERIOD
            )
        return [
            hooks.IterationTimer(),
            hooks.LRScheduler(),
            hooks.CallbackHook(after_step=self._update_average) if self._average else None,
            end_in_time,
            YieldToNewerStart() if is_main else None,
            *build_eval_hooks(cfg, self._mean_teacher, burn_in=self.data_loader.burn_in),
            PeriodicWriter(cfg.SOLVER.LOG_PERIOD) if is_main else None,
            SkippedImages(period=cfg.SOLVER.CHECKPOINT_PERIOD),
            PeriodicCheckpointer(
                period=cfg.SOLVER.CHECKPOINT_PERIOD, kept=cfg.SOLVER.CHECKPOINTS_KEPT
            ),
            keep_memory(cfg),
            StopSignals(),
        ]

    def _update_average(self, trainer: TrainerBase) -> None:
        assert self._average is not None
        self._average.update(self.bare_model, step=trainer.iter + 1)

    def find_hook(self, kind: type[Hook]) -> Hook | None:
        """Returns the first registered hook of a class, if any."""
        return next((hook for hook in self._hooks if isinstance(hook, kind)), None)

    def evaluate(self) -> dict[str, Any]:
        """Evaluates ``evaluated_model``; only the main process returns results.

        With unlabelled images, ``evaluated_model`` is the mean teacher, and the results of the
        trained model are under the key "student".
        """
        student = self._evaluation(self.bare_model) if self._mean_teacher else {}
        results = self._evaluation(self.evaluated_model)  # last, so OUTPUT_DIR has their files
        if student:
            results = {**results, "student": student}
        self._last_eval_results = results
        return results

    def save(self, name: str) -> None:
        """Writes ``OUTPUT_DIR/<name>.pth``, a checkpoint from which the run can be resumed."""
        self.checkpointer.save(name, iteration=self.iter, info=self._describe_weights().to_dict())

    def export(self, name: str) -> None:
        """Writes the evaluated weights and their metadata to ``OUTPUT_DIR/<name>.safetensors``."""
        if comm.is_main_process():
            path = Path(self.cfg.OUTPUT_DIR) / f"{name}.safetensors"
            save_weights(str(path), self.evaluated_model.state_dict(), self._describe_weights())

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs except the weights."""
        return {
            **TrainerBase.state_dict(self),
            "_trainer": self._trainer.state_dict(),
            "seed": self.seed,
            "processes": comm.get_world_size(),
            "num_images": self.data_loader.num_images,
            "fingerprint": self.data_loader.fingerprint,
            "old_detector": self._old_detector.digest if self._old_detector else "",
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``.

        Raises:
            UserError: the training set has changed.
        """
        check_same_images(state_dict, self.data_loader)
        TrainerBase.load_state_dict(self, state_dict)
        self.max_iter = self.scheduler.end
        self._trainer.load_state_dict(state_dict["_trainer"])
        self._trainer.seed = state_dict["seed"]
        if self._old_detector:
            self._old_detector.digest = state_dict["old_detector"]
        before = state_dict["processes"]
        now = comm.get_world_size()
        logger.info(f"Continuing after iteration {self.iter}, with the same images")
        if before != now:  # dropout and BatchNorm's batch statistics will differ
            logger.warning(f"The run continues with {now} processes instead of {before}")

    def _describe_weights(self) -> WeightsInfo:
        return WeightsInfo.from_config(
            self.cfg,
            iteration=self.iter,
            commit=find_commit(),
            pretrain_only_modules=pretrain_only_modules(self.bare_model),
            images_seen_before=self._images_seen_before,
        )

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Builds a model by Detectron2's ``build_model``, in the memory format of the config."""
        with refuse_bad_values("this config"):
            model: nn.Module = super().build_model(cfg)
        return model.to(memory_format=find_memory_format(cfg))

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Optimizer:
        """Builds the optimizer that ``SOLVER.OPTIMIZER`` names."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: Optimizer) -> MovableLR:
        """Builds the scheduler that ``SOLVER.LR_SCHEDULER_NAME`` names."""
        return build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> TrainStream:
        """Returns the stream of this process's share of the training images."""
        return build_train_stream(cfg, find_task(cfg).load_training_set(cfg))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> ImageBatches:
        """Returns a loader of this process's share of a data set's images."""
        return find_task(cfg).build_test_loader(cfg, dataset_name)


def evaluate(
    cfg: CfgNode, *, resume: bool = False, prepare: Callable[[nn.Module], nn.Module] | None = None
) -> dict[str, Any]:
    """Evaluates ``MODEL.WEIGHTS``, or the last checkpoint of the run.

    Args:
        cfg: resolved config.
        resume: evaluate the last checkpoint in ``OUTPUT_DIR``.
        prepare: called with the model in eval mode; returns the model to evaluate, for example its
            deployed form.

    Returns:
        Results by task.

    Raises:
        UserError: no weights are given, or they do not fit the model exactly.
    """
    if not cfg.MODEL.WEIGHTS and not resume:
        raise UserError("there is nothing to evaluate: add --weights FILE, or --resume")
    model = Trainer.build_model(cfg).eval()
    checkpointer = ExactCheckpointer(model, cfg.OUTPUT_DIR, class_names=cfg.MODEL.CLASS_NAMES)
    weights = cfg.MODEL.WEIGHTS
    if resume:
        if not checkpointer.has_checkpoint():
            raise UserError(f"--resume finds no checkpoint in '{cfg.OUTPUT_DIR}' to evaluate")
        weights = checkpointer.find_checkpoint_to_resume()
    checkpointer.load(weights, checkpointables=[])
    build_test_loader = Trainer.build_test_loader
    if needs_targets(model):
        build_test_loader = DistillationTargets(cfg).build_test_loader
    if prepare is None:
        optimize(model, choose_form(cfg))  # as in training, so that results are bit-identical
    else:
        model = prepare(model)
    return Evaluation(cfg, build_test_loader)(model)


def choose_form(cfg: CfgNode) -> Form:
    """Returns the form of a model's layers in training on ``MODEL.DEVICE``."""
    return "cpu_training" if cfg.MODEL.DEVICE == "cpu" else "training"
