# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which sizes are compiled, when, and what is done with a program that is no use."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.core.errors import UserError
from qbheat_det.deployment import part_programs
from tests.export.tiny_models import build, make_config

from .fake_compiler import FakeCompiler, OneMap, deploy


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    return FakeCompiler(monkeypatch)


class Case:
    """A model, where its programs lie, and what was told."""

    def __init__(self, folder: Path) -> None:
        self.model = OneMap().eval()
        self.folder = folder / "programs"
        self.told: list[str] = []

    def deploy(self, **settings: Any) -> Any:
        return deploy(self.model, self.folder, self.told, **settings)

    def run(self, deployed: Any, height: int, width: int, count: int = 1) -> None:
        x = torch.randn(count, 3, height, width)
        assert_close(deployed(x), self.model(x), rtol=1e-4, atol=1e-5)

    def assert_runs(self, deployed: Any, programs: int, plain: int) -> None:
        assert (deployed.forward.runs, deployed.forward.plain_runs) == (programs, plain)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@torch.no_grad()
def test_sizes_that_vary_compile_nothing(case: Case, compiler: FakeCompiler) -> None:
    deployed = case.deploy(compile_after=3)
    for size in ((64, 96), (67, 101), (33, 70), (128, 128), (20, 71)):
        for _ in range(2):
            case.run(deployed, *size)
    assert (compiler.shapes, case.told) == ([], [])
    assert deployed.forward.plain_runs == 10
    assert "a size that has come 3 times is compiled" in deployed.report["compile"].sentence


@torch.no_grad()
def test_a_size_is_compiled_at_its_nth_image_and_is_there_in_the_next_process(
    case: Case, compiler: FakeCompiler
) -> None:
    deployed = case.deploy(compile_after=4)
    case.run(deployed, 20, 30)
    case.run(deployed, 20, 30, count=2)
    assert compiler.shapes == []
    case.run(deployed, 20, 30, count=3)
    case.run(deployed, 20, 30)
    assert compiler.shapes == [(1, 3, 20, 30)]
    assert (deployed.forward.runs, deployed.forward.plain_runs) == (4, 2)
    assert case.told[0].startswith("compiling the backbone for 20x30, which has come 6 times")
    assert "1 s an image, 2 without; again in 0.0 s from" in case.told[1]
    assert deployed.report["program"].applied

    again = case.deploy(compile_after=4)
    case.run(again, 20, 30)
    case.run(again, 20, 31)
    assert (again.forward.runs, again.forward.plain_runs) == (1, 1)
    assert "backbone for 20x30: 1 s an image, 2 without; loaded in" in case.told[2]
    assert len(compiler.shapes) == 1


@torch.no_grad()
def test_sizes_that_are_asked_for_are_compiled_ahead(case: Case, compiler: FakeCompiler) -> None:
    sizes = [(20, 30), (30, 20), (32, 32), (16, 16), (17, 17)]  # more than would be by themselves
    deployed = case.deploy(image_sizes=sizes, compile_after=0)
    assert [shape[2:] for shape in compiler.shapes] == sizes
    for _ in range(3):
        case.run(deployed, 18, 18)
    assert len(compiler.shapes) == 5
    assert case.told[0].startswith("compiling the backbone for 20x30, as asked for")
    for wrong in ([(20,)], [20, 30], [(20, -1)]):
        with pytest.raises(UserError, match="image_sizes are pairs of height and width"):
            case.deploy(image_sizes=wrong)


@torch.no_grad()
def test_a_process_compiles_few_sizes_by_itself(case: Case, compiler: FakeCompiler) -> None:
    deployed = case.deploy(compile_after=1)
    for side in range(16, 24):
        case.run(deployed, side, side)
    assert len(compiler.shapes) == part_programs.MOST_COMPILED


def test_seconds_are_the_least_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    seconds = iter([4, 9, 3, 8, 2, 7, 5, 5, 6, 6])
    turns: list[str] = []

    def run(name: str) -> Any:
        def wait(x: str) -> None:
            nonlocal now
            now += next(seconds)
            turns.append(x + name)

        return wait

    monkeypatch.setattr(part_programs.time, "perf_counter", lambda: now)
    assert part_programs.race(run("a"), run("b"), ("run ",)) == (2, 5)
    assert turns == ["run a", "run b"] * 5


@torch.no_grad()
def test_a_slower_program_is_neither_used_nor_made_again(
    case: Case, compiler: FakeCompiler
) -> None:
    compiler.seconds = 2.5
    for _ in range(2):
        deployed = case.deploy(image_sizes=[(20, 30)])
        case.run(deployed, 20, 30)
        assert deployed.forward.runs == 0
        step = deployed.report["program"]
        assert not step.applied
        assert "slower than without: 2.5 s an image, not 2" in step.sentence
    assert len(compiler.shapes) == 1
    assert not list(case.folder.glob("*.pt2"))


