# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Cached features on disk, and the fixed views that they belong to."""

import errno
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances
from safetensors.torch import save_file

from qbheat_det.core import files
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import IMAGE, VIEW, seed_place
from qbheat_det.data import DataError, FixedViews, TrainStream, number_records
from qbheat_det.data.mappers import VIEW_ROW, VIEW_SEED
from qbheat_det.feature_cache.encoding import make_view
from qbheat_det.feature_cache.filling import fill as build
from qbheat_det.feature_cache.filling import find_known_views
from qbheat_det.feature_cache.frozen import CachedViews
from qbheat_det.feature_cache.store import FORMAT_VERSION, AllViews, FeatureStore, View
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

NUM_VIEWS = 70  # two files of 32 views and a short one


def sample_view(index):
    """A view, by its index alone: ragged sizes, some without boxes, some left out by a mapper."""
    if index % 13 == 5:
        return DataError("unreadable image", f"image 'görl {index}.jpg'", "it is a text")
    if index % 13 == 6:
        return None
    generator = torch.Generator().manual_seed(index)
    height, width, boxes = 2 + index % 3, 3 + index % 5, index % 4
    return View(
        features={
            "s16": torch.randn(4, height, width, generator=generator),
            "tokens": torch.randn(6, 5, generator=generator),
        },
        image_size=(16 * height - 3, 16 * width),
        ground_truth={
            "gt_boxes": torch.rand(boxes, 4, generator=generator) * 40,
            "gt_classes": torch.randint(9, (boxes,), generator=generator),
        },
    )


def make_store(folder, dtype=torch.float32):
    return FeatureStore(folder / "cache", NUM_VIEWS, dtype=dtype)


def fill(store):
    """Writes what is missing, as a run does, and returns how many files were."""
    written = 0

    def encode(views):  # they are encoded already
        nonlocal written
        written += 1
        return views

    records = number_records([{"file_name": str(index)} for index in range(NUM_VIEWS)])
    views = AllViews(records, FixedViews(lambda one: sample_view(int(one["file_name"])), count=1))
    build(store, views, encode, title="Encoding", num_workers=0)
    return written


