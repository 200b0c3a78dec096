# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Verification: what it proves, and what it says where file, index and code do not agree."""

import dataclasses
import json
from pathlib import Path

import pytest
from qbheat_det.engine.zoo.trained_model import Costs
from qbheat_det.model_zoo.download import hash_file

from qbheat_det.checkpoint import read_weights, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import Fingerprint, ZooEntry, index
from qbheat_det.model_zoo.api import TrainedModel
from qbheat_det.model_zoo.verify import judge, verify_entry
from tests.tool_modules import load_tool

from .conftest import NAME, AddEntry

main = load_tool("zoo").main


@pytest.fixture
def entry(add: AddEntry, quick: None, monkeypatch: pytest.MonkeyPatch) -> ZooEntry:
    """An entry and its file."""
    return add()


def _with_weights_changed(entry: ZooEntry, shelf: Path) -> ZooEntry:
    """Somebody else's weights, with an index that knows their hash."""
    path = shelf / entry.file
    state, info = read_weights(str(path))
    assert info is not None
    state["expand.norm.bias"] += 0.01
    save_weights(str(path), state, info)
    size = path.stat().st_size
    return dataclasses.replace(entry, sha256=hash_file(path), size=size)


def test_a_sound_entry_is_proved_and_a_wrong_one_is_named_with_exit_code_1(
    add: AddEntry, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = add()
    missing = dataclasses.replace(good, name="qb_heat/gone", file="qb_heat-gone.safetensors")
    assert main(["verify"]) == 0
    table = capsys.readouterr().out.splitlines()
    loaded, _, total = table[2].split("|")[3].strip().partition(" of ")
    assert loaded == total
    assert "ok, 0 % of tolerance" in table[2]
    assert table[-1].startswith("1 of 1 verified: raw outputs may differ by 0.001 of their")
    index.save_index([good, missing])
    assert main(["verify", "qb_heat/gone", "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert (verdict["is_sound"], verdict["load"]) == (False, "-")
    assert "put the file 'qb_heat-gone.safetensors'" in verdict["fault"]
    # Whose hash is right, but which are others: the fingerprint tells.
    index.save_index([_with_weights_changed(good, shelf)])
    assert main(["verify"]) == 1
    *_, fault, end = capsys.readouterr().out.splitlines()
    assert fault.startswith(f"{NAME}: output 'backbone.s16_expanded' differs by 0.0")
    assert end.startswith("0 of 1 verified")


def test_a_file_that_was_changed_is_refused_before_it_is_read(entry: ZooEntry, shelf: Path) -> None:
    with (shelf / entry.file).open("ab") as stream:
        stream.write(b"\0")
    verdict = verify_entry(entry)
    assert (verdict.file, verdict.load) == ("-", "-")
    assert "is refused, it is not the file that the index means" in verdict.fault


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_params": 1}, "the index says num_params 1, but of the file it is "),
        ({"madds_input": (32, 64)}, "the index says madds_input (32, 64), but of the file it is "),
        ({"task": "detection"}, "the index says task detection, but of the file it is pretraining"),
        ({"config": "none.yaml"}, "no config named 'none.yaml'"),
        ({"fingerprint": None}, "the index has no fingerprint"),
    ],
)
def test_an_index_that_does_not_agree_is_quoted(
    entry: ZooEntry,
    opened: tuple[TrainedModel, Costs, Fingerprint],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    sentence: str,
) -> None:
    model, costs, _ = opened
    monkeypatch.setattr("qbheat_det.model_zoo.verify.open_trained", lambda path: model)
    monkeypatch.setattr("qbheat_det.model_zoo.verify.count_costs", lambda trained: costs)
    verdict = verify_entry(dataclasses.replace(entry, **changes))  # type: ignore[arg-type]
    assert not verdict.is_sound
    assert verdict.fault.startswith(sentence)


def test_code_that_breaks_is_told_of_and_ends_nothing(
    entry: ZooEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: str) -> None:
        raise RuntimeError("shapes\ndo not match")

    monkeypatch.setattr("qbheat_det.model_zoo.verify.open_trained", broken)
    verdict = verify_entry(entry)
    assert verdict.fault == "the model does not run: RuntimeError: shapes do not match"


def test_how_many_outputs_are_wrong_is_counted(
    opened: tuple[TrainedModel, Costs, Fingerprint],
) -> None:
    _, _, print_ = opened
    (one,) = print_.outputs
    three = tuple(dataclasses.replace(one, name=name) for name in "abc")
    expected = Fingerprint(print_.version, three)
    found = Fingerprint(print_.version, (three[0],))
    with pytest.raises(UserError, match=r"'b': there is no such output \(and 1 more of 3 outputs"):
        judge(expected, found)
    assert judge(expected, expected) == "ok, 0 % of tolerance"
