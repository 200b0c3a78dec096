# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tables of docs/performance.md come from the files of make bench and from nowhere else."""

from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.run import BENCHMARKS
from benchmarks.tables import PAGE, fill, main
from benchmarks.timing import ENVIRONMENTS, Result, write_environment, write_results

TEXT = """\
Before.
<!-- bench latency 285m -->
old
<!-- end -->
Between, as `<!--` in a text.
<!-- bench memory -->
kept
<!-- end -->
After.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        Result.lower_is_better("latency/285m_vs_peer", 0.5, 2.0, "s"),
        Result.lower_is_better("latency/3.7g_vs_peer", 1.0, 2.0, "s"),
    ]
    write_results(rows, tmp_path / "latency.json")
    write_environment("latency", tmp_path / ENVIRONMENTS)
    return tmp_path


def test_a_table_has_the_rows_it_names_and_the_machine_and_the_text_stays(folder: Path) -> None:
    filled = fill(TEXT, folder)
    assert "| `285m_vs_peer` | 0.5 | 2 | s | 4.00 |" in filled
    assert "3.7g" not in filled
    assert "old" not in filled
    assert "Measured on: " in filled
    assert filled.startswith("Before.\n")
    assert filled.endswith(TEXT[TEXT.index("Between") :])
    assert fill(filled, folder) == filled


def test_check_refuses_a_page_of_other_figures_and_writes_nothing(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(TEXT)
    with pytest.raises(SystemExit):
        main(["--bench", str(folder), "--page", str(page), "--check"])
    assert page.read_text() == TEXT
    main(["--bench", str(folder), "--page", str(page)])
    main(["--bench", str(folder), "--page", str(page), "--check"])


def test_the_page_names_benchmarks_that_there_are() -> None:
    found = [match[1] for match in tables._BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    assert found
    assert set(found) <= set(BENCHMARKS)
