# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images from shards: the batches of the folder, whatever the place, the workers and the faults."""

import itertools
import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.structures import Instances
from detectron2.utils import comm

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    build_train_stream,
    configure_cache,
    forget_annotations,
    open_images,
    open_source,
    pack_source,
    register_source,
    split_source,
)
from qbheat_det.data.shard_cache import cache_folder, fetch
from qbheat_det.data.shards import shuffle_shards

from .shard_cases import SHARD, corrupt, make_source, pack, serve

MAPPERS = {"boxes": "default", "classes": "classify", "images": "pretrain"}
Batches = list[list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    for name in ("QBHEAT_SHARDS_CACHE_GB", "QBHEAT_SHARDS_RETRY_SECONDS"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setattr("qbheat_det.data.shard_cache._FIRST_PAUSE", 0.05)
    forget_annotations()
    yield
    forget_annotations()


def config(kind: str, **keys: Any) -> CfgNode:
    """A config of small batches whose training set is "shards_train"."""
    cfg = get_cfg()
    cfg.DATASETS.TRAIN = ("shards_train",)
    cfg.INPUT.DATASET_MAPPER_NAME = MAPPERS[kind]
    cfg.INPUT.PRETRAIN.SIZE = 32
    cfg.INPUT.PRETRAIN.MEMORY_GB = 0.0
    cfg.INPUT.MIN_SIZE_TRAIN = (48,)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = kind == "boxes"
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = False
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.SEED = 3
    for key, value in keys.items():
        cfg.DATALOADER[key] = value
    return cfg


def take(kind: str, data: str, images: str = "", *, start: int = 0, **keys: Any) -> Batches:
    """Returns five batches of what ``--data``, or else ``--images``, names."""
    source = open_source(data, images) if data else open_images([images])
    register_source("shards_train", source.train)
    stream = build_train_stream(config(kind, **keys))
    stream.start = start
    return list(itertools.islice(stream, 5))


def comparable(batches: Batches) -> list[Any]:
    """Returns all that is in batches, with the names of files for their paths."""

    def convert(key: str, value: Any) -> Any:
        if isinstance(value, Instances):
            fields = value.get_fields()
            return [*fields["gt_boxes"].tensor.tolist(), fields["gt_classes"].tolist()]
        if isinstance(value, torch.Tensor):
            return value.shape, value.numpy().tobytes()
        return os.path.basename(value) if key == "file_name" else value

    return [{k: convert(k, v) for k, v in one.items()} for batch in batches for one in batch]


@pytest.mark.parametrize("kind", MAPPERS)
def test_shards_here_and_over_http_give_the_batches_of_the_folder(
    kind: str, tmp_path: Path
) -> None:
    data, images = make_source(kind, tmp_path)
    shards = pack(kind, tmp_path)
    first, second = (data, images) if data else ("", images)
    expected = comparable(take(kind, first, second))
    with serve(shards) as server:
        for place in (str(shards), server.address):
            named = (place, "") if data else ("", place)
            assert comparable(take(kind, *named, SHUFFLE_SHARDS=0)) == expected
            assert comparable(take(kind, *named)) == expected  # few shards mix as a whole
        asked = [name for name in server.asked if name.endswith(".tar")]
        assert len(asked) == len(set(asked))  # the cache has the others
    if data:
        splits = []
        for source in (open_source(data, images).train, open_source(str(shards)).train):
            splits.append(split_source(source, fraction=0.3, seed=1))
        names = [[*map(os.path.basename, s["val"])] for s in splits]
        assert names[0] == names[1] != []


def test_a_shuffle_by_shards_does_not_depend_on_workers_processes_or_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = pack("boxes", tmp_path)
    with serve(shards) as server:
        whole = comparable(take("boxes", server.address, SHUFFLE_SHARDS=2))
        local = comparable(take("boxes", str(shards), SHUFFLE_SHARDS=2, NUM_WORKERS=2))
        assert local == whole != comparable(take("boxes", str(shards)))
        late = comparable(take("boxes", server.address, SHUFFLE_SHARDS=2, start=2))
        assert late[:12] == whole[8:]
        monkeypatch.setattr(comm, "get_world_size", lambda: 2)
        shares = []
        for rank in (0, 1):
            monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
            options = {"SHUFFLE_SHARDS": 2, "NUM_WORKERS": 1}
            shares.append(comparable(take("boxes", server.address, **options)))
        halves = [share[2 * step : 2 * step + 2] for step in range(5) for share in shares]
        assert [one for half in halves for one in half] == whole


def test_the_shuffle_uses_few_shards_at_once_and_every_image_once_an_epoch() -> None:
    shards = [index % 20 for index in range(2000)]
    order = [*itertools.islice(shuffle_shards(shards, window=4, seed=1), 4000)]
    epochs = [order[:2000], order[2000:]]
    assert all(sorted(epoch) == list(range(2000)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    spans = []
    for shard in range(20):
        places = [place for place, index in enumerate(epochs[0]) if shards[index] == shard]
        spans.append((places[0], places[-1]))
    used = [sum(low <= place <= high for low, high in spans) for place in range(2000)]
    assert max(used) <= 6
    # Neighbours in the order come from all shards of the window alike.
    same = np.mean([shards[a] == shards[b] for a, b in itertools.pairwise(epochs[0])])
    assert same < 0.4


@pytest.mark.parametrize("fault", ["503", "cut", "stall"])
def test_a_fault_that_passes_is_waited_for_and_one_that_stays_names_the_address(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qbheat_det.data.shard_cache._STALLED", 0.5)
    shards = pack("images", tmp_path)
    expected = comparable(take("images", "", str(shards)))
    name = "train-000001.tar"
    with serve(shards) as server:
        server.faults = {name: [fault, fault]}
        with caplog.at_level("WARNING"):
            assert comparable(take("images", "", server.address)) == expected
        assert sum(name in record.getMessage() for record in caplog.records) == 2
        assert server.asked.count(name) == 3
    size = (shards / name).stat().st_size
    with serve(shards) as server:
        server.faults = {"*": [fault] * 100}
        configure_cache(gigabytes=1, retry_seconds=0.6)
        start = time.monotonic()
        with pytest.raises(UserError, match=f"{server.address}/{name}.*RETRY_SECONDS"):
            fetch(f"{server.address}/{name}", size)
        assert time.monotonic() - start < 3
        server.faults = {}
        with pytest.raises(UserError, match="404"):
            fetch(f"{server.address}/gone.tar", size)
    assert not [*cache_folder().rglob("*.part")]


def test_shards_that_are_truncated_or_changed_are_named(tmp_path: Path) -> None:
    shards = pack("images", tmp_path)
    broken = shards / "train-000000.tar"
    with serve(shards) as server:
        assert take("images", "", server.address)  # and now has a copy, from before
        corrupt(broken)
        for copy in cache_folder().rglob("*.tar"):
            corrupt(copy)
        for place in (str(shards), server.address):
            with pytest.raises(UserError, match=r"train-000000\.tar"):
                take("images", "", place)
        broken.write_bytes(broken.read_bytes()[:-1024])
        for copy in cache_folder().rglob("*.tar"):
            copy.unlink()
        for place in (str(shards), server.address):
            forget_annotations()
            with pytest.raises(UserError, match=r"train-000000\.tar.*bytes"):
                take("images", "", place)
        corrupt(shards / "train.json.gz")
        forget_annotations()
        with pytest.raises(UserError, match=r"train\.json\.gz"):
            take("images", "", str(shards))
        (shards / "index.json").write_text("[]")
        with pytest.raises(UserError, match=r"index\.json"):
            take("images", "", server.address)


def test_the_cache_keeps_to_its_limit_and_says_when_it_is_too_small(tmp_path: Path) -> None:
    shards = pack("images", tmp_path)
    sizes = {path.name: path.stat().st_size for path in shards.glob("*.tar")}
    limit = sum(sorted(sizes.values())[-2:])
    with serve(shards) as server:
        configure_cache(gigabytes=limit / 1e9, retry_seconds=5)
        with pytest.raises(UserError, match=r"CACHE_GB.*SHUFFLE_SHARDS"):
            take("images", "", server.address)
        for name in [*sizes, *sizes]:
            assert fetch(f"{server.address}/{name}", sizes[name]).stat().st_size == sizes[name]
            assert sum(path.stat().st_size for path in cache_folder().rglob("*.tar")) <= limit
        configure_cache(gigabytes=1e-6, retry_seconds=5)
        with pytest.raises(UserError, match="CACHE_GB"):
            fetch(f"{server.address}/train-000000.tar", sizes["train-000000.tar"] + 1)


def test_packing_is_whole_keeps_bytes_and_leaves_broken_images_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, images = make_source("boxes", tmp_path)
    name = json.loads(Path(data).read_text())["images"][3]["file_name"]
    (Path(images) / name).write_bytes(b"no image")
    out = tmp_path / "shards"
    source = open_source(data, images)

    def stop(*args: object, **options: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qbheat_det.data.shard_packing.gzip.compress", stop)
        with pytest.raises(KeyboardInterrupt):
            pack_source(source, out, shard_bytes=SHARD)
    assert [*out.glob("*.tar")]
    with pytest.raises(UserError):
        open_source(str(out))
    (error,) = pack_source(source, out, shard_bytes=SHARD)
    assert name in error.where
    with pytest.raises(UserError, match=r"index\.json"):
        pack_source(source, out)
    files = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            files.update({one.name: tar.extractfile(one).read() for one in tar})  # type: ignore[union-attr]
    assert len(files) == 2 * 11
    for key in (key for key in files if key.endswith(".json")):
        about = json.loads(files[key])
        packed = files[key[:-5] + os.path.splitext(about["file_name"])[1]]
        assert packed == (Path(images) / about["file_name"]).read_bytes()
    register_source("shards_train", open_source(str(out)).train)
    records = DatasetCatalog.get("shards_train")
    assert len(records) == 11
    assert any(record["annotations"] for record in records)


def test_what_shards_do_not_hold_is_refused(tmp_path: Path) -> None:
    shards = pack("images", tmp_path)
    with pytest.raises(UserError, match="--images"):
        open_source(str(shards))
    with pytest.raises(UserError, match="--images"):
        open_images([str(shards), str(tmp_path)])
    index = json.loads((shards / "index.json").read_text())
    index["parts"]["train"]["file"] = "../train.json.gz"
    (shards / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json"):
        take("images", "", str(shards))


def test_a_bucket_that_fails_is_waited_for_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr("qbheat_det.data.shard_cache._STALLED", 1.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    (tmp_path / "bucket").mkdir()
    shards = pack("images", tmp_path).rename(tmp_path / "bucket" / "set")
    expected = comparable(take("images", "", str(shards)))
    with serve(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
        configure_cache(gigabytes=1, retry_seconds=60)
        server.faults = {"train-000001.tar": ["503", "cut", "stall"]}
        assert comparable(take("images", "", "s3://bucket/set", NUM_WORKERS=1)) == expected
        assert server.asked.count("train-000001.tar") == 4
        with pytest.raises(UserError, match=r"s3://bucket/none/index\.json. cannot be read"):
            take("images", "", "s3://bucket/none")
        configure_cache(gigabytes=1, retry_seconds=1)
        server.faults = {"*": ["503"] * 100}
        with pytest.raises(UserError, match=r"s3://bucket/set/other\.tar.*RETRY_SECONDS"):
            fetch("s3://bucket/set/other.tar", 1)
