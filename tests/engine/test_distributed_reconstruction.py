# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two processes give QB-Heat and scattered masking the gradients of one with the joined batch."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .processes import make_args, run_in_processes
from .reconstruction_gradients import Case, run_case, run_cases

CASES = {
    f"{arch}, {kind}": Case(arch, num_images=images, accumulate=accumulate)
    for arch in ("QBHeat", "InterpolatedMasking", "MaskTokenMasking")
    for kind, images, accumulate in (("plain", 4, 1), ("uneven micro-batches", 7, 2))
}
Results = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: other sums in convolutions round otherwise
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases in one start of two processes, which costs more than they do."""
    args = make_args(cases=CASES)
    return run_in_processes(run_cases, args, tmp_path_factory.mktemp("gradients"))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_joined_batch(two_processes: Results, name: str) -> None:
    joined = run_case(replace(CASES[name], accumulate=1))
    assert joined["total_loss"] > 0.1
    for found in two_processes:
        assert found[name].keys() == joined.keys()
        for key, value in joined.items():
            # Keys' biases cancel in an attention: nothing but rounding is left, 1e-12 at most.
            atol = 1e-5 * value.abs().max().item() + 1e-10
            torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=atol)
