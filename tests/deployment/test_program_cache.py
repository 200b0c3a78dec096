# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Programs on the disk: whole or not there, the user's alone, made once."""

import functools
import multiprocessing
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets.toy import ToySpec, prepare_toy_set
from qbheat_det.deployment import program_cache
from qbheat_det.deployment.fingerprint import describe, key_of
from qbheat_det.deployment.program_cache import Entry, ProgramCache, refuse_what_others_can_write

WHAT = {"weights": "1"}


def put(cache: ProgramCache, key: str, content: bytes = b"program") -> Path:
    cache.put(key, WHAT, lambda path: {"bytes": path.write_bytes(content)})
    entry = cache.get(key, WHAT)
    assert entry is not None
    assert entry.package is not None
    assert entry.notes == {"bytes": len(content)}
    return entry.package


def test_what_is_put_is_found_and_what_is_broken_or_foreign_is_not(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "programs")
    assert cache.get("ab", WHAT) is None
    path = put(cache, "ab")
    assert path.read_bytes() == b"program"
    assert cache.get("ab", {"weights": "2"}) is None
    path.write_bytes(b"progra")
    assert cache.get("ab", WHAT) is None
    assert put(cache, "ab") == path
    (tmp_path / "programs" / "ab.json").write_text("{")
    assert cache.get("ab", WHAT) is None
    path.unlink()
    assert cache.get("ab", WHAT) is None


def test_that_there_had_better_be_none_is_kept_too(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "programs")
    cache.put("ab", WHAT, lambda _: {"refused": "slow"})
    assert cache.get("ab", WHAT) == Entry(None, {"refused": "slow"})
    assert put(cache, "ab").exists()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "programs")
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    def build(path: Path) -> dict[str, Any]:
        path.write_bytes(b"half of it")
        assert str(path.parent) in os.environ["TORCHINDUCTOR_CACHE_DIR"]
        raise RuntimeError("the compiler was killed")

    with pytest.raises(RuntimeError, match="killed"):
        cache.put("ab", WHAT, build)
    assert list(cache.folder.iterdir()) == []
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    folder = ProgramCache(tmp_path / "programs").folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o702)
    with pytest.raises(UserError, match=r"others than you can change .*programs.*QBHEAT_CACHE"):
        ProgramCache(folder)
    folder.chmod(0o700)
    tmp_path.chmod(0o777)  # another folder could be put in its place
    with pytest.raises(UserError, match="others than you can change"):
        ProgramCache(folder)
    tmp_path.chmod(0o1777)  # as in /tmp, where only owners remove
    ProgramCache(folder)


