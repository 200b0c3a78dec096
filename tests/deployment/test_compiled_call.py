# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Deployed models on a GPU, simulated on the CPU with a compiler that records its calls."""

import copy
import sys
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.testing import assert_close

import qbheat_det
from qbheat_det.core.errors import UserError
from qbheat_det.deployment.compiled_call import find_fault
from tests.export.tiny_models import build, make_config

from .fake_compiler import OneMap
from .test_deploy import assert_same_boxes, entries


class Recorder:
    """Stands for torch.compile: keeps what it is asked for, and sizes that run "compiled".

    Attributes:
        options: of each function, the line that looks for a compiler left out.
        sizes: rows and columns of the first argument of each call.
        error: what calls raise; None for the function's own result.
    """

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.error: Exception | None = None

    def __call__(self, function: Any, **options: Any) -> Any:
        if not options:
            return function
        self.options.append(options)

        def call(*args: Any) -> Any:
            if self.error:
                raise self.error
            self.sizes.append(tuple(getattr(args[0], "shape", ()))[-2:])
            return function(*args)

        return call


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Has models on the CPU deployed as those on a GPU."""
    module: Any = sys.modules["qbheat_det.deployment.deploy"]
    monkeypatch.setattr(module, "_compile_for_cpu", module._compile_for_cuda)
    recorder = Recorder()
    monkeypatch.setattr(torch, "compile", recorder)
    return recorder


def deploy(model: nn.Module, told: list[str], **settings: Any) -> Any:
    return qbheat_det.deploy(model, keep_memory=False, tell=told.append, **settings)


@torch.no_grad()
def test_sizes_that_are_asked_for_are_run_before_the_first_image(compiler: Recorder) -> None:
    told: list[str] = []
    deployed = deploy(OneMap(), told, image_sizes=[(32, 48), (64, 64)])
    assert compiler.sizes == [(32, 48), (64, 64)]
    assert compiler.options == [{"dynamic": False, "mode": None}]
    assert told[0] == "compiling backbone for the sizes asked for: a minute or several"
    assert told[1].startswith("compiled for the sizes asked for, in ")
    assert deployed.report["compile"].applied
    assert not deployed.report["CUDA graphs"].applied
    x = torch.randn(1, 3, 32, 48)
    assert_close(deployed(x), OneMap()(x))


@torch.no_grad()
def test_a_detector_gets_graphs_and_gives_the_same_boxes(compiler: Recorder) -> None:
    model = build(make_config("mf_detr"))
    deployed = deploy(model, [], image_sizes=[(64, 96)])
    assert [each["mode"] for each in compiler.options] == ["reduce-overhead"] * 2
    assert deployed.report["CUDA graphs"].applied
    assert_same_boxes(deployed(entries((64, 96))), model(entries((64, 96))))


def test_without_sizes_it_is_told_that_the_first_image_takes_long(compiler: Recorder) -> None:
    told: list[str] = []
    deploy(OneMap(), told)
    assert compiler.sizes == []
    assert compiler.options[0]["dynamic"]
    assert told == ["compiling backbone at the first image: a minute or several"]


@pytest.mark.usefixtures("compiler")
@torch.no_grad()
def test_where_nothing_compiles_the_parts_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("there is no Triton")

    monkeypatch.setattr(torch, "compile", refuse)
    told: list[str] = []
    deployed = deploy(OneMap(), told, image_sizes=[(32, 48)])
    assert not deployed.report["compile"].applied
    assert deployed.report["compile"].sentence == (
        "PyTorch compiles nothing here: there is no Triton"
    )
    assert told == ["nothing is compiled: there is no Triton"]
    x = torch.randn(1, 3, 32, 48)
    assert_close(deployed(x), OneMap()(x))
    rounded = deploy(OneMap(), told, precision="bfloat16")(x)["s2"]
    assert float((rounded - OneMap()(x)["s2"]).abs().max()) > 1e-3


@torch.no_grad()
def test_a_part_that_cannot_be_compiled_runs_as_it_is(compiler: Recorder) -> None:
    compiler.error = Unsupported("this and that\nand more")
    deployed = deploy(OneMap(), [], image_sizes=[(32, 48)])
    steps = [step for step in deployed.report if step.name == "compile"]
    assert [step.applied for step in steps] == [False]
    assert "backbone runs as it is, PyTorch cannot compile it: this and" in steps[0].sentence
    x = torch.randn(1, 3, 32, 48)
    assert_close(deployed(x), OneMap()(x))


def test_a_size_that_the_model_does_not_take_is_a_sentence(compiler: Recorder) -> None:
    compiler.error = ValueError("too small")
    with pytest.raises(UserError, match=r"take an image of 1x2 pixels.*too small"):
        deploy(OneMap(), [], image_sizes=[(1, 2)])


@pytest.mark.usefixtures("compiler")
@torch.no_grad()
def test_a_copy_computes_with_weights_of_its_own() -> None:
    deployed = deploy(OneMap(), [])
    twin = copy.deepcopy(deployed)
    nn.init.zeros_(twin.norm.weight)
    nn.init.ones_(twin.norm.bias)
    x = torch.randn(1, 3, 8, 8)
    assert_close(twin(x)["s2"], torch.ones(1, 8, 4, 4))
    assert_close(deployed(x), OneMap()(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiler_is_found_whatever_the_caller_is_in(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with mode():
        assert find_fault(torch.device("cpu")) == ""
