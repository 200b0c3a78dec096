# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How tools end: one line on stderr and a status, and a traceback for defects alone."""

import errno
from collections.abc import Callable

import pytest

from qbheat_det.core.errors import UserError, exit_on_user_error


def end(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Returns the status and what stderr says of a tool that raises ``error``."""

    @exit_on_user_error
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(UserError("no images in 'x'"), capsys) == (2, "error: no images in 'x'\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_wherever_it_is_met(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = end(OSError(number, "full", "run/metrics.json"), capsys)
    assert code == 2
    assert said.startswith("error: the disk that holds 'run/metrics.json' is full")
    assert said.count("\n") == 1


def test_an_interruption_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(KeyboardInterrupt(), capsys) == (130, "interrupted\n")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ValueError("a defect")])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    def fail() -> None:
        raise error

    wrapped: Callable[[], None] = exit_on_user_error(fail)
    with pytest.raises(type(error)):
        wrapped()
