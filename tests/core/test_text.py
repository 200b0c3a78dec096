# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What people read: durations, sizes, lists, and how tools end."""

import errno
from collections.abc import Callable

import pytest

from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.text import format_bytes, format_duration, join_first


def test_durations_sizes_and_lists() -> None:
    seconds = (0.1204, 4.25, 190, 3900, 7199.9, 200_000)
    texts = ["120 ms", "4.2 s", "3 min 10 s", "1 h 05 min", "2 h 00 min", "2 d 8 h"]
    assert [format_duration(each) for each in seconds] == texts

    assert [format_bytes(n) for n in (512, 3.5 * 2**20, 2**41)] == ["512 B", "3.5 MiB", "2.0 TiB"]
    assert join_first([1, 2, 3]) == "1, 2, 3"
    assert join_first("abcde", 2) == "a, b and 3 more"


def end(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Returns the status and what stderr says of a tool that raises ``error``."""

    @exit_on_user_error
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


def test_bad_input_is_one_line_and_an_interruption_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert end(UserError("no images in 'x'"), capsys) == (2, "error: no images in 'x'\n")

    assert end(KeyboardInterrupt(), capsys) == (130, "interrupted\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_wherever_it_is_met(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = end(OSError(number, "full", "run/metrics.json"), capsys)
    assert code == 2
    assert said.startswith("error: the disk that holds 'run/metrics.json' is full")
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ValueError("a defect")])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    def fail() -> None:
        raise error

    wrapped: Callable[[], None] = exit_on_user_error(fail)
    with pytest.raises(type(error)):
        wrapped()
