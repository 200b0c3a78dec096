# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Upload to the hub and download from it, with the hub's own client and a local server."""

import json
from pathlib import Path

import pytest
import yaml

from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import Metric, index
from qbheat_det.model_zoo.hub import pull_entries, push_entries, render_card
from qbheat_det.model_zoo.sources import fetch
from tests.tool_modules import load_tool

from .conftest import MakeEntry, make_entry
from .servers import COMMIT, Served

REPOSITORY = "me/detectors"


def test_pushed_entries_can_be_pulled_on_another_machine(
    server: Served,
    ship: MakeEntry,
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = load_tool("zoo").main
    entries = [ship(f"retinanet/{name}", name.encode() * 900) for name in "ab"]
    assert main(["push", "retinanet/*", "--repo", REPOSITORY, "--private"]) == 0
    assert capsys.readouterr().out == f"{server.url}/{REPOSITORY}/commit/{COMMIT}\n"
    assert sorted(server.repositories[REPOSITORY]) == [
        *("README.md", "index.json", "retinanet-a.safetensors", "retinanet-b.safetensors"),
    ]
    assert server.private == {REPOSITORY: True}
    assert server.messages == ["Add retinanet/a, retinanet/b"]
    assert server.uploaded.keys() == {entry.sha256 for entry in entries}  # as large files

    index.save_index([])
    for entry in entries:
        (shipped / entry.file).unlink()
    monkeypatch.setenv("QBHEAT_ZOO_HUB", REPOSITORY)  # for names in the index
    assert fetch(entries[0]).read_bytes() == b"a" * 900
    folder = tmp_path / "theirs"
    assert main(["pull", "--repo", REPOSITORY, "--output", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / e.file) for e in entries]
    monkeypatch.setenv("QBHEAT_ZOO", str(folder))
    assert index.list_entries() == tuple(entries)
    assert [fetch(entry).read_bytes() for entry in entries] == [b"a" * 900, b"b" * 900]


def test_a_second_push_keeps_other_entries(server: Served, ship: MakeEntry) -> None:
    first, second = (ship(f"retinanet/{name}", name.encode() * 9) for name in "ab")
    push_entries([first], REPOSITORY)
    push_entries([second], REPOSITORY, message="One more")
    files = server.repositories[REPOSITORY]
    assert server.messages == ["Add retinanet/a", "One more"]
    names = [entry["name"] for entry in json.loads(files["index.json"])]
    assert names == ["retinanet/a", "retinanet/b"]
    assert all(f"## {name}\n" in files["README.md"].decode() for name in names)
    assert files[first.file] == b"a" * 9


def test_a_pull_selects_entries_and_refuses_wrong_files(
    server: Served, ship: MakeEntry, tmp_path: Path
) -> None:
    entries = [ship(f"retinanet/{name}", name.encode() * 9) for name in "ab"]
    push_entries(entries, REPOSITORY)
    folder = tmp_path / "mine"
    assert pull_entries(REPOSITORY, folder, "*/b") == [folder / entries[1].file]
    assert index.load_index(folder / "index.json") == tuple(entries)
    for repository, pattern in ((REPOSITORY, "fcos/*"), ("me/none", "*")):
        with pytest.raises(UserError, match=f"'{repository}' has nothing"):
            pull_entries(repository, folder, pattern)
    server.repositories[REPOSITORY][entries[0].file] = b"!" * 9
    with pytest.raises(UserError, match=f"{entries[0].sha256[:12]}"):
        pull_entries(REPOSITORY, folder)
    assert not (folder / entries[0].file).exists()


def test_a_push_without_rights_or_the_right_file_changes_nothing(
    server: Served, ship: MakeEntry, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ship("retinanet/a", b"a")
    monkeypatch.setenv("HF_TOKEN", "somebody's")
    with pytest.raises(UserError, match=r"'me/detectors'.*'hf auth login'"):
        push_entries([entry], REPOSITORY)
    (shipped / entry.file).write_bytes(b"b")
    with pytest.raises(UserError, match=entry.file):
        push_entries([entry], REPOSITORY)
    assert server.repositories == {}


def test_the_card_has_metadata_metrics_licences_and_usage() -> None:
    metric = Metric("AP", 21.25, "%", "Aquarium val", "±0.4", "3 seeds")
    entry = make_entry(metrics=(metric,))
    _, head, text = render_card([entry], REPOSITORY).split("---\n", 2)
    assert yaml.safe_load(head) == {
        "license": "apache-2.0",
        "library_name": "qbheat_det",
        "tags": ["qbheat_det", "detectron2", "mobile-former"],
        "pipeline_tag": "object-detection",
    }
    for word in (
        *("# detectors", "## retinanet/tiny", entry.summary, entry.sha256, entry.command),
        *("AP 21.25 ± 0.4 % on Aquarium val (3 seeds)", "(licence: CC0)", "licence Apache-2.0"),
        *('zoo.get("retinanet/tiny")', f"QBHEAT_ZOO_HUB={REPOSITORY}"),
    ):
        assert word in text
    other = make_entry("qb_heat/b", task="pretraining", licence="CC-BY-NC-4.0", metrics=())
    head = yaml.safe_load(render_card([entry, other], REPOSITORY).split("---\n", 2)[1])
    assert head["license"] == "other"
    assert "pipeline_tag" not in head
    assert {"object-detection", "image-feature-extraction"} < set(head["tags"])