def check_content(store, dtype=torch.float32):
    """Asserts that every view of a store is that of ``sample_view``, rounded to its dtype."""
    for index in range(NUM_VIEWS):
        found, wanted = store.read(index), sample_view(index)
        if not isinstance(wanted, View):
            assert found == wanted
            continue
        assert found.image_size == wanted.image_size
        rounded = {name: feature.to(dtype) for name, feature in wanted.features.items()}
        torch.testing.assert_close(found.features, rounded, rtol=0, atol=0)
        torch.testing.assert_close(found.ground_truth, wanted.ground_truth, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_are_read_as_they_were_written(tmp_path, dtype):
    store = make_store(tmp_path, dtype)
    assert store.missing() == [0, 1, 2]
    assert fill(store) == 3
    check_content(store, dtype)
    again = make_store(tmp_path, dtype)
    assert fill(again) == 0
    check_content(pickle.loads(pickle.dumps(again)), dtype)  # as in a spawned worker
    with pytest.raises(IndexError):
        store.read(NUM_VIEWS)


def test_the_progress_of_encoding_ends_at_all_views(tmp_path, capfd):
    fill(make_store(tmp_path))
    *_, last = capfd.readouterr().err.strip().split("\r")
    assert f"100%|██████████| {NUM_VIEWS}/{NUM_VIEWS} " in last
    fill(make_store(tmp_path))
    assert capfd.readouterr().err == ""


def test_a_file_that_is_written_again_is_read_again(tmp_path):
    store = make_store(tmp_path)
    fill(store)
    check_content(store)
    others = [sample_view(index) for index in store.views_of(1)]
    store.write(0, others)
    torch.testing.assert_close(store.read(1).features, others[1].features, rtol=0, atol=0)


def _truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def _take_from_another_cache(path):
    other = FeatureStore(path.parent.with_name("other"), NUM_VIEWS, dtype=torch.float32)
    fill(other)
    shutil.copy(other.path_of(1), path)


@pytest.mark.parametrize("spoil", [_truncate, _take_from_another_cache, Path.unlink])
def test_a_damaged_or_foreign_file_is_never_used_and_made_again(tmp_path, spoil):
    fill(make_store(tmp_path))
    spoil(make_store(tmp_path).path_of(1))
    store = make_store(tmp_path)
    with pytest.raises(UserError, match=r"000001\.safetensors"):
        store.read(40)
    assert store.missing() == [1]
    assert fill(store) == 1
    check_content(store)


def test_every_digit_of_boxes_and_classes_and_every_type_is_under_a_checksum(tmp_path):
    store = FeatureStore(tmp_path / "cache", 1)
    truth = {"gt_boxes": torch.tensor([[1.5, 2.0, 30.25, 41.0]]), "gt_classes": torch.tensor([7])}
    store.write(0, [View({"s16": torch.ones(1, 2, 2)}, (50, 60), truth, (70, 80))])
    path = store.path_of(0)
    content = path.read_bytes()
    start = content.index(b"ground_truth")
    end = content.index(b"]", content.index(b"gt_classes"))
    digits = [place for place in range(start, end) if content[place : place + 1].isdigit()]
    assert len(digits) == 12
    for place in digits:
        other = b"%d" % ((int(content[place : place + 1]) + 1) % 10)
        path.write_bytes(content[:place] + other + content[place + 1 :])
        again = FeatureStore(store.folder, 1)
        assert again.missing() == [0]  # the next start writes it again
        with pytest.raises(UserError, match=r"000000\.safetensors.*boxes and classes"):
            again.read(0)
    path.write_bytes(content.replace(b'"F16"', b'"I16"'))
    with pytest.raises(UserError, match="checksum"):
        FeatureStore(store.folder, 1).read(0)


_CHECKSUM = zlib.crc32(bytes(12), zlib.crc32(b"torch.float32"))
_WHOLE = {
    "crc32": _CHECKSUM, "shapes": {"s16": [3]}, "image_size": [9, 9],
    "full_size": None, "ground_truth": {},
}  # fmt: skip
_CHANGED = {**_WHOLE, "crc32": _CHECKSUM + 1}
_NINE_BY_NINE = {**_WHOLE, "shapes": {"s16": [9, 9]}}


@pytest.mark.parametrize("about", [_WHOLE, {}, [], _CHANGED, _NINE_BY_NINE, {"error": {"x": 1}}])
def test_a_file_with_other_content_is_named(tmp_path, about):
    store = FeatureStore(tmp_path / "cache", 1, dtype=torch.float32)
    content = {"format": FORMAT_VERSION, "cache": "cache", "views": {"0": about}}
    store.folder.mkdir()
    text = json.dumps(content)
    described = {"qbheat_det": text, "qbheat_det_crc32": str(zlib.crc32(text.encode()))}
    save_file({"0": torch.zeros(3)}, store.path_of(0), described)
    assert store.missing() == []  # headers alone are checked
    if about is _WHOLE:
        found = store.read(0)
        assert isinstance(found, View)
        assert found.features["s16"].tolist() == [0, 0, 0]
        return
    with pytest.raises(UserError, match=r"000000\.safetensors"):
        store.read(0)


def _fill_until_killed(folder, is_writing):
    """Writes a file, and half of a second one."""

    def stop_halfway(stream, write):
        if make_store(folder).missing() == [1, 2]:
            stream.write(b"half of it")
            stream.flush()
            is_writing.set()
            time.sleep(60)
        write_to_disk(stream, write)

    write_to_disk, files._write_to_disk = files._write_to_disk, stop_halfway
    fill(make_store(folder))


def test_a_run_waits_for_another_and_goes_on_when_that_is_killed(tmp_path):
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
def test_a_disk_that_cannot_hold_the_cache_is_reported_with_the_key_to_set(
    tmp_path, monkeypatch, is_known_early
):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"MODEL\.CACHE_FEATURES\.FOLDER"):
        fill(make_store(tmp_path / "file"))
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


def test_features_that_a_dtype_cannot_hold_are_refused(tmp_path):
    for dtype, value in (
        (torch.float16, 1e5),
        (torch.bfloat16, math.inf),
        (torch.float32, math.nan),
    ):
        store = FeatureStore(tmp_path / str(dtype), 1, dtype=dtype)
        with pytest.raises(UserError, match="'s16' for view 0"):
            store.write(0, [View({"s16": torch.tensor([[[value]]])}, (16, 16), {})])
        assert store.missing() == [0]


RECORDS = number_records([{"file_name": f"{i}.jpg", "image_id": 10 + i} for i in range(9)])
COUNT = 3


def augment(record):
    """Draws an image and boxes from all generators; leaves out two images, one with a reason."""
    assert not {VIEW_ROW, VIEW_SEED} & record.keys()
    if record["image_id"] == 12:
        return DataError("unreadable image", record["file_name"], "it is a text")
    if record["image_id"] == 15:
        return None
    height, width, boxes = random.randint(8, 20), int(np.random.randint(8, 20)), torch.rand(2, 4)
    instances = Instances((height, width))
    instances.gt_boxes = Boxes(boxes * 8)
    instances.gt_classes = torch.randint(5, (2,))
    image = torch.randint(256, (3, height, width), dtype=torch.uint8)
    return {**record, "image": image, "instances": instances}


def encode(entry):
    return {"s1": entry["image"].float(), "mean": entry["image"].float().mean((1, 2))}


