# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What deployed models compile, and for which images."""

import shutil
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.testing import assert_close

import qbheat_det
from qbheat_det.core.errors import UserError
from qbheat_det.deployment.compiling import find_compiler_error
from tests.engine.exporting.split_cases import build, make_config

from .boxes import assert_same_boxes, entries

SIZE, OTHER = (64, 96), (67, 101)
MODULE: Any = sys.modules["qbheat_det.deployment.deploy"]


@pytest.fixture(scope="module")
def mf_detr() -> nn.Module:
    return build(make_config("mf_detr"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool]]:
    """Compiles with a backend that counts: shapes of the first input, whether sizes are dynamic."""
    torch.compiler.reset()
    shapes: list[tuple[tuple[int, ...], bool]] = []

    def compile_parts(parts: Sequence[nn.Module], *, dynamic: bool, cuda_graphs: bool) -> None:
        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            first = next(x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 4)
            shapes.append((tuple(first.shape), dynamic))
            return graph.forward

        for part in parts:
            part.compile(dynamic=dynamic, backend=backend)

    monkeypatch.setattr(MODULE, "compile_parts", compile_parts)
    monkeypatch.setattr(MODULE, "find_compiler_error", lambda _: "")
    return shapes


def deploy(model: nn.Module, **settings: Any) -> Any:
    return qbheat_det.deploy(model, keep_memory=False, **settings)


@torch.no_grad()
def test_named_sizes_compile_once_and_others_run_uncompiled(
    mf_detr: nn.Module, compiled: list[Any]
) -> None:
    deployed = deploy(mf_detr, image_sizes=[SIZE])
    num_graphs = len(compiled)
    assert num_graphs >= 2  # backbone and decoder
    assert not any(dynamic for _, dynamic in compiled)
    assert deployed.report["compile"].applied
    for batch in ([SIZE], [OTHER], [SIZE, SIZE], [SIZE, OTHER]):
        assert_same_boxes(deployed(entries(*batch)), mf_detr(entries(*batch)))
    with torch.inference_mode():
        deployed(entries(SIZE))
    assert len(compiled) == num_graphs


@torch.no_grad()
def test_a_backbone_compiles_for_one_layout(mf_detr: Any, compiled: list[Any]) -> None:
    deployed = deploy(mf_detr.backbone, image_sizes=[SIZE])
    num_graphs = len(compiled)
    x = torch.randn(1, 3, *SIZE)
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        assert_close(dict(deployed(image)), dict(mf_detr.backbone(x)), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        deployed(torch.randn(1, 3, *SIZE))
    assert len(compiled) == num_graphs


def test_nothing_compiles_where_no_size_is_named_or_it_is_off(
    mf_detr: nn.Module, compiled: list[Any]
) -> None:
    for settings in ({}, {"compile": "off", "image_sizes": [SIZE]}):
        assert not deploy(mf_detr, **settings).report["compile"].applied
    assert not compiled


def test_a_part_that_does_not_compile_runs_as_it_is(
    mf_detr: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_parts(parts: Sequence[nn.Module], **_: bool) -> None:
        def refuse(*_: object) -> None:
            raise TorchDynamoException("no such operator\nmore")

        for part in parts:
            part._compiled_call_impl = refuse

    monkeypatch.setattr(MODULE, "compile_parts", compile_parts)
    monkeypatch.setattr(MODULE, "find_compiler_error", lambda _: "")
    deployed = deploy(mf_detr, image_sizes=[SIZE])
    assert not deployed.report["compile"].applied
    assert deployed.report["compile"].detail.endswith(": no such operator")
    with torch.no_grad():
        assert_same_boxes(deployed(entries(SIZE)), mf_detr(entries(SIZE)))


@pytest.mark.usefixtures("compiled")
def test_a_size_that_the_model_does_not_take_is_named() -> None:
    class Refusing(nn.Module):
        pixel_mean = (0.0, 0.0, 0.0)

        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Conv2d(3, 4, 3)

        def forward(self, _: object) -> None:
            raise ValueError("too small")

    with pytest.raises(UserError, match=r"1x2.*too small"):
        deploy(Refusing(), image_sizes=[(1, 2)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiler_is_found_whatever_the_callers_mode(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with mode():
        assert find_compiler_error(torch.device("cpu")) == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")
@pytest.mark.parametrize("kind", ["mf_detr", "retinanet"])
@torch.no_grad()
def test_compiled_detectors_find_the_boxes_of_the_plain_ones(kind: str) -> None:
    model = build(make_config(kind))
    deployed = deploy(model, image_sizes=[SIZE, OTHER])
    assert deployed.report["compile"].applied, str(deployed.report)
    for batch in ([SIZE], [OTHER], [SIZE, SIZE], [SIZE, OTHER], [(96, 96)]):
        assert_same_boxes(deployed(entries(*batch)), model(entries(*batch)))


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_results_are_the_plain_ones_with_graphs_and_without(mf_detr: nn.Module) -> None:
    model = build(make_config("mf_detr")).cuda()
    images = entries((128, 160))
    expected = model(images)
    for sizes in ([], [(128, 160)]):
        deployed = deploy(model, image_sizes=sizes)
        for _ in range(3):  # a graph is recorded at the second call
            found = deployed(images)
        assert_close(
            found[0]["instances"].scores, expected[0]["instances"].scores, atol=1e-2, rtol=0
        )
