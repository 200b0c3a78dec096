# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction and embedding on a Ray cluster, from and to an object store: every image once.

Needs the extra ``ray``, and moto and s3fs for a store on this machine. Ray does not run where the
tests of other files have changed the process, so each job is a process of its own.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.data.pictures import draw, save
from tests.servers import free_port

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="needs Ray: pip install 'qbheat_det[ray]'")
pytest.importorskip("moto", reason="needs an object store: pip install 'moto[server]' s3fs")
pyarrow = pytest.importorskip("pyarrow")
ROOT = Path(__file__).resolve().parents[2]
COUNT = int(os.environ.get("RAY_TEST_IMAGES", "400"))
BROKEN = [7, 77, 377]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with ``COUNT`` pictures, of which three are broken; the environment to reach it."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        files = fsspec.filesystem("s3")
        deadline = time.monotonic() + 60
        while True:
            try:
                files.mkdir("bucket")
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.5)
        picture = tmp_path_factory.mktemp("store") / "a.jpg"
        contents = []
        for index in range(8):
            save(picture, draw(96, 80, seed=index))
            contents.append(picture.read_bytes())
        pictures = {f"bucket/in/{i}.jpg": contents[i % 8] for i in range(COUNT)}
        for index in BROKEN:
            pictures[f"bucket/in/{index}.jpg"] = b"no image"
        files.pipe(pictures)
        yield files
    server.kill()


def _start(tool, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--engine", "ray", *map(str, words)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _find_workers():
    """Returns the process ids of Ray's actors that run a model."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                title = (process / "cmdline").read_text()
            except OSError:  # it has ended
                continue
            if title.startswith("ray::MapWorker"):
                found.append(int(process.name))
    return found


def _kill_a_worker():
    """Kills an actor some time after it has begun to work."""
    deadline = time.monotonic() + 120
    while not _find_workers():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(6)
    os.kill(_find_workers()[0], signal.SIGKILL)


def _read(store, folder):
    import pyarrow.dataset
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    filesystem = PyFileSystem(FSSpecHandler(store))
    return pyarrow.dataset.dataset(folder, filesystem=filesystem).to_table().to_pylist()


def test_no_picture_is_lost_or_twice_when_a_worker_is_killed(store, detector):
    # A picture that is named twice has one row.
    images = ["--images", "s3://bucket/in", "s3://bucket/in/0.jpg"]
    words = ["--weights", detector, *images, "--threshold", "0"]
    process = _start("predict", *words, "--output", "s3://bucket/boxes")
    _kill_a_worker()
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 1, errors
    assert f"{COUNT:,} images" in output
    rows = _read(store, "bucket/boxes")
    assert sorted(row["file"] for row in rows) == sorted(
        f"s3://bucket/in/{index}.jpg" for index in range(COUNT)
    )
    failed = {row["file"] for row in rows if row["error"]}
    assert failed == {f"s3://bucket/in/{index}.jpg" for index in BROKEN}
    assert all(file in errors for file in failed)
    boxes = {row["file"]: (row["boxes"], row["scores"], row["labels"]) for row in rows}
    assert boxes["s3://bucket/in/0.jpg"][0]
    assert boxes["s3://bucket/in/8.jpg"] == boxes["s3://bucket/in/0.jpg"]  # the same picture
    assert boxes["s3://bucket/in/1.jpg"] != boxes["s3://bucket/in/0.jpg"]

    again = _start("predict", *words, "--output", "s3://bucket/boxes")
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 2
    assert "choose another folder" in errors


def test_vectors_are_those_of_one_process(store, tmp_path, monkeypatch):
    for index in range(3):
        save(tmp_path / f"{index}.png", draw(96, 80, seed=index))
    output = tmp_path / "vectors"
    process = _start("embed", "--images", tmp_path, "--output", output)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    import pyarrow.dataset

    from qbheat_det.inference.embedding import embed_images

    rows = pyarrow.dataset.dataset(output).to_table().to_pylist()
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    expected = embed_images([str(tmp_path / f"{index}.png") for index in range(3)])
    vectors = {row["file"]: row["vector"] for row in rows}
    stacked = np.array([vectors[file] for file in expected.files])
    np.testing.assert_allclose(stacked, expected.vectors.numpy(), atol=2e-3)
