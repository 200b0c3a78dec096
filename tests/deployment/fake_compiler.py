# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A backbone of one map, and a compiler whose programs are the parts themselves."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import Tensor, nn

import qbheat_det
from qbheat_det.deployment import part_programs


class OneMap(Backbone):
    """A convolution whose result depends on where each pixel lies."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.activation = activation
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"s2": self.activation(self.norm(self.convolution(x)))}

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {"s2": ShapeSpec(channels=8, stride=2)}


def deploy(model: nn.Module, folder: Path, told: list[str], **settings: Any) -> Any:
    return qbheat_det.deploy(
        model,
        precision="float32",
        keep_memory=False,
        cache_folder=folder,
        tell=told.append,
        **settings,
    )


class FakeCompiler:
    """Compiles nothing: keeps the shapes that it is called for, in the order of the calls.

    Attributes:
        shapes: of the first argument of each call.
        factor: what the programs' first output is wrong by.
        seconds: what a run of a program is said to take; the plain form takes 2.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.factor = 1.0
        self.seconds = 1.0
        monkeypatch.setattr(part_programs, "build_program", self._build)
        monkeypatch.setattr(part_programs, "open_program", self._open)
        monkeypatch.setattr(part_programs, "race", lambda *_: (self.seconds, 2.0))
        for module in (part_programs, sys.modules["qbheat_det.deployment.deploy"]):
            monkeypatch.setattr(module, "require_compiler", lambda: None)

    def _build(self, part: Any, arguments: Any, path: Path) -> None:
        self._own = part.part.forward
        self.shapes.append(tuple(arguments[0].shape))
        path.write_bytes(b"program")

    def _open(self, path: Path) -> Any:
        assert path.read_bytes() == b"program"
        return self._run

    def _run(self, x: Tensor) -> Any:
        return {name: self.factor * y for name, y in self._own(x).items()}
