# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data and images in an object store: fetched once, brought up to date, never outside the cache."""

import json
from pathlib import Path

import fsspec
import numpy as np
import pytest

from qbheat_det.core import object_stores
from qbheat_det.core.errors import UserError
from qbheat_det.core.object_stores import fetch, list_store
from qbheat_det.data import open_source
from qbheat_det.data.datasets.opening import open_images
from qbheat_det.inference.images import read_rgb
from tests.data.pictures import draw, save


@pytest.fixture
def store(monkeypatch, tmp_path):
    """fsspec's store in the memory of the process, which lists its downloads."""
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    downloads = []
    get = type(files).get

    def count(self, sources, targets, **options):
        downloads.extend(sources)
        return get(self, sources, targets, **options)

    monkeypatch.setattr(type(files), "get", count)
    fetch.cache_clear()
    yield files, downloads
    fetch.cache_clear()
    files.store.clear()


def _list(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_a_folder_is_fetched_once_and_brought_up_to_date(store):
    files, downloads = store
    files.pipe({"/set/a.txt": b"one", "/set/deep/b.txt": b"two", "/other/c.txt": b"three"})
    folder = fetch("memory://set")
    assert _list(folder) == {"a.txt", "deep/b.txt"}
    assert len(downloads) == 2
    fetch.cache_clear()
    assert fetch("memory://set") == folder
    assert len(downloads) == 2

    files.pipe({"/set/a.txt": b"new", "/set/d.txt": b"four"})  # "new" is as long as "one"
    files.rm("/set/deep/b.txt")
    fetch.cache_clear()
    with Path(folder, "a.txt").open("rb", buffering=0) as reader:
        fetch("memory://set")
        assert reader.read() == b"one"  # a reader keeps the old file
    assert _list(folder) == {"a.txt", "d.txt"}
    assert Path(folder, "a.txt").read_bytes() == b"new"
    assert len(downloads) == 4
    assert Path(fetch("memory://other/c.txt")).read_bytes() == b"three"


def test_an_interrupted_download_goes_on(store, monkeypatch):
    files, downloads = store
    monkeypatch.setattr(object_stores, "_BATCH", 2)
    files.pipe({f"/set/{index}.txt": b"text" for index in range(5)})
    get = type(files).get

    def stop(self, sources, targets, **options):
        if len(downloads) >= 2:
            raise KeyboardInterrupt
        return get(self, sources, targets, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(files), "get", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch("memory://set")
    assert len(_list(fetch("memory://set"))) == 5
    assert len(downloads) == len(set(downloads)) == 5


def test_a_file_can_become_a_folder_and_a_folder_a_file(store):
    files, _ = store
    files.pipe({"/set/a": b"file", "/set/b/c/d.txt": b"in a folder"})
    folder = fetch("memory://set")
    files.rm("/set", recursive=True)
    files.pipe({"/set/a/b.txt": b"in a folder", "/set/b": b"file"})
    fetch.cache_clear()
    fetch("memory://set")
    assert _list(folder) == {"a/b.txt", "b"}


def test_the_rest_of_an_interrupted_download_is_not_taken_for_data(store, monkeypatch):
    """Neither a file that has left the store meanwhile, nor a part of one that has changed back."""
    files, _ = store
    old = {"name": "/set/b.txt", "size": 4, "type": "file", "ETag": "1"}
    listed = {"/set/b.txt": old}
    monkeypatch.setattr(type(files), "find", lambda *_, **__: listed)
    files.pipe("/set/b.txt", b"true")
    folder = fetch("memory://set")

    def stop(self, sources, targets, **options):
        for target in targets:
            Path(target).write_bytes(b"part")
        raise KeyboardInterrupt

    listed = {"/set/a.txt": {"size": 4}, "/set/b.txt": {**old, "ETag": "2"}}
    fetch.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "get", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch("memory://set")
    assert _list(folder) == {"b.txt"}
    assert Path(folder, "b.txt").read_bytes() == b"true"
    assert {path.suffix for path in Path(folder).parent.iterdir()} == {"", ".json", ".lock"}
    files.pipe("/set/a.txt", b"text")
    fetch("memory://set")
    assert _list(folder) == {"a.txt", "b.txt"}
    listed = {"/set/b.txt": old, "/set/": {"size": 0}}
    fetch.cache_clear()
    fetch("memory://set")
    assert _list(folder) == {"b.txt"}
    assert Path(folder, "b.txt").read_bytes() == b"true"


@pytest.mark.parametrize("damage", ["record", "list", "file"])
def test_a_damaged_cache_is_mended(store, damage):
    files, _ = store
    files.pipe("/set/a.txt", b"text")
    folder = Path(fetch("memory://set"))
    if damage == "file":
        (folder / "a.txt").write_bytes(b"")
    else:
        record = folder.with_name(f"{folder.name}.json")
        record.write_text("[]" if damage == "list" else '{"a.tx')
    fetch.cache_clear()
    fetch("memory://set")
    assert (folder / "a.txt").read_bytes() == b"text"


def test_what_cannot_be_fetched_is_named(store, monkeypatch):
    files, _ = store
    with pytest.raises(UserError, match=r"memory://nothing.*does not exist"):
        fetch("memory://nothing")
    with pytest.raises(UserError, match=r"memory://nothing.*jpg"):
        list_store("memory://nothing", [".jpg"])
    evil = {"/set/../../evil.txt": {"size": 4}}
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "find", lambda *_, **__: evil)
        with pytest.raises(UserError, match="evil"):
            fetch("memory://set")
    both = {"/set/a": {"size": 4}, "/set/a/b.txt": {"size": 4}}
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "find", lambda *_, **__: both)
        with pytest.raises(UserError, match="'a' and files in a folder"):
            fetch("memory://set")


def test_a_store_without_its_library_is_named(monkeypatch):
    def fail(*_, **__):
        raise ImportError("install gcsfs")

    monkeypatch.setattr(fsspec, "url_to_fs", fail)
    with pytest.raises(UserError, match=r"gs://bucket.*install gcsfs"):
        list_store("gs://bucket", [".jpg"])


def test_data_sets_and_images_of_a_store_are_those_of_a_folder(store, tmp_path):
    files, _ = store
    pixels = draw(64, 48)
    save(tmp_path / "a.png", pixels)
    content = (tmp_path / "a.png").read_bytes()
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [4, 4, 20, 20], "area": 400}
    truth = {
        "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 48}],
        "annotations": [{**box, "iscrowd": 0}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    files.pipe({"/set/images/a.png": content, "/set/truth.json": json.dumps(truth).encode()})
    by_file = open_source("memory://set/truth.json", "memory://set/images")
    by_folder = open_source("memory://set")
    for data in (by_file, by_folder):
        assert data.annotations[data.train.part].class_names == ("cat",)
    assert open_images(["memory://set/images"]).account.used["image"] == 1
    np.testing.assert_array_equal(read_rgb("memory://set/images/a.png"), pixels)
