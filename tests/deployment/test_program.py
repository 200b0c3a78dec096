# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Programs of machine code: equal to the part, in any layout, with the threads of the process."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import qbheat_det
from qbheat_det.deployment import part_programs
from qbheat_det.deployment.program import InPrecision, lay_out
from tests.export.tiny_models import build, make_config

from .fake_compiler import OneMap, deploy
from .test_deploy import assert_same_boxes, entries

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no g++ to compile programs with"
)


@pytest.fixture
def _every_program_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of networks as small as these it depends on the machine's mood."""
    monkeypatch.setattr(part_programs, "race", lambda *_: (1.0, 2.0))


@needs_compiler
@pytest.mark.usefixtures("_every_program_is_faster")
@torch.inference_mode()
def test_a_program_agrees_in_any_layout_and_the_next_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(*_: object, **__: object) -> None:
        pytest.fail("compiled through a header below the folder of all users' temporary files")

    monkeypatch.setattr("torch._inductor.codecache._precompile_header", pick, raising=False)
    model, told, folder = OneMap().eval(), list[str](), tmp_path / "programs"
    deployed = deploy(model, folder, told, image_sizes=[(65, 90)])
    assert deployed.report["program"].applied, str(deployed.report)
    batch = torch.randn(3, 3, 65, 90)
    for x in (batch[:1], batch, batch.contiguous(memory_format=torch.channels_last)):
        assert_close(deployed(x), model(x), rtol=1e-4, atol=1e-5)
    assert (deployed.forward.runs, deployed.forward.plain_runs) == (8, 0)
    (package,) = folder.glob("*.pt2")
    assert_takes_the_threads_of_the_process(package)

    monkeypatch.setattr(part_programs, "build_program", lambda *_: pytest.fail("compiled again"))
    again = deploy(model, folder, told)
    assert_close(again(batch), model(batch), rtol=1e-4, atol=1e-5)
    assert (again.forward.runs, again.forward.plain_runs) == (3, 0)
    assert "loaded in" in told[-1]


def assert_takes_the_threads_of_the_process(package: Path) -> None:
    """Loops that share work out say no number of threads of their own."""
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name) for name in archive.namelist() if name.endswith(".cpp")]
    loops = [line for line in b"".join(sources).splitlines() if b"#pragma omp parallel" in line]
    assert loops
    assert not [line for line in loops if b"num_threads" in line]


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("_every_program_is_faster")
@pytest.mark.parametrize("kind", ["mf_detr", "retinanet"])
@torch.no_grad()
def test_compiled_detectors_find_the_boxes_of_the_plain_ones(kind: str, tmp_path: Path) -> None:
    model, told, sizes = build(make_config(kind)), list[str](), [(67, 101), (128, 96)]
    deployed = deploy(model, tmp_path / "programs", told, image_sizes=sizes)
    for size in sizes:
        assert_same_boxes(deployed(entries(size)), model(entries(size)))
        assert_same_boxes(deployed(entries(size, size)), model(entries(size, size)))
    for part in (deployed.backbone, getattr(deployed, "decoder", None) or deployed.head):
        assert part.forward.plain_runs == 0
        assert part.forward.runs == 8  # one of each size ahead


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_results_are_the_plain_ones_with_graphs_and_without() -> None:
    model = build(make_config("mf_detr")).cuda()
    images = entries((128, 160))
    expected = model(images)
    for sizes in ([], [(128, 160)]):
        deployed: Any = qbheat_det.deploy(model, precision="float32", image_sizes=sizes)
        for _ in range(3):  # a graph is recorded at the second call
            found = deployed(images)
        assert_close(
            found[0]["instances"].scores, expected[0]["instances"].scores, atol=1e-2, rtol=0
        )
        assert deployed.report["CUDA graphs"].applied == bool(sizes)


class Choice(nn.Module):
    """Scores, the index of the largest, and a mask."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
        scores = x @ (x.t() if weight is None else weight)
        return scores, scores.argmax(dim=1), scores > 0


def test_a_part_in_bfloat16_takes_keywords_and_keeps_integers_and_masks() -> None:
    x, weight = torch.tensor([[1.0, 2.0], [-3.0, 0.5]]), torch.eye(2)
    for dtype in (torch.float32, torch.bfloat16):
        part = InPrecision(Choice(), dtype, torch.device("cpu"))
        scores, index, mask = part(x=x, weight=weight)
        assert_close(scores, x)  # all of which bfloat16 can say
        assert_close(index, torch.tensor([1, 1]))
        assert_close(mask, x > 0)


def test_maps_are_brought_into_one_layout() -> None:
    x, tokens = torch.randn(1, 4, 5, 6), torch.randn(2, 3).t()
    (laid,), other, nothing = lay_out(([x], tokens, None))
    assert laid.is_contiguous(memory_format=torch.channels_last)
    assert other.is_contiguous()
    assert nothing is None
    assert_close(laid, x, rtol=0, atol=0)
