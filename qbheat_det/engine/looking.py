# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How a run looks at itself while it trains: pictures, figures and scores, at a share of its time.

A look changes nothing of the run: weights, order of the images and dropout are the same without
it. What goes wrong in one, be it a full disk, is logged and the run goes on.
"""

import json
import logging
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from qbheat_det.core.files import write_atomically

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)
FOLDER = "looks"
_LOOKS_A_RUN = 20  # where no period is given


class Look(HookBase):
    """Looks before the first step, in its period, and after the last step.

    A look in between is left out where it, and the last one to come, would take more than a share
    of the time of the run so far. The main process looks alone; the others wait for it at their
    next step. Subclasses define ``look``, and keep to one instance a run.
    """

    trainer: "Trainer"

    def __init__(self, *, period: int, share: float) -> None:
        """
        Args:
            period: iterations; 0 for a twentieth of the run.
            share: of the run's time, that looks in between may take, in [0, 1].
        """
        self._period = period
        self._share = share
        self._has_tensorboard = find_spec("tensorboard") is not None
        self._started = perf_counter()
        self._seconds_before = 0.0  # of this run, in processes before this one
        self._cost = {"seconds": 0.0, "last": 0.0}  # of all looks, and of the newest
        self.made, self.left_out, self.failed = 0, 0, 0
        self.steps = 0
        """How many are done, as the names of files have it."""

    def look(self) -> None:
        """Looks; on the main process, ``trainer.evaluated_model`` in eval mode, no gradients."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Time and number of looks so far."""
        counts = {"made": self.made, "left_out": self.left_out, "failed": self.failed}
        return {"run_seconds": self._run_seconds(), **self._cost, **counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` gave."""
        self._started = perf_counter()
        self._seconds_before = state_dict["run_seconds"]
        self._cost = {name: state_dict[name] for name in self._cost}
        self.made, self.left_out = state_dict["made"], state_dict["left_out"]
        self.failed = state_dict["failed"]

    def before_train(self) -> None:
        """Looks at a run that begins; one that goes on has been looked at."""
        self._started = perf_counter()
        if comm.is_main_process() and self.trainer.start_iter == 0:
            self._look(steps=0)

    def after_step(self) -> None:
        """Looks where it is time to, and there is time."""
        steps, end = self.trainer.iter + 1, self.trainer.max_iter
        period = self._period or math.ceil(end / _LOOKS_A_RUN)
        if not comm.is_main_process() or (steps < end and steps % period):
            return
        # With this look and the last one.
        cost = self._cost["seconds"] + 2 * self._cost["last"]
        if steps < end and cost > self._share * self._run_seconds():
            self.left_out += 1
            return
        self._look(steps)

    def after_train(self) -> None:
        """Says what was looked at, and what it took; also where the run ends with an error."""
        if not comm.is_main_process():
            return
        spent, run = self._cost["seconds"], self._run_seconds()
        failed = f", {self.failed} of them with an error" if self.failed else ""
        logger.info(
            f"{type(self).__name__}: {self.made} made{failed}, {self.left_out} left out to save "
            f"time; {spent:.1f} seconds, {100 * spent / max(run, 1e-9):.2f} % of the run"
        )

    def record(self, values: Mapping[str, float]) -> None:
        """Puts figures by name where those of training go, those that are finite."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self.trainer.storage.put_scalars(smoothing_hint=False, **finite)

    def show(self, name: str, picture: npt.NDArray[np.uint8]) -> None:
        """Writes a picture (H, W, 3), RGB, to ``looks/<name>_<steps>.png`` and TensorBoard."""
        encoded = cv2.imencode(".png", np.ascontiguousarray(picture[..., ::-1]))[1].tobytes()
        self.write(f"{name}_{self.steps:07d}.png", encoded)
        if self._has_tensorboard:  # nothing else empties the storage of its pictures
            self.trainer.storage.put_image(name, picture.transpose(2, 0, 1))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes ``looks/<name>_<steps>.json``, with the number of steps in it.

        Raises:
            ValueError: a number is not finite.
        """
        text = json.dumps({"steps": self.steps, **content}, indent=1, allow_nan=False)
        self.write(f"{name}_{self.steps:07d}.json", f"{text}\n".encode())

    def write(self, file_name: str, content: bytes) -> None:
        """Writes a file below ``OUTPUT_DIR/looks``, whole or not at all."""
        path = Path(self.trainer.cfg.OUTPUT_DIR) / FOLDER / file_name
        write_atomically(path, lambda stream: stream.write(content))

    def _look(self, steps: int) -> None:
        self.steps = steps
        model = self.trainer.evaluated_model
        _wait_for(model)  # else steps under way would count as part of the look
        started = perf_counter()
        try:
            with undisturbed(model):
                self.look()
            self.made += 1
        except Exception:
            self.made, self.failed = self.made + 1, self.failed + 1
            if self.failed == 1:
                logger.exception(
                    f"{type(self).__name__} failed after {steps:,} steps. Training goes on; later "
                    "failures are only counted."
                )
        _wait_for(model)
        self._cost["last"] = perf_counter() - started
        self._cost["seconds"] += self._cost["last"]

    def _run_seconds(self) -> float:
        return self._seconds_before + perf_counter() - self._started


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in eval mode and keeps no gradients.

    Afterwards the mode of each of its modules is as before, and so are all random generators.
    """
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        model.eval()
        with torch.random.fork_rng(_list_gpus(model)), torch.no_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, training in modes:
            module.training = training


def _list_gpus(model: nn.Module) -> list[int]:
    devices = {parameter.device for parameter in model.parameters()}
    return [device.index for device in devices if device.type == "cuda"]


def _wait_for(model: nn.Module) -> None:
    for device in _list_gpus(model):
        torch.cuda.synchronize(device)
