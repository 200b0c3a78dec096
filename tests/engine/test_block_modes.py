# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checkpointed and compiled blocks, and channels-last maps: the same numbers in other ways."""

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from qbheat_det.config import get_cfg
from qbheat_det.engine import Trainer, block_modes
from qbheat_det.engine.block_modes import (
    apply_step_keys,
    find_blocks,
    find_compiler_error,
    set_block_modes,
)

from .conftest import TrainAfresh
from .gradient_cases import (
    FAST_WITHOUT_NOISE,
    MF_DETR,
    Case,
    build_case,
    make_case_config,
    make_image,
)
from .test_resume import assert_same_bits, break_at, comparable
from .tiny_training import state

EVERYTHING_RANDOM = Case(
    MF_DETR,
    opts=(
        *("MODEL.MOBILE_FORMER.DROP_PATH", 0.3, "MODEL.MF_DETR.DROPOUT", 0.3),
        *("MODEL.MF_DETR.NORM", "BN", *FAST_WITHOUT_NOISE),
    ),
)


# Frees 64 MiB and prints how much of it the process keeps, in MiB.
_PROGRAM = """
import torch
from torch import nn
from qbheat_det.config import get_cfg
from qbheat_det.engine.block_modes import apply_step_keys
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
cfg = get_cfg()
cfg.SOLVER.KEEP_MEMORY = {kept}
apply_step_keys(cfg, nn.Linear(2, 2))
before = resident()
block = torch.zeros(16 << 20)
del block
print((resident() - before) / 2**20)
"""


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


def take_step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Returns losses, gradients and buffers of a step, and the next random number."""
    torch.manual_seed(7)
    model.zero_grad()
    outputs = model(batch)
    losses = outputs if isinstance(outputs, dict) else {"y": outputs.square().mean()}
    drawn = torch.rand(1)
    torch.stack(list(losses.values())).sum().backward()
    gradients = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return {**losses, **gradients, **dict(model.named_buffers()), "drawn": drawn}


def test_checkpointed_blocks_give_the_same_bits_and_move_statistics_once() -> None:
    model = build_case(EVERYTHING_RANDOM)
    batch = [make_image(index) for index in (1, 0, 5)]
    batch[1]["image"] = batch[1]["image"][:, :48]
    batch[1]["instances"]._image_size = (48, 64)
    plain = copy.deepcopy(model).train()
    set_block_modes(model.train(), checkpointed=True)
    assert len(find_blocks(model)) >= 6
    for _ in range(2):
        found, expected = take_step(model, batch), take_step(plain, batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert int(expected["backbone.stem.norm.num_batches_tracked"]) == 2


def test_only_the_inputs_of_a_block_are_stored() -> None:
    def count_stored(model: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model([make_image(1), make_image(0)])
        return sum(sizes.values())

    model = build_case(EVERYTHING_RANDOM).train()
    before = count_stored(model)
    set_block_modes(model, checkpointed=True)
    assert count_stored(model) < 0.5 * before


def test_names_copies_and_evaluation_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    plain = copy.deepcopy(model).eval()
    monkeypatch.setattr(block_modes, "find_compiler_error", lambda _: "")
    monkeypatch.setattr(
        torch, "compile", lambda *_, **__: lambda *_: pytest.fail("the block itself runs")
    )
    set_block_modes(model, checkpointed=True, compiled=True)
    x = torch.randn(2, 16)
    assert list(model.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(model.eval()(x), plain(x), rtol=0, atol=0)
    copied = copy.deepcopy(model)
    assert all(block._compiled_call_impl is None for block in find_blocks(copied).values())


def test_blocks_are_the_outermost_members_of_lists_with_children() -> None:
    block = nn.Module()
    block.parts = nn.ModuleList([nn.MultiheadAttention(2, 1)])
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([block]), nn.Linear(1, 1)])
    model.alone = nn.MultiheadAttention(2, 1)
    model.inner = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ModuleList([nn.Linear(1, 1)]))
    assert find_blocks(model) == {"stages.0.0": block}


@pytest.mark.slow
def test_equal_blocks_compile_once_for_all_sizes_and_compute_the_same() -> None:
    skip_without_compiler()
    model = Layers().train()
    plain = copy.deepcopy(model)
    set_block_modes(model, checkpointed=True, compiled=True)
    for size in (4, 6, 9):
        x = torch.randn(size, 16)
        torch.testing.assert_close(take_step(model, x), take_step(plain, x), rtol=1e-4, atol=1e-5)
    # One of the function that looks for a compiler; the first block's input needs no gradient.
    assert counters["stats"]["unique_graphs"] <= 3
    copy.deepcopy(model)


def test_without_a_compiler_blocks_run_as_they_are_and_the_key_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_modes, "find_compiler_error", lambda _: "no g++")
    model, cfg = Layers(), get_cfg()
    cfg.SOLVER.COMPILE = True
    with caplog.at_level(logging.WARNING, logger="qbheat_det"):
        apply_step_keys(cfg, model)
    assert [("SOLVER.COMPILE" in r.getMessage()) for r in caplog.records] == [True]
    assert all(block._compiled_call_impl is None for block in find_blocks(model).values())


def test_a_block_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(block_modes, "find_compiler_error", lambda _: "")
    compile_anyhow = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_anyhow(f, backend=fail, **options)
    )
    torch._dynamo.reset()
    model, x = Layers().train(), torch.randn(4, 16)
    expected = copy.deepcopy(model)(x)
    set_block_modes(model, compiled=True)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    torch._dynamo.reset()


def test_maps_are_channels_last_and_the_outputs_the_same() -> None:
    cfg = make_case_config(EVERYTHING_RANDOM, "cpu")
    model = Trainer.build_model(cfg).eval()
    cfg.MODEL.CHANNELS_LAST = False
    plain = Trainer.build_model(cfg).eval()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 64, 64)
    maps, expected = (each.backbone(images) for each in (model, plain))
    for name in ("s8", "s16_expanded"):
        assert maps[name].is_contiguous(memory_format=torch.channels_last)
        assert expected[name].is_contiguous()
    torch.testing.assert_close(maps, expected)


def skip_without_compiler() -> None:
    error = find_compiler_error(torch.device("cpu"))
    if error:
        pytest.skip(f"PyTorch cannot compile here: {error}")
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.slow
def test_a_compiled_run_on_one_size_that_was_broken_ends_with_the_bits_of_an_unbroken_one(
    train_afresh: TrainAfresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_compiler()
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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("kept", [True, False])
def test_a_process_keeps_freed_memory_if_the_key_says_so(kept: bool) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(kept=kept)]
    held = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (held > 60) is kept
