# Copyright (c) qbheat_det contributors. Apache-2.0.
"""To the hub and back, against a stand-in on this machine that the hub's own client talks to."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import yaml

import qbheat_det.model_zoo.hub as hub_module
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import Metric, ZooEntry, index
from qbheat_det.model_zoo.hub import pull_entries, push_entries, render_card
from qbheat_det.model_zoo.sources import fetch
from tests.model_zoo.zoo_cases import make_entry
from tests.tool_modules import load_tool

from .hub_server import COMMIT, Hub, run_hub

REPOSITORY = "me/detectors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The hub that everything here talks to."""
    with run_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", "mine")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        # Its storage of large files has a protocol of its own; the other way is plain HTTP.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield running


def _ship(shelf: Path, name: str, content: bytes) -> ZooEntry:
    entry = make_entry(name, content)
    shelf.mkdir(exist_ok=True)
    (shelf / entry.file).write_bytes(content)
    return entry


def test_what_is_pushed_can_be_pulled_and_verified_by_hash_elsewhere(
    hub: Hub,
    shelf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = load_tool("zoo").main
    entries = [_ship(shelf, f"retinanet/{name}", name.encode() * 900) for name in ("a", "b")]
    index.save_index(entries)
    assert main(["push", "retinanet/*", "--repo", REPOSITORY, "--private"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/{REPOSITORY}/commit/{COMMIT}\n"
    files = hub.repositories[REPOSITORY]
    assert sorted(files) == [
        *("README.md", "index.json", "retinanet-a.safetensors", "retinanet-b.safetensors"),
    ]
    assert hub.private == {REPOSITORY: True}
    assert hub.messages == ["Add retinanet/a, retinanet/b"]
    assert hub.uploaded.keys() == {entry.sha256 for entry in entries}  # as large files
    # On a machine with neither index nor weights.
    index.save_index([])
    for entry in entries:
        (shelf / entry.file).unlink()
    folder = tmp_path / "theirs"
    assert main(["pull", "--repo", REPOSITORY, "--output", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / e.file) for e in entries]
    monkeypatch.setenv("QBHEAT_ZOO", str(folder))
    assert index.list_entries() == tuple(entries)
    for entry, letter in zip(entries, b"ab", strict=True):
        assert fetch(entry).read_bytes() == bytes([letter]) * 900


def test_the_hub_is_a_place_for_names_of_the_index(
    hub: Hub, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _ship(shelf, "retinanet/a", b"a" * 900)
    push_entries([entry], REPOSITORY)
    (shelf / entry.file).unlink()
    monkeypatch.setenv("QBHEAT_ZOO_HUB", REPOSITORY)
    assert fetch(entry).read_bytes() == b"a" * 900


def test_a_second_push_keeps_what_was_there(hub: Hub, shelf: Path) -> None:
    first, second = (_ship(shelf, f"retinanet/{name}", name.encode() * 9) for name in "ab")
    push_entries([first], REPOSITORY)
    push_entries([second], REPOSITORY, message="One more")
    files = hub.repositories[REPOSITORY]
    assert hub.messages == ["Add retinanet/a", "One more"]
    names = [entry["name"] for entry in json.loads(files["index.json"])]
    assert names == ["retinanet/a", "retinanet/b"]
    for name in names:
        assert f"## {name}\n" in files["README.md"].decode()
    assert hashlib.sha256(files[first.file]).hexdigest() == first.sha256


def test_pulling_chooses_refuses_and_keeps(
    hub: Hub, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [_ship(shelf, f"retinanet/{name}", name.encode() * 9) for name in "ab"]
    push_entries(entries, REPOSITORY)
    folder = tmp_path / "mine"
    (folder / ".hub").mkdir(parents=True)
    index.save_index([make_entry("retinanet/own", b"own")], folder / "index.json")
    assert pull_entries(REPOSITORY, folder, "*/b") == [folder / entries[1].file]
    own = index.load_index(folder / "index.json")
    assert [entry.name for entry in own] == ["retinanet/b", "retinanet/own"]
    with pytest.raises(UserError, match=r"nothing that matches 'fcos/\*', but retinanet/a,"):
        pull_entries(REPOSITORY, folder, "fcos/*")
    with pytest.raises(UserError, match=r"'me/none' has nothing that matches.*no index\.json"):
        pull_entries("me/none", folder)
    hub.repositories[REPOSITORY][entries[0].file] = b"!" * 9
    with pytest.raises(UserError, match=f"is refused.*{entries[0].sha256[:12]}"):
        pull_entries(REPOSITORY, folder)
    assert not (folder / entries[0].file).exists()
    assert index.load_index(folder / "index.json") == own
    assert (folder / ".hub").is_dir()  # it was there before
    monkeypatch.setattr(hub_module, "MAX_INDEX", 100)
    with pytest.raises(UserError, match=r"the index\.json of 'me/detectors' is refused: it has"):
        pull_entries(REPOSITORY, folder)


def test_who_may_not_write_is_told_what_to_do(
    hub: Hub, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _ship(shelf, "retinanet/a", b"a")
    monkeypatch.setenv("HF_TOKEN", "somebody's")
    with pytest.raises(UserError, match=r"hub refuses 'me/detectors'.*'hf auth login'"):
        push_entries([entry], REPOSITORY)
    assert hub.repositories == {}
    (shelf / entry.file).write_bytes(b"b")
    with pytest.raises(UserError, match="it is not the file that the index means"):
        push_entries([entry], REPOSITORY)


def test_the_card_has_figures_data_licences_and_use() -> None:
    figure = Metric("AP", 21.25, "%", "Aquarium val", "±0.4", "3 seeds")
    entry = make_entry(figures=(figure,))
    card = render_card([entry], REPOSITORY)
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "license": "apache-2.0",
        "library_name": "qbheat_det",
        "tags": ["qbheat_det", "detectron2", "mobile-former"],
        "pipeline_tag": "object-detection",
    }
    for word in (
        *("# detectors", "## retinanet/tiny", entry.summary, entry.sha256, entry.command),
        "AP 21.25 ± 0.4 % on Aquarium val (3 seeds)",
        *("trained on: toy shapes (licence: CC0)", "licence of the weights: Apache-2.0"),
        *('zoo.get("retinanet/tiny")', f"export QBHEAT_ZOO_HUB={REPOSITORY}"),
    ):
        assert word in text
    other = make_entry("qb_heat/b", task="pretraining", licence="CC-BY-NC-4.0", figures=())
    both = render_card([entry, other], REPOSITORY)
    head = yaml.safe_load(both.split("---\n", 2)[1])
    assert head["license"] == "other"
    assert "pipeline_tag" not in head
    assert {"object-detection", "image-feature-extraction"} < set(head["tags"])
    assert "no figures were measured" in both
