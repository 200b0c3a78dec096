# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fused steps against PyTorch's own of one parameter at a time, and what they load."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from qbheat_det.solver.optimizer import build_fused, clip_norm

KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
}


def small_model(*, channels_last: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 5, 1))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def build(kind: str, model: nn.Module) -> Optimizer:
    optimizer, arguments = KINDS[kind]
    return build_fused(optimizer, [{"params": model.parameters()}], **arguments)


def train(model: nn.Module, optimizer: Optimizer, *, start: int, steps: int) -> None:
    for step in range(start, start + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 9, 9)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "channels_last"), [("AdamW", True), ("SGD", False)])
def test_fused_steps_are_those_of_the_plain_optimizer(kind: str, channels_last: bool) -> None:
    models = [small_model(channels_last=channels_last).double() for _ in range(2)]
    plain, arguments = KINDS[kind]
    torch.set_default_dtype(torch.float64)
    try:
        optimizers = [
            build(kind, models[0]),
            plain(models[1].parameters(), foreach=False, **arguments),
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, start=0, steps=4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizers[0].param_groups[0]["fused"]
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("before", ["plain", "contiguous"])
def test_state_of_a_plain_run_and_of_another_layout_is_taken_up(before: str) -> None:
    old = small_model(channels_last=before == "plain")
    if before == "plain":
        optimizer: Optimizer = torch.optim.AdamW(old.parameters(), **KINDS["AdamW"][1])  # type: ignore[arg-type]
    else:
        optimizer = build("AdamW", old)
    train(old, optimizer, start=0, steps=2)
    new = small_model(channels_last=True)
    new.load_state_dict(old.state_dict())
    continued = build("AdamW", new)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert continued.param_groups[0]["fused"]
    for parameter, state in continued.state.items():
        assert state["exp_avg"].stride() == parameter.stride()
    for model, stepped in ((old, optimizer), (new, continued)):
        train(model, stepped, start=2, steps=2)
    for ours, theirs in zip(new.parameters(), old.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    plain = torch.optim.AdamW(new.parameters(), fused=False)  # and the other way
    plain.load_state_dict(continued.state_dict())
    train(new, plain, start=4, steps=1)


def test_steps_are_not_fused_on_a_device_without_kernels() -> None:
    optimizer = build("SGD", nn.Linear(2, 2, device="meta"))
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("max_norm", "value"),
    [(0.5, 3.0), (4.999, 3.0), (5.0, 3.0), (7.0, 3.0), (math.inf, 3.0), (1.0, math.nan)],
)
def test_clipping_leaves_the_bits_that_torch_leaves(max_norm: float, value: float) -> None:
    found, expected = ([nn.Parameter(torch.zeros(1)) for _ in range(3)] for _ in range(2))
    for group in (found, expected):
        group[0].grad, group[1].grad = torch.tensor([value]), torch.tensor([-4.0])
    norm = clip_norm(found, max_norm=max_norm, norm_type=2.0)
    same: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected, max_norm), **same)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **same)
    assert found[2].grad is None
