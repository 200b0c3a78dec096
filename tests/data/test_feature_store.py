# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Cached features on the disk: read as written, whole or not there, built by one run at a time."""

import errno
import math
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from qbheat_det.core import files
from qbheat_det.core.errors import UserError
from qbheat_det.data.feature_store import FeatureStore, View
from tests.data.feature_cases import NUM_VIEWS, check_content, fill, make_store


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_are_read_as_they_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    store = make_store(tmp_path, dtype)
    assert store.missing() == [0, 1, 2]
    assert fill(store) == 3
    check_content(store, dtype)
    again = make_store(tmp_path, dtype)
    assert fill(again) == 0
    check_content(pickle.loads(pickle.dumps(again)), dtype)  # as in a spawned worker
    with pytest.raises(IndexError):
        store.read(NUM_VIEWS)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _take_from_another_cache(path: Path) -> None:
    other = FeatureStore(path.parent.with_name("other"), NUM_VIEWS, dtype=torch.float32)
    fill(other)
    shutil.copy(other.path_of(1), path)


@pytest.mark.parametrize("spoil", [_truncate, _take_from_another_cache, Path.unlink])
def test_a_damaged_or_foreign_file_is_never_used_and_made_again(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    fill(make_store(tmp_path))
    spoil(make_store(tmp_path).path_of(1))
    store = make_store(tmp_path)
    with pytest.raises(UserError, match=r"000001\.safetensors"):
        store.read(40)
    assert store.missing() == [1]
    assert fill(store) == 1
    check_content(store)


def _fill_until_killed(folder: Path, is_writing: Event) -> None:
    """Writes a file, and half of a second one."""

    def stop_halfway(stream: Any, write: Callable[[Any], object]) -> None:
        if make_store(folder).missing() == [1, 2]:
            stream.write(b"half of it")
            stream.flush()
            is_writing.set()
            time.sleep(60)
        write_to_disk(stream, write)

    write_to_disk, files._write_to_disk = files._write_to_disk, stop_halfway
    fill(make_store(folder))


def test_a_run_waits_for_another_and_goes_on_when_that_is_killed(tmp_path: Path) -> None:
    # Forked, as loading workers are: a new interpreter would import PyTorch for seconds.
    fork = multiprocessing.get_context("fork")
    is_writing = fork.Event()
    killed = fork.Process(target=_fill_until_killed, args=(tmp_path, is_writing), daemon=True)
    killed.start()
    assert is_writing.wait(30)
    waiting = fork.Process(target=lambda: os._exit(fill(make_store(tmp_path))), daemon=True)
    waiting.start()
    time.sleep(0.5)
    assert make_store(tmp_path).missing() == [1, 2]
    killed.kill()
    killed.join()
    waiting.join(60)
    assert waiting.exitcode == 2  # the files that it wrote
    store = make_store(tmp_path)
    check_content(store)
    assert sorted(path.name for path in store.folder.iterdir()) == [
        *(f"00000{file}.safetensors" for file in range(3)),
        "build.lock",
    ]


@pytest.mark.parametrize("is_known_early", [True, False])
def test_a_full_disk_is_named_with_the_key_to_set_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known_early: bool
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make_store(tmp_path)
    with monkeypatch.context() as patch:
        if is_known_early:
            patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 3, 7))
        else:
            patch.setattr(files.os, "fsync", fail)
        with pytest.raises(UserError, match=r"MODEL\.CACHE_FEATURES\.FOLDER"):
            fill(store)
    assert store.missing() == [1, 2] if is_known_early else [0, 1, 2]
    fill(store)
    check_content(store)


def test_features_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    for dtype, value in (
        (torch.float16, 1e5),
        (torch.bfloat16, math.inf),
        (torch.float32, math.nan),
    ):
        store = FeatureStore(tmp_path / str(dtype), 1, dtype=dtype)
        with pytest.raises(UserError, match="'s16' for view 0"):
            store.write(0, [View({"s16": torch.tensor([[[value]]])}, (16, 16), {})])
        assert store.missing() == [0]
