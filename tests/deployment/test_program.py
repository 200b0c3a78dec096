# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Programs of machine code: one for all sizes, in any layout, from the disk the second time."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.testing import assert_close

import qbheat_det
from qbheat_det.deployment import program
from qbheat_det.deployment.program import SizeRange, lay_out, make_sample
from tests.engine.exporting.split_cases import build, make_config

from .test_deploy import assert_same_boxes, entries

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no g++ to compile programs with"
)
FIVE_SIZES = [(64, 96), (67, 101), (333, 70), (128, 128), (200, 71)]
FIVE_SIZES = [(max(65, h), w) for h, w in FIVE_SIZES]


class OneMap(Backbone):
    """A convolution whose result depends on where each pixel lies."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"s2": self.norm(self.convolution(x)).relu()}

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {"s2": ShapeSpec(channels=8, stride=2)}


def deploy(model: nn.Module, folder: Path, told: list[str]) -> Any:
    return qbheat_det.deploy(
        model, precision="float32", keep_memory=False, cache_folder=folder, tell=told.append
    )


@needs_compiler
@torch.no_grad()
def test_one_program_serves_all_sizes_and_the_next_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, told = OneMap().eval(), list[str]()
    folder = tmp_path / "programs"
    deployed = deploy(model, folder, told)
    assert deployed.report["compile"].applied, str(deployed.report)
    assert told[0].startswith("compiling the backbone for this processor, once")
    assert "again in" in told[1]
    assert str(folder) in told[1]
    for threads in (1, 2):  # those that the process has when it runs
        torch.set_num_threads(threads)
        for size in FIVE_SIZES:
            x = torch.randn(1, 3, *size)
            for layout in (x, x.contiguous(memory_format=torch.channels_last)):
                assert_close(deployed(layout), model(x), rtol=1e-4, atol=1e-5)
    batch = torch.randn(3, 3, 80, 90)
    assert_close(deployed(batch), model(batch), rtol=1e-4, atol=1e-5)
    assert (deployed.forward.runs, deployed.forward.plain_runs) == (23, 0)
    assert len(list(folder.glob("*.pt2"))) == 1

    with monkeypatch.context() as patch:
        patch.setattr(program, "_build", lambda *_: pytest.fail("compiled again"))
        again = deploy(model, folder, told)
    assert again.report["compile"].applied
    assert_close(again(batch), model(batch), rtol=1e-4, atol=1e-5)
    assert len(told) == 2

    built: list[Path] = []
    good = next(folder.glob("*.pt2")).read_bytes()
    next(folder.glob("*.pt2")).write_bytes(good[: len(good) // 2])
    monkeypatch.setattr(
        program, "_build", lambda part, sample, path: built.append(path) or path.write_bytes(good)
    )
    assert deploy(model, folder, told).report["compile"].applied
    assert len(built) == 1  # what was broken is made again


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", ["mf_detr", "retinanet"])
@torch.no_grad()
def test_compiled_detectors_find_the_boxes_of_the_plain_ones(kind: str, tmp_path: Path) -> None:
    model, told = build(make_config(kind)), list[str]()
    deployed = deploy(model, tmp_path / "programs", told)
    assert deployed.report["compile"].sentence.startswith("backbone and")
    for size in FIVE_SIZES:
        assert_same_boxes(deployed(entries(size)), model(entries(size)))
    assert_same_boxes(deployed(entries(*FIVE_SIZES)), model(entries(*FIVE_SIZES)))
    for part in (deployed.backbone, getattr(deployed, "decoder", None) or deployed.head):
        assert part.forward.plain_runs == 0
    assert len(told) == 4


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_results_are_the_plain_ones_with_graphs_and_without() -> None:
    model = build(make_config("mf_detr")).cuda()
    images = entries((128, 160))
    expected = model(images)
    for size in (None, (128, 160)):
        deployed: Any = qbheat_det.deploy(model, precision="float32", image_size=size)
        for _ in range(3):  # a graph is recorded at the second call
            found = deployed(images)
        assert_close(
            found[0]["instances"].scores, expected[0]["instances"].scores, atol=1e-2, rtol=0
        )
        assert deployed.report["CUDA graphs"].applied == (size is not None)


def test_which_sides_follow_the_image() -> None:
    maps = [torch.zeros(1, 4, 100, 136), torch.zeros(1, 4, 13, 17)]
    sample = make_sample((maps, None, torch.zeros(1, 6, 192)), image_side=800, step=0, fixed=False)
    fine, coarse, nothing, tokens = sample.ranges
    assert fine is not None
    assert coarse is not None
    assert (fine[0].least, coarse[1].least) == (9, 2)
    assert nothing is tokens is None
    image = make_sample((torch.zeros(1, 3, 64, 96),), image_side=64, step=32, fixed=False)
    assert image.ranges == ((SizeRange(96, 4096, 32),) * 2,)
    assert 128 in SizeRange(96, 4096, 32)
    assert not {64, 100, 4128} & {n for n in (64, 100, 4128) if n in SizeRange(96, 4096, 32)}
    assert make_sample((maps,), image_side=800, step=0, fixed=True).ranges == (None, None)


def test_maps_are_brought_into_one_layout() -> None:
    x, tokens = torch.randn(1, 4, 5, 6), torch.randn(2, 3).t()
    (laid,), other, nothing = lay_out(([x], tokens, None))
    assert laid.is_contiguous(memory_format=torch.channels_last)
    assert other.is_contiguous()
    assert nothing is None
    assert_close(laid, x, rtol=0, atol=0)
