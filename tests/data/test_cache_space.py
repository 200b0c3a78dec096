# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether a cache fits on its disk, said before anything is computed."""

import shutil
from pathlib import Path

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.data import check_space, format_bytes


def test_a_cache_that_fits_exactly_is_let_through_and_one_byte_more_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def measure(path: Path) -> tuple[int, int, int]:
        asked.append(path)
        return shutil._ntuple_diskusage(5000, 2000, 3000)

    monkeypatch.setattr(shutil, "disk_usage", measure)
    folder = tmp_path / "not" / "there" / "yet"
    assert check_space(folder, 3000) == 3000
    with pytest.raises(
        UserError,
        match=r"\(3,001 bytes\), but the disk of '.*yet' has .*\(3,000 bytes\) free: free",
    ):
        check_space(folder, 3001)
    assert asked[0] == tmp_path


def test_sizes_are_in_binary_units_and_bytes() -> None:
    assert format_bytes(1.5 * 2**30) == "1.50 GiB (1,610,612,736 bytes)"
