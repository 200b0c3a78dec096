# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Verification: each way in which file, index and code can disagree is reported."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import qbheat_det.model_zoo.verify as verify_module
from qbheat_det.checkpoint import read_weights, save_weights
from qbheat_det.core.files import hash_file
from qbheat_det.model_zoo import ZooEntry
from qbheat_det.model_zoo.add import add_entry
from qbheat_det.model_zoo.api import open_trained
from qbheat_det.model_zoo.verify import count_costs, verify_entry
from tests.tool_modules import load_tool

from .conftest import BACKBONE, Trained, save_index
from .test_add import ORIGIN

main = load_tool("zoo").main


@pytest.fixture(scope="session")
def added(backbone: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[ZooEntry, bytes]:
    """The entry of the tiny backbone, and the content of its file."""
    folder = tmp_path_factory.mktemp("added")
    entry = add_entry(str(backbone.path), ORIGIN, output=folder)
    return entry, (folder / entry.file).read_bytes()


@pytest.fixture
def entry(added: tuple[ZooEntry, bytes], shipped: Path) -> ZooEntry:
    """That entry, in the package."""
    entry, content = added
    shipped.mkdir()
    (shipped / entry.file).write_bytes(content)
    save_index([entry])
    return entry


def _change_weights(entry: ZooEntry, folder: Path) -> ZooEntry:
    """Writes other weights, and returns an entry with their hash."""
    path = folder / entry.file
    state, info = read_weights(str(path))
    assert info is not None
    state["expand.norm.bias"] += 0.01
    save_weights(str(path), state, info)
    return dataclasses.replace(entry, sha256=hash_file(path), size=path.stat().st_size)


def test_the_tool_verifies_entries_and_exits_with_1_for_a_wrong_one(
    entry: ZooEntry, shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = dataclasses.replace(entry, name="qb_heat/gone", file="qb_heat-gone.safetensors")
    assert main(["verify"]) == 0
    table = capsys.readouterr().out.splitlines()
    loaded, _, total = table[2].split("|")[3].strip().partition(" of ")
    assert loaded == total
    assert "ok, 0 % of tolerance" in table[2]
    save_index([entry, missing])
    assert main(["verify", "qb_heat/gone", "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["tensors loaded"] == "-"
    assert "qb_heat-gone.safetensors" in verdict["error"]
    # Other weights with the right hash: only the fingerprint can show it.
    save_index([_change_weights(entry, shipped)])
    assert main(["verify"]) == 1
    *_, error, _ = capsys.readouterr().out.splitlines()
    assert error.startswith(f"{BACKBONE}: output 'backbone.s16_expanded'")


def test_a_wrong_field_of_the_index_is_named(
    entry: ZooEntry, backbone: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = open_trained(str(backbone.path), device="cpu")
    costs = count_costs(trained)
    monkeypatch.setattr(verify_module, "open_trained", lambda path, device: trained)
    monkeypatch.setattr(verify_module, "count_costs", lambda trained: costs)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"size": 1}, "'size'"),
        ({"num_params": 1}, "'num_params'"),
        ({"task": "detection"}, "'task'"),
        ({"config": "none.yaml"}, "none.yaml"),
        ({"fingerprint": None}, "fingerprint"),
    ]
    for change, field in changes:
        assert field in verify_entry(dataclasses.replace(entry, **change))["error"]


def test_a_damaged_file_and_code_that_fails_are_reported(
    entry: ZooEntry, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, device: str) -> None:
        raise RuntimeError("shapes\ndo not match")

    monkeypatch.setattr(verify_module, "open_trained", fail)
    assert verify_entry(entry)["error"].endswith("RuntimeError: shapes do not match")
    with (shipped / entry.file).open("ab") as stream:
        stream.write(b"\0")
    verdict = verify_entry(entry)
    assert verdict["file and hash"] == verdict["tensors loaded"] == "-"
    assert entry.file in verdict["error"]
