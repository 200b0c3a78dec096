# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where a program takes the place of a part, and where the part speaks for itself."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qbheat_det.deployment.compiled_part import CompiledForward
from qbheat_det.deployment.part_programs import Program, find_batch_axes


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
    """A part, its compiled twin with a program for the first signature, and who was called."""

    def __init__(self) -> None:
        self.part = Part().eval().requires_grad_(False)
        self.plain = self.part.forward
        self.calls: list[Any] = []
        self.signature: Any = None
        axes = find_batch_axes(self.part, (maps(1, 20, 30),))
        self.program = Program(self._run, axes)
        self.fast: Any = CompiledForward(self)  # type: ignore[arg-type]

    def find(self, signature: Any, arguments: Any, count: int) -> Program | None:
        self.signature = self.signature or signature
        return self.program if signature == self.signature else None

    def _run(self, features: list[Tensor]) -> dict[str, Any]:
        assert len(features[0]) == 1
        self.calls.append([tuple(x.shape) for x in features])
        return self.part(features)


def maps(count: int, height: int, width: int) -> list[Tensor]:
    return [torch.randn(count, 3, height, width), torch.randn(count, 3, height // 2, width // 2)]


def test_images_of_a_batch_go_one_by_one_and_come_back_together() -> None:
    case = Case()
    for count in (1, 3):
        x = maps(count, 20, 30)
        found, expected = case.fast(x, None), case.part(x)
        assert_close(found["map"], expected["map"])
        assert_close(found["states"], expected["states"])  # images on the second axis
    assert len(case.calls) == case.fast.runs == 4


def test_what_there_is_no_program_for_goes_the_plain_way() -> None:
    case = Case()
    case.fast(maps(1, 20, 30))
    mask = torch.zeros(1, 1, 20, 30, dtype=torch.bool)
    mask[..., 15:] = True
    small, three = maps(1, 5, 30), maps(1, 20, 30)[:1] * 3
    for arguments in ((maps(1, 20, 30), mask), (small,), (three,)):
        assert_close(case.fast(*arguments)["map"], case.part(*arguments)["map"])
    x = maps(1, 20, 30)
    assert_close(case.fast(maps=x)["map"], case.part(x)["map"])
    mixed = [x[0], x[1].expand(2, -1, -1, -1)]  # a shared map: not one an image
    assert_close(case.fast(mixed)["states"], case.part(mixed)["states"])
    case.part.double()
    half = [y.double() for y in x]
    assert_close(case.fast(half)["map"], case.part(half)["map"])
    assert (case.fast.runs, case.fast.plain_runs) == (1, 6)


def test_outputs_that_are_not_stacked_by_image_are_made_for_one_alone() -> None:
    case = Case()
    case.program = Program(case.program.run, [0, None])
    case.fast(maps(1, 20, 30))
    case.fast(maps(2, 20, 30))
    assert (case.fast.runs, case.fast.plain_runs) == (1, 1)


def test_inputs_with_gradients_keep_them() -> None:
    case = Case()
    x = [y.requires_grad_() for y in maps(1, 20, 30)]
    case.fast(x)["map"].sum().backward()
    assert x[0].grad is not None
    assert case.fast.runs == 0
