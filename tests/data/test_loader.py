# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Streams of batches for training, and batches of whole images in their order."""

import errno
import itertools
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from detectron2.data.samplers import RepeatFactorTrainingSampler, TrainingSampler
from detectron2.utils import comm

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import seed_place
from qbheat_det.data import DataError, ImageBatches, TrainStream, build_train_stream, workers
from qbheat_det.data.image_batches import with_views
from qbheat_det.data.loader import find_repeat_factors
from qbheat_det.modeling.pretrain import QUADRANTS_OF


def dataset(count):
    """Images of which every third is tall."""
    return [
        {"id": index, "width": 2, "height": 3 if index % 3 == 0 else 1} for index in range(count)
    ]


def augment(entry):
    """Adds a number from each generator that augmentations use."""
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    return {**entry, "drawn": drawn}


def make_stream(count=10, batch_size=4, **options):
    return TrainStream(dataset(count), mapper=augment, batch_size=batch_size, **options)


def take(stream, steps, start=0):
    stream.start = start
    return list(itertools.islice(iter(stream), steps))


class Sized:
    """A mapper of images with random sizes."""

    def __call__(self, entry):
        return {**entry, "size": self.find_size(entry)}

    def find_size(self, entry):
        return tuple(int(side) for side in np.random.randint(1, 129, 2))


@pytest.mark.parametrize("options", [{}, {"aspect_ratio_grouping": True}, {"size_grouping": 64}])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_a_stream_that_starts_late_is_the_rest_of_the_whole_one(options, start):
    def build():
        return TrainStream(dataset(10), mapper=Sized(), batch_size=4, seed=3, **options)

    assert take(build(), 12 - start, start) == take(build(), 12)[start:]


def test_workers_change_neither_order_nor_augmentation():
    assert take(make_stream(num_workers=2), 6) == take(make_stream(), 6)


def test_the_order_is_that_of_detectron2s_sampler():
    batches = take(make_stream(count=10, batch_size=4, seed=5), 5)
    found = [entry["id"] for batch in batches for entry in batch]
    assert found == list(itertools.islice(TrainingSampler(10, seed=5)._infinite_indices(), 20))
    assert sorted(found[:10]) == list(range(10))
    drawn = [
        {entry["drawn"] for batch in take(make_stream(seed=seed), 3) for entry in batch}
        for seed in (1, 2)
    ]
    assert not drawn[0] & drawn[1]


def test_grouped_batches_hold_wide_or_tall_images_and_lose_none():
    batches = take(make_stream(count=12, batch_size=3, aspect_ratio_grouping=True), 40)
    for batch in batches:
        assert len({entry["width"] > entry["height"] for entry in batch}) == 1
        assert len(batch) == 3
    seen = [entry["id"] for batch in batches for entry in batch]
    # 120 images are ten epochs; what waits for its batch to fill is fewer than three of a kind.
    assert all(9 <= seen.count(index) <= 11 for index in range(12))


def test_batches_of_equal_sizes_hold_the_same_images_as_others():
    def build(**options):
        return TrainStream(dataset(40), mapper=Sized(), batch_size=3, seed=7, **options)

    batches = take(build(size_grouping=64), 40)
    for batch in batches:
        canvases = {(height > 64, width > 64) for height, width in (one["size"] for one in batch)}
        assert len(canvases) == 1
        assert len(batch) == 3
    grouped = {(one["id"], one["size"]) for batch in batches for one in batch}
    plain = {(one["id"], one["size"]) for batch in take(build(), 44) for one in batch}
    # Four kinds of which up to two images wait: 120 images are among the first 128.
    assert len(grouped) > 115
    assert grouped <= plain


