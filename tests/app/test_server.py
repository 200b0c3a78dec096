# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat serve``: its answers, limits and batches, and the process."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import qbheat_det
from qbheat_det.api import Detector

pytest.importorskip("fastapi", reason="the server needs FastAPI: pip install -e .[serve]")
from fastapi import HTTPException
from fastapi.testclient import TestClient

from qbheat_det.app.server import BatchQueue, Limits, build_server, read_body, serve
from qbheat_det.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CELLS = (ROOT / "docs" / "cells.jpg").read_bytes()
ENTRY = "retinanet/285M_bccd"


@pytest.fixture(scope="module")
def detector():
    found = qbheat_det.load(ENTRY)
    assert isinstance(found, Detector)
    return found


@pytest.fixture(scope="module")
def client(detector):
    limits = Limits(megabytes=0.2, megapixels=0.5)
    with (
        ThreadPoolExecutor(1) as thread,
        TestClient(build_server(detector, thread, limits=limits)) as c,
    ):
        yield c


def test_the_boxes_are_those_of_predict(client, detector):
    answer = client.post("/predict", params={"threshold": 0.5}, content=CELLS).json()
    expected = detector.predict(ROOT / "docs" / "cells.jpg", threshold=0.5)
    assert (answer["width"], answer["height"]) == (640, 480)
    assert [box["class_name"] for box in answer["boxes"]] == expected.labels
    found = [[*box["xyxy"], box["score"]] for box in answer["boxes"]]
    wanted = np.column_stack([expected.boxes, expected.scores])
    np.testing.assert_allclose(found, wanted, atol=0.006)


def test_health_model_and_description(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/model").json()["class_names"] == ["RBC", "WBC", "Platelets"]
    operation = client.get("/openapi.json").json()["paths"]["/predict"]["post"]
    assert set(operation["requestBody"]["content"]) == {"image/*"}


def _png(height, width):
    stream = io.BytesIO()
    PIL.Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("request_parts", "status", "named"),
    [
        ({"content": b""}, 422, "not an image"),
        ({"content": b"%!PS-Adobe-3.0"}, 422, "not an image"),
        ({"content": CELLS[:3000]}, 422, "broken"),
        ({"content": _png(1000, 1000)}, 422, "0.5 million pixels"),
        ({"content": _png(1, 20_000)}, 422, "elongated"),
        ({"content": bytes(300_000)}, 413, "0.2 MB"),
        ({"files": {"image": CELLS}}, 422, "not an image"),
        ({"content": CELLS, "params": {"conf": 0.9}}, 422, "conf"),
        ({"content": CELLS, "params": {"threshold": 2}}, 422, "threshold"),
    ],
)
def test_bad_requests_are_named(client, request_parts, status, named):
    answer = client.post("/predict", **request_parts)
    assert (answer.status_code, named in answer.text) == (status, True), answer.text


def test_the_parts_of_a_body_count_together():
    class Parts:
        async def stream(self):
            for _ in range(4):
                yield bytes(60_000)

    request = Parts()
    assert asyncio.run(read_body(request, Limits(megabytes=0.24))) == bytes(240_000)
    with pytest.raises(HTTPException) as caught:
        asyncio.run(read_body(request, Limits(megabytes=0.2)))
    assert caught.value.status_code == 413


def test_requests_that_wait_form_a_batch_and_errors_stay_in_theirs():
    entered, go_on, sizes = threading.Event(), threading.Event(), []

    def predict(images):
        sizes.append(len(images))
        entered.set()
        go_on.wait(10)
        if any(image == "bad" for image in images):
            raise ValueError("bad")
        return [f"boxes of {image}" for image in images]

    with ThreadPoolExecutor(1) as thread:
        batches = BatchQueue(predict, 4, thread)
        futures = [batches.submit("bad")]
        assert entered.wait(10)
        futures += [batches.submit(number) for number in range(6)]
        go_on.set()
        assert isinstance(futures[0].exception(10), ValueError)
        assert [f.result(10) for f in futures[1:]] == [f"boxes of {i}" for i in range(6)]
    assert sizes == [1, 4, 2]


def test_a_busy_server_refuses(detector):
    with ThreadPoolExecutor(1) as thread:
        client = TestClient(build_server(detector, thread, limits=Limits(waiting=0)))
        answer = client.post("/predict", content=CELLS)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_what_is_no_detector_and_a_taken_port_are_named():
    with pytest.raises(UserError, match="distill/285M"):
        serve("distill/285M", port=0)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:99999"):
        serve(ENTRY, port=99999)


@pytest.mark.slow
def test_the_process_serves_and_ends_on_sigterm():
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--weights", ENTRY, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split(" on ")[1].split(",")[0]
            with urllib.request.urlopen(f"{address}/predict", data=CELLS) as answer:
                assert json.load(answer)["boxes"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