@torch.no_grad()
def test_what_was_slower_with_other_numbers_of_threads_is_tried_once_with_this_one(
    case: Case, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.seconds, threads = 2.5, 1
    monkeypatch.setattr(part_programs.torch, "get_num_threads", lambda: threads)
    case.deploy(image_sizes=[(20, 30)])
    threads = 16
    case.run(case.deploy(compile_after=2), 20, 30)
    assert len(compiler.shapes) == 1  # one image is no reason to compile
    for number in (16, 1, 16):
        threads = number
        assert not case.deploy(image_sizes=[(20, 30)]).report["program"].applied
        assert len(compiler.shapes) == 2
    compiler.seconds, threads = 1, 8
    assert case.deploy(image_sizes=[(20, 30)]).report["program"].applied


@torch.no_grad()
@pytest.mark.parametrize(("factor", "says"), [(1.01, "0.01"), (1.0005, "0.0005")])
def test_a_program_that_does_not_agree_is_not_used(
    case: Case, compiler: FakeCompiler, factor: float, says: str
) -> None:
    compiler.factor = factor
    for _ in range(2):  # which is of the part, with any number of threads
        deployed = case.deploy(image_sizes=[(20, 30)])
        case.run(deployed, 20, 30)
        sentence = deployed.report["program"].sentence
        assert f"its outputs differ from the plain ones by {says} of" in sentence
    assert len(compiler.shapes) == 1
    compiler.factor = float("nan")
    assert not case.deploy(image_sizes=[(20, 31)]).report["program"].applied


@torch.no_grad()
def test_a_cached_program_of_what_the_part_did_before_is_dropped_and_made_again_when_due(
    case: Case, compiler: FakeCompiler
) -> None:
    case.deploy(image_sizes=[(20, 30)])
    compiler.factor = 1.01  # what the key does not know of has changed
    deployed = case.deploy(compile_after=2)
    case.run(deployed, 20, 30)
    case.assert_runs(deployed, 0, 1)
    assert not list(case.folder.glob("*.pt2"))
    assert "in the cache is dropped: its outputs differ" in deployed.report["program"].sentence
    compiler.factor = 1.0
    case.run(deployed, 20, 30)
    case.assert_runs(deployed, 1, 1)
    assert len(compiler.shapes) == 2


@torch.no_grad()
def test_another_activation_has_programs_of_its_own(case: Case, compiler: FakeCompiler) -> None:
    for activation in (torch.relu, nn.functional.silu):
        case.model = OneMap(activation).eval()
        case.run(case.deploy(image_sizes=[(20, 30)]), 20, 30)
    assert len(list(case.folder.glob("*.pt2"))) == len(compiler.shapes) == 2


@torch.no_grad()
def test_under_the_callers_autocast_nothing_is_compiled_or_run_compiled(
    case: Case, compiler: FakeCompiler
) -> None:
    deployed = case.deploy(compile_after=1)
    x = torch.randn(1, 3, 20, 30)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(deployed(x), case.model(x), rtol=0, atol=0)
    assert compiler.shapes == []
    case.run(deployed, 20, 30)
    with torch.autocast("cpu", torch.bfloat16):
        deployed(x)
    case.assert_runs(deployed, 1, 2)


@torch.no_grad()
def test_a_broken_entry_is_made_again(case: Case, compiler: FakeCompiler) -> None:
    case.deploy(image_sizes=[(20, 30)])
    next(case.folder.glob("*.pt2")).write_bytes(b"prog")
    deployed = case.deploy(compile_after=2)
    for _ in range(3):
        case.run(deployed, 20, 30)
    assert len(compiler.shapes) == 2
    assert (deployed.forward.runs, deployed.forward.plain_runs) == (2, 1)


@torch.no_grad()
def test_a_failing_compiler_is_told_and_not_tried_again(
    case: Case, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        compiler.shapes.append(())
        raise RuntimeError("no such operator")

    monkeypatch.setattr(part_programs, "build_program", fail)
    deployed = case.deploy(compile_after=1)
    for side in (16, 17, 16):
        case.run(deployed, side, side)
    assert len(compiler.shapes) == 1
    assert case.told[1] == "no program of the backbone for 16x16: no such operator"


@torch.no_grad()
def test_what_is_in_the_cache_runs_after_another_size_has_failed(
    case: Case, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.deploy(image_sizes=[(30, 20)])

    def refuse() -> None:
        raise UserError("there is no compiler")

    monkeypatch.setattr(part_programs, "require_compiler", refuse)
    deployed = case.deploy(image_sizes=[(20, 30), (30, 20), (16, 16)])
    lines = [step.sentence for step in deployed.report.steps if step.name == "program"]
    assert lines[0] == "backbone for 20x30: there is no compiler"
    assert "backbone for 30x20: 1 s an image" in lines[1]
    assert lines[2] == "backbone for 16x16: not compiled, since compiling failed before"
    case.assert_runs(deployed, 1, 2)
    case.run(deployed, 30, 20)
    case.assert_runs(deployed, 2, 2)


@torch.no_grad()
def test_images_that_are_padded_to_one_size_share_a_program(
    case: Case, compiler: FakeCompiler
) -> None:
    model = build(make_config("two_maps"))
    step = model.backbone.size_divisibility
    deployed = deploy(model, case.folder, case.told, compile_after=3)
    for width in (3 * step - 1, 3 * step, 3 * step - 2):
        deployed([{"image": torch.zeros(3, 2 * step, width)}])
    assert (1, 3, 2 * step, 3 * step) in compiler.shapes


@torch.no_grad()
def test_a_copy_has_weights_of_its_own_and_shares_programs(
    case: Case, compiler: FakeCompiler
) -> None:
    deployed = case.deploy(image_sizes=[(20, 30)])
    twin = copy.deepcopy(deployed)
    programs = twin.forward.programs
    assert programs.part is twin
    assert programs.plain.__self__ is twin
    assert programs.plan.report is twin.report
    nn.init.zeros_(twin.convolution.weight)
    assert float(deployed.convolution.weight.abs().sum()) > 0
    twin(torch.zeros(1, 3, 20, 30))
    assert (twin.forward.runs, len(compiler.shapes)) == (deployed.forward.runs + 1, 1)