def take(mapper, steps, workers=0):
    """Returns a stream of seed 4, and the entries of its first batches of four."""
    stream = TrainStream(RECORDS, mapper=mapper, batch_size=4, seed=4, num_workers=workers)
    return stream, [entry for batch in itertools.islice(iter(stream), steps) for entry in batch]


def test_the_stream_chooses_by_position_and_the_views_seed_draws():
    stream, entries = take(FixedViews(augment, COUNT, seed=7), 10)
    positions = itertools.chain.from_iterable(stream.batches())
    for entry, (position, row) in zip(entries, positions, strict=False):
        if row in (2, 5):  # another image takes its place
            continue
        seed_place(4, IMAGE, position)
        number = int(torch.randint(COUNT, ()))
        seed_place(7, VIEW, RECORDS[row][VIEW_SEED], number)
        expected = augment({key: RECORDS[row][key] for key in ("file_name", "image_id")})
        torch.testing.assert_close(entry["image"], expected["image"])
        # Drawing a view leaves the generators alone.
        seed_place(4, IMAGE, position)
        stream.mapper.view(RECORDS[row], number)
        assert int(torch.randint(COUNT, ())) == number


@pytest.mark.parametrize(("count", "workers"), [(1, 0), (COUNT, 2)])
def test_a_stream_from_the_cache_is_that_of_the_views(tmp_path, count, workers):
    views = FixedViews(augment, count)
    store = FeatureStore(tmp_path / "cache", len(RECORDS) * count, dtype=torch.float32)
    build(
        store, AllViews(RECORDS, views), title="", num_workers=0,
        encode=lambda found: [make_view(m, encode(m)) if isinstance(m, dict) else m for m in found],
    )  # fmt: skip
    online, expected = take(views, 12)
    cached, found = take(CachedViews(store, count), 12, workers)
    for wanted, entry in zip(expected, found, strict=True):
        assert (entry["file_name"], entry["image_id"]) == (wanted["file_name"], wanted["image_id"])
        torch.testing.assert_close(entry["features"], encode(wanted), rtol=0, atol=0)
        assert entry["image_size"] == wanted["image"].shape[1:]
        own, other = entry["instances"], wanted["instances"]
        assert own.image_size == other.image_size
        torch.testing.assert_close(own.gt_boxes.tensor, other.gt_boxes.tensor, rtol=0, atol=0)
        torch.testing.assert_close(own.gt_classes, other.gt_classes, rtol=0, atol=0)
    assert online.skipped == cached.skipped
    assert online.skipped  # of image 12
    numbered = {**RECORDS[0], VIEW_ROW: 0}  # the record tells which classes are annotated
    for annotated in ([0], [1, 2]):
        entry = CachedViews(store, count)({**numbered, ANNOTATED_CLASSES: annotated})
        assert entry[ANNOTATED_CLASSES] == annotated


def test_views_of_a_similar_store_are_copied_and_only_the_others_encoded(tmp_path):
    """A set of 40 images and 2 views grows to 44, and two of its records change places."""
    count, encoded = 2, []

    def make(folder, names, **key):
        key = {"views_per_image": count, "records": [f"hash of {name}" for name in names], **key}
        store = FeatureStore(tmp_path / folder, count * len(names), dtype=torch.float32, key=key)
        records = number_records([{"file_name": f"{name}.jpg"} for name in names])
        return store, AllViews(records, FixedViews(draw, count))

    def draw(record):
        return (
            View({"s1": torch.rand(2, 2)}, (4, 4), {}) if record["file_name"] != "7.jpg" else None
        )

    def build_all(store, views):
        del encoded[:]
        encode = lambda entries: encoded.extend(entries) or entries  # noqa: E731
        return build(store, views, encode, title="", num_workers=0)

    first, small = make("small", range(40))
    build_all(first, small)
    first.path_of(1).unlink()  # the views 32 to 63, which are images 16 to 31
    grown, large = make("large", [1, 0, *range(2, 44)])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "meta.json").write_text("[1]")
    known = find_known_views(grown)
    assert sorted(known) == [*range(32), *range(64, 80)]
    assert torch.equal(known[0]().features["s1"], first.read(count).features["s1"])
    content = bytearray(first.path_of(0).read_bytes())
    content[-1] ^= 1  # damages one view
    first.path_of(0).write_bytes(content)
    build_all(grown, large)
    assert len(encoded) == 88 - len(known) + 1
    for index in range(88):
        found, wanted = grown.read(index), large[index]
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert torch.equal(found.features["s1"], wanted.features["s1"])
    for name, key in (("other", {"root": "x"}), ("count", {"views_per_image": 1})):
        assert not find_known_views(make(name, range(40), **key)[0])
