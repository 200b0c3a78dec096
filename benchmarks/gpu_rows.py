# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Rows that a job of `make gpu` writes, and a pytest plugin that writes a row per test.

The file is written after each row, so a job that is stopped loses nothing. Options of pytest:
``-p benchmarks.gpu_rows --gpu-rows FILE``. The values of a test are its ``record_property``s.
"""

import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import write_json

OK = "ok"
FAILED = "failed"
SKIPPED = "skipped"
MISSING = "not installed"
Value = float | str


@dataclass(frozen=True)
class Row:
    """A test or a measurement.

    Attributes:
        name: what was tested or measured.
        outcome: "ok", "failed", "skipped" or "not installed".
        values: values by column, such as "images/s".
        error: the traceback of a failure, or why nothing was measured.
    """

    name: str
    outcome: str = OK
    values: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


class Rows:
    """Writes rows to a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Adds a row, writes the file, and prints the row."""
        self.rows.append(row)
        write_json(self.path, [asdict(each) for each in self.rows])
        values = ", ".join(f"{name} {format_value(each)}" for name, each in row.values.items())
        print(f"{row.name}: {row.outcome} {values}", flush=True)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Context that adds a row if what it contains fails, instead of raising the error."""
        try:
            yield
        except ModuleNotFoundError as error:
            self.add(Row(name, MISSING, error=str(error)))
        except Exception:
            self.add(Row(name, FAILED, error=traceback.format_exc()))


def format_value(value: Value) -> str:
    """Returns a number with three digits."""
    if isinstance(value, str):
        return value
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def pytest_addoption(parser: Any) -> None:
    """Adds the option for the file."""
    parser.addoption("--gpu-rows", type=Path, required=True, help="the file of rows")


def pytest_configure(config: Any) -> None:
    """Adds the recorder."""
    config.pluginmanager.register(Recorder(Rows(config.getoption("--gpu-rows"))))


class Recorder:
    """Adds a row for each test."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._start = time.perf_counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Adds a row after the call of a test, or if it is skipped or fails elsewhere."""
        if report.when != "call" and report.passed:
            return
        outcome = OK if report.passed else report.outcome
        values: dict[str, Value] = {"seconds": report.duration, **dict(report.user_properties)}
        error = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            error = str(report.longrepr[-1])
        elif not report.passed:
            error = report.longreprtext
        self._rows.add(Row(report.nodeid.removeprefix("tests/"), outcome, values, error))

    def pytest_collectreport(self, report: Any) -> None:
        """Adds a row for a file that cannot be imported."""
        if report.failed:
            self._rows.add(Row(report.nodeid, FAILED, error=report.longreprtext))