def test_no_image_waits_for_its_size_for_longer_than_an_epoch():
    class OneIsWide:
        def __call__(self, entry):
            return entry

        def find_size(self, entry):
            return (64, 128 if entry["id"] == 0 else 64)

    stream = TrainStream(dataset(9), mapper=OneIsWide(), batch_size=4, size_grouping=64)
    batches = list(itertools.islice(stream.batches(), 200))
    positions = [position for batch in batches for position, _ in batch]
    assert len(set(positions)) == 800
    for step, batch in enumerate(batches):
        drawn_until = max(position for batch in batches[: step + 1] for position, _ in batch)
        # A batch can only be formed as soon as four images wait.
        assert drawn_until - min(position for position, _ in batch) <= 9 + 3
    num_wide = [sum(index == 0 for _, index in batch) for batch in batches]
    assert abs(sum(num_wide) - 800 / 9) <= 2  # one in each epoch
    assert num_wide.count(0) > 100  # the others have batches of their own


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_share_the_batches_of_one(world_size, monkeypatch):
    whole = take(make_stream(batch_size=5), 4)
    monkeypatch.setattr(comm, "get_world_size", lambda: world_size)
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        shares.append(take(make_stream(batch_size=5), 4))
    joined = [list(itertools.chain.from_iterable(parts)) for parts in zip(*shares, strict=True)]
    assert joined == whole
    assert all(len(part) in (5 // world_size, -(-5 // world_size)) for s in shares for part in s)


def test_loading_in_this_process_leaves_its_randomness_alone():
    stream = iter(make_stream())
    seed_place(1)
    expected = (random.random(), np.random.rand(), torch.rand(()))
    seed_place(1)
    next(stream)
    torch.testing.assert_close((random.random(), np.random.rand(), torch.rand(())), expected)


def test_images_that_the_mapper_leaves_out_are_replaced_by_any_other():
    def build(seed):
        return TrainStream(
            dataset(40),
            mapper=lambda entry: entry if entry["id"] >= 30 else None,
            batch_size=40,
            seed=seed,
        )

    drawn = [[entry["id"] for entry in next(iter(build(seed)))] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    counts = [drawn[0].count(kept) for kept in range(30, 40)]
    assert sum(counts) == 40
    assert min(counts) >= 1  # each stands in the stream once for itself
    assert max(counts) < 12  # the next in order would stand there 31 times


def test_streams_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(UserError, match="training set"):
        TrainStream([], mapper=augment, batch_size=1)
    with pytest.raises(UserError, match=r"DATALOADER\.ASPECT_RATIO_GROUPING"):
        TrainStream([{"id": 1}], mapper=augment, batch_size=1, aspect_ratio_grouping=True)
    with pytest.raises(UserError, match=r"DATALOADER\.SIZE_GROUPING.*find_size"):
        make_stream(size_grouping=64)
    with pytest.raises(UserError, match=r"DATALOADER\.SIZE_GROUPING.*width and height"):
        TrainStream([*dataset(3), {"id": 3}], mapper=Sized(), batch_size=1, size_grouping=64)
    with pytest.raises(UserError, match="1000 images"):
        next(iter(TrainStream(dataset(2), mapper=lambda entry: None, batch_size=1)))
    monkeypatch.setattr(comm, "get_world_size", lambda: 3)
    with pytest.raises(UserError, match=r"SOLVER\.IMS_PER_BATCH"):
        make_stream(batch_size=2)
    cfg = get_cfg()
    cfg.DATALOADER.SAMPLER_TRAIN = "RandomSubsetTrainingSampler"
    with pytest.raises(UserError, match=r"DATALOADER\.SAMPLER_TRAIN.*RandomSubset"):
        build_train_stream(cfg, dataset(2))
    cfg.DATALOADER.SAMPLER_TRAIN = "RepeatFactorTrainingSampler"
    with pytest.raises(UserError, match=r"DATALOADER\.REPEAT_THRESHOLD"):
        build_train_stream(cfg, dataset(2))
    cfg.DATALOADER.REPEAT_THRESHOLD = 0.1
    with pytest.raises(UserError, match="boxes"):
        build_train_stream(cfg, dataset(2))


RARE = [[0]] * 8 + [[0, 1]] + [[]]  # classes of ten images: class 1 is in one of them


def _make_rare_stream(threshold=0.4, **options):
    records = [
        {**entry, "annotations": [{"category_id": k, "bbox": [0, 0, 1, 1]} for k in classes]}
        for entry, classes in zip(dataset(len(RARE)), RARE, strict=True)
    ]
    cfg = get_cfg()
    cfg.DATALOADER.SAMPLER_TRAIN = "RepeatFactorTrainingSampler"
    cfg.DATALOADER.REPEAT_THRESHOLD = threshold
    factors = find_repeat_factors(cfg, records)
    return TrainStream(records, mapper=augment, repeat_factors=factors, **options)


def test_images_of_rare_classes_are_drawn_as_often_as_in_lvis():
    # Class 0 is in 9 of 10 images, class 1 in one: sqrt(0.4 / 0.1) = 2 times.
    batches = take(_make_rare_stream(batch_size=11, seed=3), 50)
    seen = [entry["id"] for batch in batches for entry in batch]
    assert [seen.count(index) for index in range(10)] == [50] * 8 + [100, 50]
    # sqrt(0.225 / 0.1) = 1.5 times
    batches = take(_make_rare_stream(0.225, batch_size=21, seed=3), 200)
    seen = [entry["id"] for batch in batches for entry in batch]
    assert seen.count(8) / seen.count(0) == pytest.approx(1.5, abs=0.05)


def test_the_order_with_rare_classes_is_that_of_detectron2s_sampler():
    batches = take(_make_rare_stream(0.225, batch_size=4, seed=3), 50)
    found = [entry["id"] for batch in batches for entry in batch]
    sampler = RepeatFactorTrainingSampler(torch.tensor([1.0] * 8 + [1.5, 1.0]), seed=3)
    assert found == list(itertools.islice(sampler._infinite_indices(), 200))


def test_newer_detectron2_can_repeat_without_a_square_root(monkeypatch):
    calls = []
    monkeypatch.setattr(
        RepeatFactorTrainingSampler,
        "repeat_factors_from_category_frequency",
        lambda records, threshold, **options: calls.append((threshold, options)),
    )
    cfg = get_cfg()
    cfg.DATALOADER.update({"SAMPLER_TRAIN": "RepeatFactorTrainingSampler", "REPEAT_THRESHOLD": 0.1})
    find_repeat_factors(cfg, [])
    cfg.DATALOADER.REPEAT_SQRT = False
    find_repeat_factors(cfg, [])
    assert calls[-1] == (0.1, {"sqrt": False})


def test_a_stream_with_rare_classes_goes_on_and_is_shared_as_any_other(monkeypatch):
    whole = take(_make_rare_stream(0.225, batch_size=4, seed=3), 12)
    assert take(_make_rare_stream(0.225, batch_size=4, seed=3), 7, start=5) == whole[5:]
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        shares.append(take(_make_rare_stream(0.225, batch_size=4, seed=3), 12))
    assert [first + second for first, second in zip(*shares, strict=True)] == whole


def test_a_stream_ends_when_more_than_half_of_its_files_are_broken():
    def make(broken, total, **options):
        # Two records per file, as of tiles.
        records = [{"file_name": str(i // 2)} for i in range(2 * total)]

        def read(record):
            if int(record["file_name"]) < broken:
                return DataError("unreadable image", f"image '{record['file_name']}'", "gone")
            return record

        return TrainStream(records, mapper=read, batch_size=4, **options)

    stream = make(broken=5, total=10)
    take(stream, 40)
    assert sorted(stream.skipped) == [f"image '{i}'" for i in range(5)]
    with pytest.raises(UserError, match="6 of 10"):
        take(make(broken=6, total=10), 40)
    # A broken unlabelled image does not count against the labelled ones.
    mixed = make(broken=5, total=10, unlabelled=make(broken=5, total=10))
    take(mixed, 40)
    assert len(mixed.skipped) == 5  # the names are the same
    with pytest.raises(UserError, match="6 of 10"):
        take(make(broken=0, total=10, unlabelled=make(broken=6, total=10)), 40)


class Plain:
    """A mapper that fails on some images."""

    def __init__(self, *broken):
        self.broken = broken

    def __call__(self, record):
        number = record["image_id"]
        if number in self.broken:
            return DataError("unreadable image", f"image '{number}'", "no image")
        return {**record, "image": torch.full((3, 2, 2), number)}


def numbers(batches):
    return [[entry["image_id"] for entry in batch] for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_keep_the_order_and_leave_broken_images_out_every_time(num_workers):
    records = [{"image_id": i} for i in range(7)]
    mapper = Plain(1, 4, 5)
    batches = ImageBatches(records, mapper=mapper, batch_size=2, num_workers=num_workers)
    assert len(batches) == 4
    for _ in range(2):
        assert numbers(batches) == [[0], [2, 3], [6]]  # the third batch was broken as a whole
        assert sorted(batches.skipped) == ["image '1'", "image '4'", "image '5'"]


def test_what_workers_send_can_be_kept_without_an_open_file_each():
    records = [{"image_id": i} for i in range(5)]
    batches = ImageBatches(records, mapper=Plain(), num_workers=1)
    kept = [entry["image"] for batch in batches for entry in batch]
    assert [int(image[0, 0, 0]) for image in kept] == list(range(5))
    assert not any(image.is_shared() for image in kept)


def test_every_image_is_seen_from_a_corner_in_turn_and_from_the_centre():
    records = [{"image_id": i} for i in range(6)]
    seen = with_views(records, [QUADRANTS_OF["corner"], QUADRANTS_OF["centre"]])
    assert [entry["image_id"] for entry in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    corners = ["top_left", "top_right", "bottom_left", "bottom_right"]
    assert [entry["place"] for entry in seen[::2]] == [*corners, *corners[:2]]
    assert {entry["place"] for entry in seen[1::2]} == {"centre"}
    assert records == [{"image_id": i} for i in range(6)]


def _fill_shared_memory(entry):
    """Returns a tensor, for which a worker has no shared memory."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard_limit))
    return {"id": entry["id"], "image": torch.full((3, 256, 256), entry["id"])}


def test_batches_arrive_without_shared_memory(caplog):
    batches = take(
        TrainStream(dataset(4), mapper=_fill_shared_memory, batch_size=2, num_workers=1), 3
    )
    for image in itertools.chain(*batches):
        assert torch.equal(image["image"], torch.full((3, 256, 256), image["id"]))
    assert len([text for text in caplog.messages if "/dev/shm is full" in text]) == 1


def test_shared_memory_that_is_too_full_for_locks_is_named(monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", fail)
    stream = TrainStream(dataset(4), mapper=_sleep, batch_size=2, num_workers=1)
    with pytest.raises(UserError, match="/dev/shm is full"):
        next(iter(stream))


SMALL_SHARED_MEMORY = """
import sys, torch
from qbheat_det.data import TrainStream
if __name__ == "__main__":
    records = [{"id": number} for number in range(8)]
    make = lambda entry: {"image": torch.full((3, 1600, 1600), entry["id"], dtype=torch.uint8)}
    stream = TrainStream(records, mapper=make, batch_size=4, num_workers=2)
    for batch, _ in zip(stream, range(4)):
        assert [image["image"].float().std() for image in batch] == [0.0] * 4
"""


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [8, 64])
def test_batches_arrive_with_a_small_shared_memory(megabytes):
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("only root may mount a small /dev/shm")
    words = [sys.executable, "-c", SMALL_SHARED_MEMORY]
    command = ["unshare", "-m", "sh", "-c", f"{mount} && exec {shlex.join(words)}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert "/dev/shm is full" in run.stderr


def _end_worker(entry):
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(entry):
    time.sleep(60)


@pytest.mark.parametrize(
    ("mapper", "message"),
    [(_end_worker, "a worker ended"), (_sleep, "gave no batch")],
)
def test_a_worker_that_ends_or_hangs_is_an_error(mapper, message, monkeypatch):
    monkeypatch.setattr(workers, "WORKER_SECONDS", 2)
    stream = TrainStream(dataset(4), mapper=mapper, batch_size=2, num_workers=1)
    with pytest.raises(UserError, match=message):
        next(iter(stream))
    with pytest.raises(UserError, match=message):
        next(iter(ImageBatches(dataset(4), mapper=mapper, num_workers=1)))
