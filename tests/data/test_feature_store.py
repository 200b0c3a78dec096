# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Cached features on the disk: read as written, whole or not there, shared by processes."""

import errno
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from qbheat_det.core import files
from qbheat_det.core.errors import UserError
from qbheat_det.data import feature_store
from qbheat_det.data.feature_store import FeatureStore, View
from tests.data.feature_cases import (
    FORK,
    NUM_VIEWS,
    check_content,
    fill,
    finish,
    make_store,
    start,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_are_read_as_they_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    store = make_store(tmp_path, dtype)
    assert store.missing() == [0, 1, 2]
    assert fill(store) == [0, 1, 2]
    check_content(store, dtype)
    again = make_store(tmp_path, dtype)
    assert again.missing() == []
    check_content(again, dtype)
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == [f"00000{chunk}.safetensors" for chunk in range(3)]


def test_slices_of_a_batch_in_any_memory_layout_are_written(tmp_path: Path) -> None:
    maps = torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last)
    store = FeatureStore(tmp_path / "cache", 2, dtype=torch.float32)
    store.write(0, [View({"s16": each, "tied": each}, (48, 80), {}) for each in maps])
    for index in range(2):
        found = store.read(index)
        assert isinstance(found, View)
        torch.testing.assert_close(found.features, {"s16": maps[index], "tied": maps[index]})
        assert found.features["s16"].is_contiguous()


def test_few_files_stay_open_and_a_spawned_worker_opens_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store, "_OPEN_CHUNKS", 1)
    store = make_store(tmp_path)
    fill(store)
    check_content(store)
    assert len(store._open) == 1
    check_content(pickle.loads(pickle.dumps(store)))


def test_a_build_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    def interrupt(chunk: int) -> None:
        if chunk == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(make_store(tmp_path), interrupt)
    again = make_store(tmp_path)
    assert again.missing() == [1, 2]
    assert fill(again) == [1, 2]
    check_content(again)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _take_from_another_cache(path: Path) -> None:
    other = FeatureStore(path.parent.with_name("other"), NUM_VIEWS, dtype=torch.float32)
    fill(other)
    shutil.copy(other.path_of(1), path)


@pytest.mark.parametrize("spoil", [_truncate, _take_from_another_cache])
def test_a_damaged_or_foreign_file_is_never_used_and_made_again(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    fill(make_store(tmp_path))
    spoil(make_store(tmp_path).path_of(1))
    store = make_store(tmp_path)
    with pytest.raises(UserError, match=r"000001\.safetensors"):
        store.read(40)
    assert store.missing() == [1]
    assert fill(store) == [1]
    check_content(store)


def _change_features(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-40:] = bytes(byte ^ 1 for byte in content[-40:])
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [_truncate, _change_features])
def test_a_file_that_changes_under_a_run_is_named(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    store = FeatureStore(tmp_path / "cache", 2, dtype=torch.float32)
    views = [View({"s16": torch.randn(4, 3, 5)}, (48, 80), {}) for _ in range(2)]
    store.write(0, views)
    store.read(0)
    spoil(store.path_of(0))
    with pytest.raises(UserError, match=r"000000\.safetensors"):
        store.read(1)


def _write_half(folder: Path, is_writing: Event) -> None:
    """Claims the first chunk, and never comes to the end of it."""

    def stop_halfway(path: Path, write: Callable[[BinaryIO], object]) -> None:
        def write_half(stream: BinaryIO) -> None:
            stream.write(b"half of it")
            stream.flush()
            is_writing.set()
            time.sleep(60)

        files.write_atomically(path, write_half)

    feature_store.write_atomically = stop_halfway
    fill(make_store(folder))


def _fill_and_list(folder: Path, name: str, barrier: Barrier | None = None) -> None:
    seen: list[int] = []

    def meet(chunk: int) -> None:
        if barrier is not None and not seen:
            barrier.wait(30)  # each holds a chunk
        seen.append(chunk)

    store = make_store(folder)
    written = fill(store, meet)
    assert store.missing() == []
    (folder / name).write_text(json.dumps(written))


def test_a_killed_writer_leaves_nothing_and_another_that_waits_goes_on(tmp_path: Path) -> None:
    is_writing = FORK.Event()
    killed = start(_write_half, tmp_path, is_writing)
    assert is_writing.wait(30)
    store = make_store(tmp_path)
    waiting = start(_fill_and_list, tmp_path, "waiting")
    while store.missing() != [0]:
        time.sleep(0.02)
    with store.claim(0) as is_mine:
        assert not is_mine
    with pytest.raises(UserError, match=r"000000\.safetensors"):
        store.read(0)
    killed.kill()
    killed.join()
    finish(waiting)
    assert (tmp_path / "waiting").read_text() == "[1, 2, 0]"
    assert fill(store) == []
    check_content(store)
    assert len(list(store.folder.iterdir())) == 3


def test_two_processes_share_the_work_and_do_nothing_twice(tmp_path: Path) -> None:
    barrier = FORK.Barrier(2)
    processes = [start(_fill_and_list, tmp_path, name, barrier) for name in "ab"]
    for process in processes:
        finish(process)
    one, other = (json.loads((tmp_path / name).read_text()) for name in "ab")
    assert one
    assert other
    assert sorted(one + other) == [0, 1, 2]
    check_content(make_store(tmp_path))


def test_a_full_disk_is_one_sentence_with_figures_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail)
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 3, 7))
        with pytest.raises(UserError, match=r"MODEL\.CACHE_FEATURES\.FOLDER"):
            fill(store)
    assert [path.suffix for path in store.folder.iterdir()] == [".lock"]
    assert fill(store) == [0, 1, 2]
    check_content(store)


def test_a_folder_that_cannot_be_written_is_named_with_the_key_to_set(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    store = make_store(tmp_path)
    with pytest.raises(UserError, match=r"MODEL\.CACHE_FEATURES\.FOLDER"):
        fill(store)


@pytest.mark.parametrize(
    ("value", "refusing"),
    [
        (1e5, [torch.float16]),
        (float("nan"), [torch.float16, torch.bfloat16, torch.float32]),
        (float("inf"), [torch.float16, torch.bfloat16, torch.float32]),
    ],
)
def test_features_that_a_dtype_cannot_hold_are_refused(
    tmp_path: Path, value: float, refusing: list[torch.dtype]
) -> None:
    view = View({"s16": torch.tensor([[[value]]])}, (16, 16), {})
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        store = FeatureStore(tmp_path / str(dtype), 1, dtype=dtype)
        if dtype in refusing:
            with pytest.raises(UserError, match="'s16' for view 0"):
                store.write(0, [view])
        else:
            store.write(0, [view])
        assert store.missing() == [0] * (dtype in refusing)
