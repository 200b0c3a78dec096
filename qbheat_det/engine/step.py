# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One optimizer step: micro-batches, autocast, losses normalized over the effective batch.

Combines Detectron2's ``SimpleTrainer`` and ``AMPTrainer``. The effective batch is the union of the
micro-batches of all processes. Gradients are the same as for a single forward pass with the
effective batch, except that BatchNorm's statistics are per micro-batch. On a GPU, the next batch is
loaded and copied during the current step, and losses are read during the backward pass.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import SimpleTrainer
from detectron2.structures import Instances
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch.jit import optimized_execution  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from qbheat_det.core.environment import supports_bfloat16
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import seed_step
from qbheat_det.core.text import join_first
from qbheat_det.data import cut
from qbheat_det.modeling.contracts import (
    BatchedInputs,
    SupportsAfterStep,
    SupportsLossNormalizers,
    get_metrics,
)

PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
logger = logging.getLogger(__name__)


class StepTrainer(SimpleTrainer):
    """Takes a batch from the loader and makes one optimizer step.

    ``modeling/contracts.py`` lists optional methods of models, such as ``get_metrics``.

    Attributes:
        asked_to_stop: whether this process received a signal to end the run.
        stops: whether the run ends after this step; equal on all processes.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[BatchedInputs],
        optimizer: Optimizer,
        *,
        batch_size: int,
        accumulate: int = 1,
        precision: torch.dtype | None = None,
        seed: int = 0,
        log_period: int = 20,
        mean_teacher: Callable[[Sequence[BatchedInputs]], None] | None = None,
        old_detector: Callable[[Sequence[BatchedInputs]], None] | None = None,
    ) -> None:
        """
        Args:
            model: a meta-architecture, in a distributed wrapper if there are several processes.
            data_loader: yields the part of each batch that this process handles.
            optimizer: optimizer of the model's parameters.
            batch_size: number of images per step, summed over all processes.
            accumulate: number of micro-batches per step and process.
            precision: dtype of autocast; None disables autocast.
            seed: seed for randomness in the model, such as dropout.
            log_period: iterations between two logs of the model's metrics and the gradient norm,
                which need a device synchronization.
            mean_teacher: adds pseudo labels to the unlabelled images in the micro-batches of a
                step, such as ``MeanTeacher``.
            old_detector: adds predictions to the labelled images, such as ``OldDetector``.
        """
        super().__init__(model, data_loader, optimizer)
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.precision = precision
        self.seed = seed
        self.log_period = log_period
        self._mean_teacher = mean_teacher
        self._old_detector = old_detector
        self.asked_to_stop = False
        self.stops = False
        self._bare = model.module if isinstance(model, DistributedDataParallel) else model
        self._device = next(model.parameters()).device
        draws_training_images = bool(getattr(self._bare, "vis_period", 0))
        self._source = BatchSource(
            lambda: next(self._data_loader_iter),
            self._device,
            boxes=not draws_training_images,  # Detectron2 needs boxes on the CPU to draw them
        )
        needs_scaling = precision == torch.float16
        self.grad_scaler = torch.amp.GradScaler(self._device.type, enabled=needs_scaling)

    def run_step(self) -> None:
        """Takes a batch, accumulates the gradients of its micro-batches, steps, and logs.

        Raises:
            UserError: a loss is not finite on at least one process; all processes raise the error.
                Or a process has fewer images than micro-batches.
        """
        images, data_time = self._source.take()
        if len(images) < self.accumulate:
            raise UserError(
                f"SOLVER.ACCUMULATE is {self.accumulate}, but a process has {len(images)} images "
                "of a step"
            )
        batches = cut(images, self.accumulate)
        seed_step(self.seed, self.iter, comm.get_rank())
        if self._mean_teacher:
            self._mean_teacher(batches)
        if self._old_detector:
            self._old_detector(batches)
        normalizers = self._loss_normalizers(batches)
        logged: dict[str, float] = {}
        self.optimizer.zero_grad()
        # The loss is summed over micro-batches and averaged over processes.
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with self._average_gradients(is_last):
                losses = self._compute_losses(batch, normalizers)
                weight = self._loss_weight(batch)
                if weight != 1:
                    losses = {name: loss * weight for name, loss in losses.items()}
                reading = LossReading(losses, asked_to_stop=self.asked_to_stop)
                total_loss = torch.stack(list(losses.values())).sum()
                self.grad_scaler.scale(total_loss).backward()
                self._check(reading, batch, logged)
        self.grad_scaler.step(self.optimizer)  # unscales first, so clipping sees true gradients
        self.grad_scaler.update()
        if isinstance(self._bare, SupportsAfterStep):
            self._bare.after_step()
        self._source.load_ahead()
        self._log(logged, data_time)

    def close(self) -> None:
        """Ends the loader's workers."""
        # Releases of Detectron2 have different names for the iterator.
        for name in ("_data_loader_iter_obj", "_data_loader_iter"):
            iterator = vars(self).get(name)
            if isinstance(iterator, Generator):
                iterator.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer and the gradient scaler."""
        return {**super().state_dict(), "grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        scaler_state = state_dict["grad_scaler"]
        if scaler_state:  # empty if the run did not use float16 so far
            self.grad_scaler.load_state_dict(scaler_state)

    def _compute_losses(
        self, batch: BatchedInputs, normalizers: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        """Returns the training losses of a micro-batch by name."""
        autocast = torch.autocast(
            self._device.type, dtype=self.precision, enabled=self.precision is not None
        )
        # Detectron2's focal loss uses TorchScript, which compiles a function after two calls and
        # then rounds differently. A resumed run would not be bit-identical.
        with autocast, optimized_execution(False):
            losses = self.model(batch, *normalizers)
        if isinstance(losses, Tensor):
            return {"loss": losses}
        return dict(losses)

    def _loss_normalizers(self, batches: list[BatchedInputs]) -> tuple[Tensor, ...]:
        """Returns the arguments of ``forward`` after the batch.

        They are the divisors of the losses, or nothing if ``forward`` computes the divisors itself.
        """
        if len(batches) == 1 or not isinstance(self._bare, SupportsLossNormalizers):
            return ()
        batch_counts = torch.stack([self._bare.loss_counts(batch) for batch in batches])
        counts = batch_counts.sum(dim=0).to(self._device, non_blocking=True)
        if comm.get_world_size() > 1:
            torch.distributed.all_reduce(counts)
        num_micro_batches = len(batches) * comm.get_world_size()
        return (self._bare.loss_normalizers(counts, num_micro_batches),)

    def _loss_weight(self, batch: BatchedInputs) -> float:
        """Returns the weight of a micro-batch in the sum of this process's losses."""
        if isinstance(self._bare, SupportsLossNormalizers):
            return 1 / self.accumulate  # the model has divided by the counts of all micro-batches
        # The losses are means over the images of the micro-batch. The average over processes
        # divides by their number.
        return len(batch) * comm.get_world_size() / self.batch_size

    def _check(
        self, reading: "LossReading", batch: BatchedInputs, logged: dict[str, float]
    ) -> None:
        """Adds the losses of a micro-batch, averaged over processes, to ``logged``.

        Raises a ``UserError`` on all processes if a loss is not finite on at least one process.
        """
        losses, mean_losses = reading.values()
        self.stops = reading.stops
        if all(math.isfinite(value) for value in mean_losses.values()):
            for name, value in mean_losses.items():
                logged[name] = logged.get(name, 0.0) + value
            return
        not_finite = [f"{name} {loss}" for name, loss in losses.items() if not math.isfinite(loss)]
        files = [str(entry["file_name"]) for entry in batch if "file_name" in entry]
        images = ""
        if files:
            images = f"; images: {join_first(files, limit=8)}"
        message_here = ""  # empty if all losses of this process are finite
        if not_finite:
            message_here = f"{join_first(not_finite)} on process {comm.get_rank()}{images}"
        messages = [text for text in comm.all_gather(message_here) if text]
        message = messages[0]
        raise UserError(
            f"a loss is not finite at iteration {self.iter} ({message}): try a lower "
            "SOLVER.BASE_LR or SOLVER.CLIP_GRADIENTS.ENABLED True"
        )

    def _average_gradients(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context for a backward pass; only in the last one of a step, DDP averages gradients."""
        if is_last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _log(self, losses: dict[str, float], data_time: float) -> None:
        """Adds the losses of a step, and periodically the model's metrics, to the event storage."""
        storage = get_event_storage()
        storage.put_scalars(data_time=data_time, total_loss=sum(losses.values()))
        if len(losses) > 1:
            storage.put_scalars(**losses)
        if (self.iter + 1) % self.log_period:
            return
        scalars = {name: float(value) for name, value in get_metrics(self._bare).items()}
        gradient_norm = getattr(self.optimizer, "gradient_norm", None)  # from ``clip_before_step``
        if gradient_norm is not None:
            scalars["gradient_norm"] = float(gradient_norm)
        if self.grad_scaler.is_enabled():
            scalars["gradient_scale"] = self.grad_scaler.get_scale()
        storage.put_scalars(smoothing_hint=False, **scalars)


class LossReading:
    """Averages the losses of a micro-batch over processes, and copies them to the CPU.

    Both happen in the background, until ``values`` is called.

    Attributes:
        stops: whether any process was asked to stop; valid after ``values`` was called.
    """

    def __init__(self, losses: Mapping[str, Tensor], *, asked_to_stop: bool = False) -> None:
        """
        Args:
            losses: the losses by name, 0-d tensors.
            asked_to_stop: whether this process was asked to stop.
        """
        self._names = list(losses)
        self.stops = False
        loss_values = torch.stack([loss.detach().float() for loss in losses.values()])  # (L,)
        stop_value = loss_values.new_full((1,), float(asked_to_stop))
        here = torch.cat([loss_values, stop_value])  # (L + 1,)
        total = here.clone()
        if comm.get_world_size() > 1:
            torch.distributed.all_reduce(total)
        mean = total / comm.get_world_size()
        self._values = torch.stack([here, mean])  # (2, L + 1)
        self._arrived: torch.cuda.Event | None = None
        device = self._values.device
        if device.type == "cuda":
            on_cpu = torch.empty(self._values.shape, pin_memory=True)
            self._values = on_cpu.copy_(self._values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            # The default stream would be of the current device, which may not have the losses.
            self._arrived.record(torch.cuda.current_stream(device))

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the losses of this process, and their means over all processes."""
        if self._arrived is not None:
            self._arrived.synchronize()
        here, mean = self._values.tolist()
        *losses_here, _ = here
        *mean_losses, stop_share = mean  # the share of the processes that were asked to stop
        self.stops = stop_share > 0
        return (
            dict(zip(self._names, losses_here, strict=True)),
            dict(zip(self._names, mean_losses, strict=True)),
        )


class BatchSource:
    """Takes batches from an iterator and, on a GPU, loads one batch ahead.

    Copies are asynchronous if the loader pins memory. A batch stays in memory until the next one is
    taken. By then, the losses of its step have been read, so the GPU no longer needs the batch.
    """

    def __init__(
        self, next_batch: Callable[[], BatchedInputs], device: torch.device, boxes: bool = True
    ) -> None:
        """
        Args:
            next_batch: returns a batch, and raises ``StopIteration`` after the last one.
            device: the device that batches are copied to.
            boxes: whether ``Instances`` are copied too.
        """
        self._moves_boxes = boxes
        self._next_batch = next_batch
        self._stream: torch.cuda.Stream | None = None  # for copies to the GPU
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self._device = device
        self._ahead: BatchedInputs | None = None  # the next batch, if it is loaded
        self._in_use: BatchedInputs | None = None  # kept, so that its memory is not reused
        self._end: Exception | None = None  # the error that ended loading
        self._waited = 0.0  # seconds that the GPU was idle because of the next batch

    def take(self) -> tuple[BatchedInputs, float]:
        """Returns a batch, and the seconds that the step waited for it.

        On a GPU, loading counts as waiting only if the GPU is idle when loading ends.

        Raises:
            StopIteration: there are no more batches.
        """
        if self._stream is None:
            start = time.perf_counter()
            batch = self._next_batch()
            return batch, time.perf_counter() - start
        self.load_ahead()
        if self._ahead is None:
            raise self._end or StopIteration
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._in_use = self._ahead
        self._ahead = None
        return self._in_use, self._waited

    def load_ahead(self) -> None:
        """Loads the next batch and copies it to the GPU; does nothing on the CPU."""
        if self._stream is None or self._ahead is not None:
            return
        computed = torch.cuda.Event()  # after all work that the GPU has so far
        computed.record(torch.cuda.current_stream(self._device))
        start = time.perf_counter()
        try:
            batch = self._next_batch()
        except (StopIteration, UserError) as error:  # ``take`` raises it
            self._end = self._end or error
            return
        is_gpu_idle = computed.query()
        self._waited = 0.0
        if is_gpu_idle:
            self._waited = time.perf_counter() - start
        with torch.cuda.stream(self._stream):
            self._ahead = self._move(batch)

    def _move(self, value: Any) -> Any:
        """Copies the tensors in nested lists and dicts to the device."""
        if isinstance(value, Tensor):
            return value.to(self._device, non_blocking=True)
        if isinstance(value, Instances) and self._moves_boxes:
            return value.to(self._device)
        if isinstance(value, dict):
            return {name: self._move(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self._move(part) for part in value]
        return value


def choose_precision(cfg: CfgNode) -> torch.dtype | None:
    """Returns the autocast dtype that ``SOLVER.AMP`` names; None for float32.

    Returns None if AMP is disabled, or if the device only emulates the dtype, which would make a
    step ten times as long.
    """
    if not cfg.SOLVER.AMP.ENABLED:
        return None
    device = torch.device(cfg.MODEL.DEVICE)
    precision = PRECISIONS[cfg.SOLVER.AMP.PRECISION]
    if device.type not in ("cpu", "cuda"):
        return precision
    has_float16 = device.type == "cuda" and precision == torch.float16
    if not has_float16 and not supports_bfloat16(device):
        logger.warning("SOLVER.AMP: training in float32, as this device has no bfloat16")
        return None
    return precision
