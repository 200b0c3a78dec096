# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two processes compare the areas of all their images, as one with the joined batch does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .processes import make_args, run_in_processes
from .wasserstein_cases import FORMS, run_forms, run_step

Results = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: other sums in convolutions round otherwise
    folder: Path = tmp_path_factory.mktemp("wasserstein")
    yield run_in_processes(run_forms, make_args(), folder)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_joined_batch(two_processes: Results, form: str) -> None:
    joined = run_step(form)
    largest = max(float(gradient.abs().max()) for gradient in joined.values())
    assert all(gradient.any() for name, gradient in joined.items() if name != "critic.head.bias")
    for found in two_processes:
        assert found[form].keys() == joined.keys()
        for name, expected in joined.items():
            torch.testing.assert_close(
                found[form][name], expected, rtol=1e-4, atol=2e-6 * largest, msg=name
            )
