# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/zoo.py list and fetch: what is shown, what is brought, and that the help is right."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from qbheat_det import model_zoo
from qbheat_det.model_zoo import ZooEntry, index, sources
from qbheat_det.model_zoo.index import save_index

from ..model_zoo.zoo_cases import CONTENT, DETECTOR, make_entry
from ..tool_modules import load_tool


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    return load_tool("zoo")


@pytest.fixture(autouse=True)
def _tiny_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is shipped, and one that is nowhere."""
    for name in ("QBHEAT_ZOO", "QBHEAT_ZOO_URL", "QBHEAT_ZOO_HUB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SHIPPED", tmp_path)
    monkeypatch.setattr(index, "INDEX_FILE", tmp_path / "index.json")
    shipped, missing = make_entry(), make_entry("mf_detr/tiny", b"x" * 2**20, figures=())
    save_index([shipped, missing], tmp_path / "index.json")
    (tmp_path / shipped.file).write_bytes(CONTENT)


def test_the_list_has_figures_sizes_and_places(
    zoo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert zoo.main(["list"]) == 0
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["name", "task", "figures", "size", "from"],
        ["mf_detr/tiny", "detection", "none measured", "1.0 MiB", "nowhere"],
        ["retinanet/tiny", "detection", "AP 12.5 % (toy val)", "0.0 MiB", "shipped"],
    ]


def test_a_pattern_that_nothing_matches_is_said(
    zoo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert zoo.main(["list", "fcos/*"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "the model zoo has no name that matches 'fcos/*'\n"


def test_the_list_is_json_on_demand(zoo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["list", "retinanet/*", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    entry = make_entry()
    assert (found["name"], found["sha256"], found["from"]) == (DETECTOR, entry.sha256, "shipped")
    assert found["figures"][0]["value"] == 12.5
    assert "fingerprint" not in found


def test_fetching_prints_where_the_file_is(
    zoo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert zoo.main(["fetch", DETECTOR, "retina*"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/retinanet-tiny.safetensors\n"


def test_a_folder_of_copies_is_a_place(
    zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for _ in range(2):
        assert zoo.main(["fetch", DETECTOR, "--output", str(tmp_path / "copies")]) == 0
    copy = tmp_path / "copies" / "retinanet-tiny.safetensors"
    assert copy.read_bytes() == CONTENT
    monkeypatch.setenv("QBHEAT_ZOO", str(copy.parent))
    assert zoo.main(["fetch", DETECTOR, "--output", str(copy.parent)]) == 0
    assert capsys.readouterr().out == f"{copy}\n" * 3
    assert copy.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fetch", "retinanet/tiney"], r"no 'retinanet/tiney': did you mean retinanet/tiny\?"),
        (["fetch", "fcos/*"], r"no name that matches 'fcos/\*'"),
        (["fetch", "mf_detr/tiny"], "put the file 'mf_detr-tiny.safetensors' .1.0 MiB"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence_and_exit_code_2(
    zoo: ModuleType, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        zoo.main(words)
    assert stopped.value.code == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_every_example_of_the_help_is_understood(zoo: ModuleType) -> None:
    text = str(zoo.__doc__).replace("\\\n", " ")
    commands = re.findall(r"^ +(?:\w+=\S+ )?python tools/zoo\.py (.*)$", text, flags=re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        zoo.parse_args(shlex.split(command))


def test_every_command_of_the_docs_is_understood(zoo: ModuleType) -> None:
    text = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"^(?:\w+=\S+ )?python tools/zoo\.py (.*)$", text, flags=re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        zoo.parse_args(shlex.split(command, comments=True))


def test_the_docs_name_every_field_of_the_index_and_every_function() -> None:
    text = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text("utf-8")
    fields = {field.name for field in dataclasses.fields(ZooEntry)}
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert fields <= named
    functions = set(re.findall(r"`(\w+)\(", text))
    assert functions
    assert functions <= set(model_zoo.__all__)
