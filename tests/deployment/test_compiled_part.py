# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where a program takes the place of a part, and where the part speaks for itself."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qbheat_det.deployment.compiled_part import CompiledForward, find_batch_axes
from qbheat_det.deployment.program import make_sample


class Part(nn.Module):
    """Maps and queries of two maps, as a decoder has them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 1)

    def forward(self, maps: list[Tensor], mask: Tensor | None = None) -> dict[str, Any]:
        fine = self.convolution(maps[0])
        coarse = maps[1].mean(dim=(2, 3))
        if mask is not None:
            fine = fine.masked_fill(mask, 0)
        return {"map": fine, "states": torch.stack([coarse, 2 * coarse])}


class Case:
    """A part, its compiled twin, and what was told."""

    def __init__(self) -> None:
        self.part = Part().eval().requires_grad_(False)
        self.calls: list[Any] = []
        self.told: list[str] = []
        arguments = (maps(1, 20, 30),)
        self.fast = CompiledForward(
            plain=self.part.forward,
            program=self._program,
            sample=make_sample(arguments, image_side=160, step=0, fixed=False),
            batch_axes=find_batch_axes(self.part, arguments),
            tell=self.told.append,
            name="decoder",
        )

    def _program(self, features: list[Tensor]) -> dict[str, Any]:
        assert len(features[0]) == 1
        self.calls.append([tuple(x.shape) for x in features])
        return self.part.forward(features)


def maps(count: int, height: int, width: int) -> list[Tensor]:
    return [torch.randn(count, 3, height, width), torch.randn(count, 3, height // 2, width // 2)]


def test_five_sizes_take_one_program() -> None:
    case = Case()
    for size in ((20, 30), (21, 31), (30, 20), (100, 64), (10, 11)):
        x = maps(1, *size)
        assert_close(case.fast(x)["map"], case.part(x)["map"])
        assert_close(case.fast(x, None)["map"], case.part(x)["map"])
    assert (case.fast.runs, case.fast.plain_runs, case.told) == (10, 0, [])


def test_images_of_a_batch_go_one_by_one_and_come_back_together() -> None:
    case = Case()
    x = maps(3, 20, 30)
    found, expected = case.fast(x), case.part(x)
    assert len(case.calls) == 3
    assert_close(found["map"], expected["map"])
    assert_close(found["states"], expected["states"])  # images on the second axis


def test_what_the_program_was_not_made_for_goes_the_plain_way_which_is_said_once() -> None:
    case = Case()
    mask = torch.zeros(1, 1, 20, 30, dtype=torch.bool)
    mask[..., 15:] = True
    small, half = maps(1, 5, 30), [x.double() for x in maps(1, 20, 30)]
    for arguments in ((maps(1, 20, 30), mask), (small,), (maps(1, 20, 30)[:1] * 3,)):
        assert_close(case.fast(*arguments)["map"], case.part(*arguments)["map"])
    case.part.double()
    assert_close(case.fast(half)["map"], case.part(half)["map"])
    assert (case.fast.runs, case.fast.plain_runs) == (0, 4)
    assert len(case.told) == 1
    assert "was not made for [(1, 3, 20, 30)" in case.told[0]


def test_inputs_with_gradients_keep_them() -> None:
    case = Case()
    x = [y.requires_grad_() for y in maps(1, 20, 30)]
    case.fast(x)["map"].sum().backward()
    assert x[0].grad is not None
    assert case.fast.runs == 0


def test_a_copy_has_weights_of_its_own_and_shares_the_program() -> None:
    case = Case()
    case.part.forward = case.fast
    twin = copy.deepcopy(case.part)
    nn.init.zeros_(twin.convolution.weight)
    assert twin.forward.program == case.fast.program
    assert twin.forward.plain.__self__ is twin
    assert float(case.part.convolution.weight.abs().sum()) > 0
