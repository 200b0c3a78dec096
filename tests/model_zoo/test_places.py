# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Places: their order, what is refused, and what is said where there is nothing."""

import os
import re
import tempfile
from multiprocessing import get_context
from pathlib import Path

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.model_zoo import sources
from qbheat_det.model_zoo.sources import cache_folder, describe_place, fetch

from .servers import Served
from .zoo_cases import CONTENT, make_entry

ENTRY = make_entry()


def _put(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENTRY.file).write_bytes(content)
    return folder / ENTRY.file


def test_the_places_are_asked_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    served.files[ENTRY.file] = CONTENT
    monkeypatch.setenv("QBHEAT_ZOO_URL", served.url)
    assert describe_place(ENTRY) == served.url
    cached = fetch(ENTRY)
    assert cached == cache_folder(ENTRY) / ENTRY.file
    assert describe_place(ENTRY) == "fetched before"
    shipped = _put(tmp_path / "shipped")
    assert fetch(ENTRY) == shipped
    assert describe_place(ENTRY) == "shipped"
    second = _put(tmp_path / "two")
    monkeypatch.setenv("QBHEAT_ZOO", f"{tmp_path}{os.pathsep}{tmp_path / 'two'}")
    assert fetch(ENTRY) == second
    first = _put(tmp_path)
    assert fetch(ENTRY) == first
    assert describe_place(ENTRY) == str(tmp_path)
    assert served.num_gets == 1


def test_another_file_by_that_name_is_refused_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(tmp_path / "shipped")
    wrong = _put(tmp_path / "mine", b"other")
    monkeypatch.setenv("QBHEAT_ZOO", str(tmp_path / "mine"))
    with pytest.raises(UserError, match=f"'{wrong}' is refused.*{ENTRY.sha256[:12]}"):
        fetch(ENTRY)
    assert wrong.read_bytes() == b"other"  # it is not ours


def test_a_new_version_of_an_entry_does_not_meet_the_old_file(served: Served) -> None:
    # The cache is by content, so both can be there.
    _put(cache_folder(ENTRY))
    assert cache_folder(make_entry(content=b"new")) != cache_folder(ENTRY)


def test_without_any_place_the_sentence_says_what_to_put_where() -> None:
    assert describe_place(ENTRY) == "nowhere"
    with pytest.raises(UserError) as caught:
        fetch(ENTRY)
    for word in (ENTRY.file, ENTRY.sha256[:12], str(cache_folder(ENTRY)), "$QBHEAT_ZOO"):
        assert word in str(caught.value)


def test_what_the_sentence_says_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBHEAT_ZOO_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="cannot be fetched") as caught:
        fetch(ENTRY)
    found = re.search(r"put the file '(.+?)' .* into the folder '(.+?)'", str(caught.value))
    assert found is not None
    Path(found[2]).mkdir(exist_ok=True)
    (Path(found[2]) / found[1]).write_bytes(CONTENT)
    assert fetch(ENTRY).read_bytes() == CONTENT


def test_a_wrong_file_of_a_server_is_refused_though_the_hub_may_have_it(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    served.files[ENTRY.file] = b"other"
    monkeypatch.setenv("QBHEAT_ZOO_URL", served.url)
    monkeypatch.setenv("QBHEAT_ZOO_HUB", "someone/zoo")
    monkeypatch.setattr(sources, "from_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="is refused"):
        fetch(ENTRY)


def test_the_hub_gives_what_the_server_lacks(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    served.files[f"someone/zoo/resolve/main/{ENTRY.file}"] = CONTENT
    monkeypatch.setenv("QBHEAT_ZOO_URL", f"{served.url}/lacks")
    monkeypatch.setenv("QBHEAT_ZOO_HUB", "someone/zoo")
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    path = fetch(ENTRY)
    assert path == cache_folder(ENTRY) / ENTRY.file
    assert path.read_bytes() == CONTENT
    gets = served.num_gets
    assert fetch(ENTRY) == path
    assert served.num_gets == gets
    assert not any(one.is_dir() for one in path.parent.iterdir())


def test_revisions_and_several_repositories_of_the_hub_are_asked_in_turn(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    served.files[f"b/two/resolve/v1/{ENTRY.file}"] = CONTENT
    monkeypatch.setenv("QBHEAT_ZOO_HUB", "a/one, b/two@v1")
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    assert describe_place(ENTRY) == "hub: a/one"
    assert fetch(ENTRY).read_bytes() == CONTENT
    assert {path.split("/resolve")[0] for _, path, *_ in served.requests} == {"a/one", "b/two"}


def test_a_wrong_file_of_the_hub_is_refused_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    place = f"someone/zoo/resolve/main/{ENTRY.file}"
    served.files[place] = b"?" * len(CONTENT)
    monkeypatch.setenv("QBHEAT_ZOO_HUB", "someone/zoo")
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    with pytest.raises(UserError, match=r"nothing of it was kept; tell who runs someone/zoo"):
        fetch(ENTRY)
    served.files[place], served.bytes_sent = CONTENT * 2, 0
    with pytest.raises(UserError, match=f"has {2 * len(CONTENT)} bytes, and not {len(CONTENT)}"):
        fetch(ENTRY)
    assert served.bytes_sent == 0  # what is too long is not even begun
    assert not any(path.suffix == ".safetensors" for path in cache_folder(ENTRY).rglob("*"))


def test_every_place_that_failed_is_named(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setenv("QBHEAT_ZOO_URL", served.url)
    monkeypatch.setenv("QBHEAT_ZOO_HUB", "someone/zoo")
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    with pytest.raises(UserError, match=rf"\({re.escape(served.url)}/.*404.*; hub someone/zoo: "):
        fetch(ENTRY)


def test_two_processes_at_once_download_once(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    served.files[ENTRY.file], served.delay = CONTENT, 0.5
    monkeypatch.setenv("QBHEAT_ZOO_URL", served.url)
    context = get_context("fork")  # a new interpreter would take seconds to import the package
    processes = [context.Process(target=fetch, args=(ENTRY,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert served.num_gets == 1
    assert (cache_folder(ENTRY) / ENTRY.file).read_bytes() == CONTENT


def test_a_folder_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBHEAT_ZOO", "/no/such/folder")
    with pytest.raises(UserError, match=r"\$QBHEAT_ZOO names '/no/such/folder', which is no"):
        fetch(ENTRY)


def test_a_cache_that_cannot_be_written_is_read_and_another_ones_stand_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    served.files[ENTRY.file] = CONTENT
    monkeypatch.setenv("QBHEAT_ZOO_URL", served.url)
    filled = _put(cache_folder(ENTRY))
    monkeypatch.setattr(sources, "_is_writable", lambda folder: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert fetch(ENTRY) == filled
    assert describe_place(ENTRY) == "fetched before"
    filled.unlink()
    fetched = fetch(ENTRY)
    assert fetched == cache_folder(ENTRY) / ENTRY.file
    root = fetched.parents[2]
    assert root.parent == tmp_path
    assert root.stat().st_mode & 0o777 == 0o700
    fetched.unlink()
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"was not made by you: let \$FVCORE_CACHE name"):
        fetch(ENTRY)


@pytest.mark.parametrize("address", ["file:///etc", "http://127.0.0.1:9/a b", "http://a/\x07"])
def test_an_address_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("QBHEAT_ZOO_URL", address)
    with pytest.raises(UserError, match=r"must begin with http:// or https://"):
        fetch(ENTRY)
