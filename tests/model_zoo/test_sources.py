# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sources of weights: their order, what is refused, and the message when there is none."""

import os
from multiprocessing import get_context
from pathlib import Path

import pytest

from qbheat_det.core.errors import UserError
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


def test_a_wrong_local_file_is_refused_kept_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: Path
) -> None:
    _put(shipped)
    wrong = _put(tmp_path / "mine", b"other")
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path / "mine"))
    with pytest.raises(UserError, match=f"'{wrong}'.*{ENTRY.sha256[:12]}"):
        fetch(ENTRY)
    assert wrong.read_bytes() == b"other"


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


def test_a_wrong_download_is_refused_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, server: Served
) -> None:
    monkeypatch.setenv("QBHEAT_ZOO_URL", server.url)
    for content in (b"short", CONTENT[:-1] + b"x"):
        server.files[ENTRY.file] = content
        with pytest.raises(UserError, match=ENTRY.name):
            fetch(ENTRY)
        assert all(path.name.startswith(".") for path in cache_folder(ENTRY).iterdir())  # the lock


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
