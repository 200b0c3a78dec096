# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Durations, sizes and long lists as text."""

from qbheat_det.core.text import format_bytes, format_duration, join_first


def test_durations() -> None:
    seconds = (0.1204, 4.25, 190, 3900, 7199.9, 200_000)
    texts = ["120 ms", "4.2 s", "3 min 10 s", "1 h 05 min", "2 h 00 min", "2 d 8 h"]
    assert [format_duration(each) for each in seconds] == texts


def test_sizes_and_lists() -> None:
    assert [format_bytes(n) for n in (512, 3.5 * 2**20, 2**41)] == ["512 B", "3.5 MiB", "2.0 TiB"]
    assert join_first([1, 2, 3]) == "1, 2, 3"
    assert join_first("abcde", 2) == "a, b and 3 more"
