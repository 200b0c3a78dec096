# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Programs on the disk: whole or not there, the user's alone, made once."""

import multiprocessing
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qbheat_det.deployment import program_cache
from qbheat_det.deployment.fingerprint import describe, key_of
from qbheat_det.deployment.program_cache import Entry, ProgramCache
from qbheat_det.errors import UserError

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
    folder.chmod(0o770)
    with pytest.raises(UserError, match=r"others than you can change .*programs.*QBHEAT_CACHE"):
        ProgramCache(folder)
    folder.chmod(0o700)
    tmp_path.chmod(0o777)  # another folder could be put in its place
    with pytest.raises(UserError, match="others than you can change"):
        ProgramCache(folder)
    tmp_path.chmod(0o1777)  # as in /tmp, where only owners remove
    ProgramCache(folder)


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

    def __init__(self, scale: float) -> None:
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
