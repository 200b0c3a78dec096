# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two processes compare the areas of all their images, as one with the joined batch does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .processes import make_args, run_in_processes
from .wasserstein_cases import FORMS, run_forms, run_step

Results = list[dict[tuple[str, str], dict[str, Tensor]]]


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
        gradients = found[form, "fixed"]
        assert gradients.keys() == joined.keys()
        for name, expected in joined.items():
            torch.testing.assert_close(
                gradients[name], expected, rtol=1e-4, atol=2e-6 * largest, msg=name
            )


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Tensor:
    """Of all gradients as one vector, and of the loss."""
    flat = torch.cat([value.flatten() for value in expected.values()])
    return (torch.cat([found[name].flatten() for name in expected]) - flat).norm() / flat.norm()


@pytest.mark.parametrize("form", FORMS)
def test_of_batch_statistics_only_synchronised_ones_give_the_joined_gradients(
    two_processes: Results, form: str
) -> None:
    joined = run_step(form, "BN")
    # The synchronised variance is a difference of means, which rounds more than BatchNorm's own.
    assert relative_error(two_processes[0][form, "naiveSyncBN_N"], joined) < 0.01
    assert relative_error(two_processes[0][form, "BN"], joined) > 0.1
