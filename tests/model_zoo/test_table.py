# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The entries in ``MODEL_ZOO.md`` follow from the index, and its links lead to configs."""

import re
from pathlib import Path

import pytest

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import Metric, index, sources
from qbheat_det.model_zoo.table import ZOO_FILE, render_entries, write_table

from .conftest import MakeEntry, make_entry


def test_the_file_of_the_repository_has_the_entries_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = Path(index.__file__).parent
    monkeypatch.setattr(sources, "SHIPPED", package / "weights")
    monkeypatch.setattr(index, "INDEX_FILE", package / "index.json")
    text = ZOO_FILE.read_text(encoding="utf-8")
    (tmp_path / "ZOO.md").write_text(text, encoding="utf-8")
    updated = write_table(tmp_path / "ZOO.md").read_text(encoding="utf-8")
    assert text == updated, "run: qbheat zoo table"
    links = re.findall(r"\]\(configs/([^)]+)\)", text)
    assert len(links) > 27  # of the paper's results
    for link in links:
        get_config_path(link)


def test_all_fields_of_an_entry_are_rendered(ship: MakeEntry) -> None:
    entry = ship(command="echo 1\nrm x")
    text = render_entries([entry])
    for word in (
        *(entry.summary, entry.file, entry.sha256, entry.data, entry.data_licence, entry.licence),
        *(entry.commit, entry.date, f"(configs/{entry.config})", "](#retinanettiny)", "AP 12.5 %"),
        "\n\n```sh\necho 1\nrm x\n```",
    ):
        assert word in text


def test_unknown_recipes_and_files_without_the_section_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml"):
        render_entries([make_entry(config="none.yaml")])
    (tmp_path / "ZOO.md").write_text("# Model zoo")
    with pytest.raises(UserError, match=r"ZOO\.md"):
        write_table(tmp_path / "ZOO.md")


def test_metrics_are_written_in_brief_and_in_full() -> None:
    metric = Metric("kNN top-1", 61.25, "%", "val", "±0.4, the standard error", "3 seeds")
    assert str(metric) == "kNN top-1 61.2 ±0.4 %"
    text = render_entries([make_entry(metrics=(metric, Metric("loss", 0.8094, "", "toy")))])
    assert "- kNN top-1 61.25 % on val (±0.4, the standard error; 3 seeds)\n" in text
    assert "- loss 0.8094 on toy\n" in text
