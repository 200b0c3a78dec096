# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The index: entries survive a round trip, and whatever is invalid is refused by its field."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import find_entry, list_entries, load_index
from qbheat_det.model_zoo.index import to_plain

from .conftest import MakeEntry, make_entry, save_index


def _metric(**changes: Any) -> dict[str, Any]:
    return {"metrics": [{"name": "AP", "value": 1, "unit": "%", "data": "toy"} | changes]}


def _output(**changes: Any) -> dict[str, Any]:
    (output,) = to_plain(make_entry())["fingerprint"]["outputs"]
    return {"fingerprint": {"version": 1, "outputs": [output | changes]}}


def test_saved_entries_are_loaded_in_the_order_of_their_names(tmp_path: Path) -> None:
    entries = [make_entry("b/two"), make_entry("a/one", b"x", metrics=(), fingerprint=None)]
    save_index(entries, tmp_path / "index.json")
    assert load_index(tmp_path / "index.json") == (entries[1], entries[0])
    assert '"values": [0.5, -1e-07],' in (tmp_path / "index.json").read_text()  # one line


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"colour": "red"}, "'colour' is unknown"),
        *[({"size": size}, "'size'") for size in (None, "12", True, -1)],
        *[({"config": config}, "'config'") for config in ("../../a.yaml", "/a.yaml", "C:\\a.yaml")],
        *[({"name": name}, "'name'") for name in ("../up/b", "a/../b", "a", 3)],
        *[({"summary": text}, "'summary'") for text in ("", "a\nb")],
        *[({"summary": text}, "plain text") for text in ("\ud800", "\x1b]0;title")],
        ({"sha256": "G" * 64}, "'sha256'"),
        ({"task": "magic"}, "'task'"),
        ({"file": "other.safetensors"}, "'file'"),
        ({"command": "a\n\rb"}, "plain text"),
        *[({"madds_input": size}, "'madds_input'") for size in ([64], [64, -1], 64)],
        ({"commit": "HEAD"}, "'commit'"),
        ({"date": "yesterday"}, "'date'"),
        ({"metrics": [3]}, r"'metrics'\[0\]"),
        ({"metrics": [{"name": "AP"}]}, r"'metrics'\[0\]: the field 'data' is missing"),
        *[(_metric(value=number), r"'metrics'\[0\]: 'value'") for number in (10**400, math.nan)],
        (_metric(unit=None), r"'metrics'\[0\]: 'unit'"),
        ({"fingerprint": 3}, "'fingerprint'"),
        (_output(shape=[-1]), r"'outputs'\[0\]: 'shape'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_invalid_field_is_refused_by_file_and_field(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([to_plain(make_entry()) | change]))
    with pytest.raises(UserError, match=field) as caught:
        load_index(path)
    assert str(path) in str(caught.value)


def test_other_files_and_names_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for text in ("", "{}", "[3]", "[", "[" * 100_000):
        if text:
            path.write_text(text)
        with pytest.raises(UserError, match=r"mine\.json"):
            load_index(path)
    with pytest.raises(UserError, match=r"a/B.*a/b"):
        save_index([make_entry("a/b"), make_entry("a/B")], path)


def test_entries_are_found_by_name_pattern_and_folder(
    ship: MakeEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, first = ship("retinanet/tiny", b"2"), ship("mf_detr/tiny", b"1")
    assert find_entry("qbheat://retinanet/tiny") == second
    assert list_entries() == (first, second)
    with pytest.raises(UserError, match="retinanet/tiny"):
        find_entry("retinet/tiny")

    own = make_entry("mine/b", b"own")
    folder = tmp_path / "mine"
    folder.mkdir()
    save_index([own, second], folder / "index.json")
    monkeypatch.setenv("QBHEAT_ZOO", str(folder))
    assert list_entries("m*") == (first, own)
    save_index([make_entry("retinanet/tiny", b"other")], folder / "index.json")
    with pytest.raises(UserError, match="'retinanet/tiny'"):
        list_entries()
    monkeypatch.setenv("QBHEAT_ZOO", "/no/such/folder")
    with pytest.raises(UserError, match="/no/such/folder"):
        list_entries()
