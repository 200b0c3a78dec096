# Copyright (c) qbheat_det contributors. Apache-2.0.
"""SOLVER.COMPILE: what is compiled, what it computes, and what happens without a compiler."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from qbheat_det.engine.compiled_training import find_fault
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from qbheat_det.engine import compiled_training
from qbheat_det.engine.compiled_training import compile_blocks
from qbheat_det.engine.training_blocks import call_of, checkpoint_blocks, find_blocks

from .conftest import TrainAfresh
from .test_resume import assert_same_bits, break_at, comparable
from .tiny_training import state

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def _compiler() -> Iterator[None]:
    fault = find_fault(CPU)
    if fault:
        pytest.skip(f"PyTorch compiles nothing here: {fault}")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def take_step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y, **gradients, **{f"{n} kept": b for n, b in model.named_buffers()}}


@pytest.mark.usefixtures("_compiler")
def test_equal_blocks_compile_once_for_all_sizes_and_compute_the_same() -> None:
    model = Layers().train()
    plain, averaged = copy.deepcopy(model), copy.deepcopy(model)
    names = list(model.state_dict())
    assert compile_blocks(model) == 3
    checkpoint_blocks(model)
    for size in (4, 6, 9):
        x = torch.randn(size, 16)
        torch.testing.assert_close(take_step(model, x), take_step(plain, x), rtol=1e-4, atol=1e-5)
    # One of the line that looks for a compiler; the first block's input needs no gradient.
    assert counters["stats"]["unique_graphs"] <= 3
    assert list(model.state_dict()) == names
    averaged.load_state_dict(copy.deepcopy(model).state_dict())
    torch.testing.assert_close(model.eval()(x), averaged.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("sentence", ["no compiler found", ""])
def test_what_hinders_compiling_is_told_and_nothing_changes(
    sentence: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(sentence)

    monkeypatch.setattr(torch, "compile", refuse)
    model = Layers()
    with caplog.at_level(logging.WARNING, logger="qbheat_det"):
        assert compile_blocks(model) == 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert "SOLVER.COMPILE has no effect" in line
    assert (sentence or "RuntimeError") in line
    assert all(block._compiled_call_impl is None for block in find_blocks(model).values())


def test_a_block_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_nothing(_: Any, **__: object) -> Any:
        def call(*_: object) -> NoReturn:
            raise Unsupported("this and that\nand more")

        return call

    monkeypatch.setattr(compiled_training, "find_fault", lambda _: "")
    monkeypatch.setattr(torch, "compile", compile_nothing)
    model, x = Layers().train(), torch.randn(4, 16)
    expected = copy.deepcopy(model)(x)
    compile_blocks(model)
    with caplog.at_level(logging.WARNING, logger="qbheat_det"):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        model(x)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        f"block 'layers.{i}' runs as it is, PyTorch cannot compile it: this and that"
        for i in range(3)
    ]


def test_evaluation_never_meets_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    for block in find_blocks(model).values():
        call_of(block).compiled = lambda x: pytest.fail("evaluation runs the blocks themselves")
    model.eval()(torch.randn(2, 16))


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_a_compiled_run_on_one_size_that_was_broken_ends_with_the_bits_of_an_unbroken_one(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opts = {"SOLVER.COMPILE": "True"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_afresh(whole, opts)
    torch._dynamo.reset()
    break_at(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_afresh(broken, opts, "--resume")
    torch._dynamo.reset()
    train_afresh(broken, opts, "--resume")
    assert_same_bits(comparable(state(broken)), comparable(state(whole)))
