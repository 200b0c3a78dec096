# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The index: what it holds comes back, and what is not sound is named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.config import get_config_path
from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import find_entry, list_entries, load_index
from qbheat_det.model_zoo.index import file_of, save_index, to_plain

from .conftest import UseIndex
from .zoo_cases import make_entry


def _write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def _figure(**changes: Any) -> dict[str, Any]:
    return {"metric": "AP", "value": 1, "unit": "%", "data": "toy"} | changes


def _print(**changes: Any) -> dict[str, Any]:
    """A fingerprint whose one output has something changed; without outputs if nothing is."""
    plain: dict[str, Any] = to_plain(make_entry())["fingerprint"]
    outputs = [output | changes for output in plain["outputs"]]
    return plain | {"outputs": outputs if changes else []}


def test_the_packages_own_index_is_sound_and_its_recipes_exist() -> None:
    for entry in load_index():
        assert Path(get_config_path(entry.config)).is_file()


def test_what_is_saved_is_loaded_in_the_order_of_names(tmp_path: Path) -> None:
    entries = [make_entry("b/two"), make_entry("a/one", b"x", figures=(), fingerprint=None)]
    save_index(entries, tmp_path / "index.json")
    assert load_index(tmp_path / "index.json") == (entries[1], entries[0])


def test_numbers_of_a_fingerprint_stand_in_one_line(tmp_path: Path) -> None:
    save_index([make_entry()], tmp_path / "index.json")
    assert '"values": [0.5, -1e-07],' in (tmp_path / "index.json").read_text()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"colour": "red"}, "the field 'colour' is not known"),
        ({"size": None}, "'size' is None, where a whole number is expected"),
        ({"size": "12"}, "'size' is '12', where a whole number"),
        ({"size": True}, "'size' is True, where a whole number"),
        ({"size": -1}, "'size' is -1, where a number of bytes"),
        ({"sha256": "0" * 63}, "'sha256' is '000"),
        ({"sha256": "G" * 64}, "'sha256' is 'GGG"),
        ({"task": "magic"}, "'task' is 'magic', where one of pretraining, detection"),
        ({"file": "other.safetensors"}, "'file' is 'other.safetensors', where 'retinanet-tiny"),
        ({"config": "../../secret.yaml"}, "'config' is '../../secret.yaml'"),
        ({"config": "/etc/passwd"}, "'config' is '/etc/passwd'"),
        ({"config": "coco"}, "'config' is 'coco', where the path of a YAML"),
        ({"config": "C:\\x.yaml"}, "'config' is 'C:"),
        ({"config": "a\0.yaml"}, "'config' is 'a"),
        ({"summary": "two\nlines"}, "where one line is expected"),
        ({"summary": "\ud800"}, "'summary' is"),
        ({"data": "\x1b]0;title"}, "'data' is"),
        ({"licence": ""}, "'licence' is '', where one line"),
        ({"command": "a\n\rb"}, "'command' is 'a"),
        ({"madds_input": [64]}, "'madds_input' has 1 values, where 2 are"),
        ({"madds_input": [64, 0]}, "'madds_input' is (64, 0)"),
        ({"commit": "HEAD"}, "'commit' is 'HEAD'"),
        ({"date": "yesterday"}, "Invalid isoformat"),
        ({"date": "20261121"}, "20261121"),
        ({"figures": {}}, "'figures' is {}, where a list"),
        ({"figures": [{"metric": "AP"}]}, "'figures'[0]: the field 'value' is missing"),
        ({"figures": [_figure(value=10**400)]}, "'figures'[0]: 'value' is inf, where a number"),
        ({"figures": [_figure(data="a\nb")]}, "'figures'[0]: 'data' is 'a"),
        ({"fingerprint": _print()}, "'fingerprint' needs outputs"),
        ({"fingerprint": _print(std=-1)}, "output 's8': 'std' cannot be -1.0"),
        ({"fingerprint": _print(shape=[-1])}, "'shape' cannot be (-1,)"),
        ({"fingerprint": _print(tolerance=0)}, "'tolerance' cannot be 0.0"),
        ({"fingerprint": _print(values=[])}, "'values' cannot be ()"),
        ({"fingerprint": 3}, "'fingerprint' is no object"),
        ({"name": "../up/b"}, "'../up/b' can be no name"),
        ({"name": "a/../b"}, "'a/../b' can be no name"),
        ({"name": "a"}, "'a' can be no name"),
        ({"name": "a/b-c"}, "'a/b-c' can be no name"),
    ],
    ids=str,
)
def test_what_is_not_sound_is_named_with_its_file(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    path = _write(tmp_path / "index.json", to_plain(make_entry()) | change)
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        load_index(path)
    assert str(path) in str(caught.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    plain = to_plain(make_entry())
    del plain["licence"]
    with pytest.raises(UserError, match=r"entry retinanet/tiny: the field 'licence' is missing"):
        load_index(_write(tmp_path / "index.json", plain))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "is no list of entries"),
        ("[3]", "entry 0 is no object"),
        ("[", "is no sound JSON"),
        ('[{"size": NaN}]', "NaN is no number of JSON"),
        ('[{"size": 1, "size": 2}]', "'size' stands twice"),
        ("[" * 100_000, "is no sound JSON"),
    ],
)
def test_a_text_that_is_no_index_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(sentence)):
        load_index(tmp_path / "index.json")


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json' cannot be read"):
        load_index(tmp_path / "nowhere.json")


def test_names_that_differ_in_capitals_alone_have_one_file_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a/B and a/b have one file name"):
        save_index([make_entry("a/b"), make_entry("a/B")], tmp_path / "index.json")
    assert not (tmp_path / "index.json").exists()


def test_a_file_name_is_the_name_without_folders() -> None:
    assert file_of("a/b/c_1.5") == "a-b-c_1.5.safetensors"


def test_an_entry_is_found_by_name_and_by_pattern(use_index: UseIndex) -> None:
    first, second = make_entry("mf_detr/tiny", b"1"), make_entry("retinanet/tiny", b"2")
    use_index(second, first)
    assert find_entry("retinanet/tiny") == second
    assert list_entries() == (first, second)
    assert list_entries("mf*") == (first,)


def test_an_unknown_name_gets_the_nearest(use_index: UseIndex) -> None:
    use_index(make_entry())
    with pytest.raises(UserError, match=r"no 'retinet/tiny': did you mean retinanet/tiny\?"):
        find_entry("retinet/tiny")


def test_a_folder_adds_its_own_index(
    use_index: UseIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, own = make_entry(), make_entry("mine/b", b"own")
    use_index(shipped)
    (tmp_path / "mine").mkdir()
    save_index([own, shipped], tmp_path / "mine" / "index.json")
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path / "mine"))
    assert list_entries() == (own, shipped)  # what both say alike stands once


def test_two_meanings_of_one_name_are_refused(
    use_index: UseIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_index(make_entry())
    save_index([make_entry(content=b"other")], _folder(tmp_path) / "index.json")
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path / "mine"))
    with pytest.raises(UserError, match="both name 'retinanet/tiny', and not the same"):
        list_entries()


def _folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"