@pytest.fixture
def _groups_may_write() -> Iterator[None]:
    """As where each user has a group of his own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_groups_may_write")
@pytest.mark.parametrize("is_first", ["the programs", "the toy set"])
def test_folders_above_are_made_for_the_user_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: str
) -> None:
    monkeypatch.setattr(program_cache, "_is_of_one", lambda *_: False)
    cache = tmp_path / "user" / "cache"
    monkeypatch.setenv("QBHEAT_CACHE", str(cache))
    if is_first == "the toy set":
        prepare_toy_set(ToySpec("train", num_images=1, image_size=64))
    ProgramCache()
    for folder in (cache, cache.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_group_of_one_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    folder = ProgramCache(tmp_path / "programs").folder
    folder.chmod(0o770)
    group, user = SimpleNamespace(gr_name="ann", gr_mem=["ann"]), SimpleNamespace(pw_name="ann")
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    status = folder.stat()
    own = SimpleNamespace(st_mode=status.st_mode, st_uid=status.st_uid, st_gid=1000)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: own)
    refuse_what_others_can_write(folder)
    for name, members in (("ann", ["ann", "bob"]), ("users", [])):
        group.gr_name, group.gr_mem = name, members
        with pytest.raises(UserError, match="others than you can change"):
            refuse_what_others_can_write(folder)


def test_the_users_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert ProgramCache(Path("~/programs")).folder == tmp_path / "programs"


def test_threads_build_one_after_another_and_the_compilers_folder_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    cache, at_work, most = ProgramCache(tmp_path / "programs"), 0, 0

    def build(_: Path) -> dict[str, Any]:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.1)
        at_work -= 1
        return {}

    threads = [threading.Thread(target=cache.put, args=(key, WHAT, build)) for key in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "before"


def test_the_compilers_header_is_written_for_each_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache

    @functools.cache
    def cpp_prefix_path() -> Path:  # as torch 2.6 has it
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "cpp_prefix.h"

    def build(path: Path) -> dict[str, Any]:
        assert path.parent in cpp_prefix_path().parents
        return {}

    monkeypatch.setattr(codecache, "cpp_prefix_path", cpp_prefix_path, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cache = ProgramCache(tmp_path / "programs")
    for key in "ab":
        assert cpp_prefix_path().parent == tmp_path
        cache.put(key, WHAT, build)
    assert cpp_prefix_path().parent == tmp_path


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made .*QBHEAT_CACHE"):
        ProgramCache(tmp_path / "file" / "programs")


def test_the_cache_follows_the_packages_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "mine"))
    assert ProgramCache().folder == tmp_path / "mine" / "programs"


def test_what_was_not_used_for_longest_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_cache, "_MOST_BYTES", 25)
    cache = ProgramCache(tmp_path / "programs")
    for age, key in ((300, "aa"), (200, "bb")):
        os.utime(put(cache, key, b"x" * 10), (age, age))
    assert cache.get("aa", WHAT) is not None  # used: now the newest
    put(cache, "cc", b"x" * 10)
    assert cache.get("bb", WHAT) is None
    assert cache.get("aa", WHAT) is not None
    assert cache.get("cc", WHAT) is not None


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "programs")
    old, young = cache.folder / "making-old", cache.folder / "making-young"
    for folder in (old, young):
        (folder / "inductor").mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    put(cache, "ab")
    assert not old.exists()
    assert young.exists()


def test_what_another_process_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProgramCache(tmp_path / "programs")
    glob = Path.glob

    def glob_and_more(folder: Path, pattern: str) -> list[Path]:
        gone = folder / f"{pattern.rpartition('*')[0]}gone{pattern.rpartition('*')[2]}"
        return [*glob(folder, pattern), gone]

    monkeypatch.setattr(Path, "glob", glob_and_more)
    put(cache, "ab")


def build_slowly(folder: Path, built: Any) -> None:
    cache = ProgramCache(folder)

    def build(path: Path) -> dict[str, Any]:
        time.sleep(0.3)
        path.write_bytes(b"p")
        built.put(os.getpid())
        return {}

    with cache.lock("ab"):
        if cache.get("ab", WHAT) is None:
            cache.put("ab", WHAT, build)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_of_two_processes_the_second_waits_and_finds_what_the_first_made(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    built = context.Queue()
    both = [
        context.Process(target=build_slowly, args=(tmp_path / "programs", built)) for _ in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    assert built.get(timeout=5) in {process.pid for process in both}
    assert built.empty()
    assert ProgramCache(tmp_path / "programs").get("ab", WHAT) is not None


class Gate(nn.Module):
    """Scales its input by an attribute that no weight tells of."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2), persistent=False)


def test_the_key_knows_weights_buffers_settings_and_attributes() -> None:
    def key(module: nn.Module, **settings: object) -> str:
        return key_of(describe(module, **settings))

    first = key(Gate(1.0), name="head")
    assert first == key(Gate(1.0), name="head")
    other_weights, other_buffer = Gate(1.0), Gate(1.0)
    with torch.no_grad():
        other_weights.weight[1] += 1e-6
    other_buffer.shift[0] = 1
    others = [key(Gate(2.0), name="head"), key(Gate(1.0), name="backbone")]
    others += [key(other_weights, name="head"), key(other_buffer, name="head")]
    assert len({first, *others}) == 5


def test_the_key_knows_functions_by_name() -> None:
    def key(value: object) -> str:
        return key_of(describe(Gate(value)))

    values: list[Any] = [F.relu, F.silu, torch.relu, partial(F.gelu, approximate="none"), F.gelu]
    values += [partial(F.gelu, approximate="tanh"), {"act": F.relu}, {"act": F.silu}, nn.ReLU]
    assert len({key(value) for value in values}) == len(values)
    assert key(partial(F.gelu, approximate="none")) == key(partial(F.gelu, approximate="none"))
    assert key({1, 2, "a"}) == key({"a", 2, 1})
