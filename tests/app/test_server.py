# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat serve``: its answers, limits and batches, and the process."""

import asyncio
import contextlib
import io
import json
import signal
import socket
import threading
import time
import urllib.error
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

from qbheat_det.app import server
from qbheat_det.app.connections import listen
from qbheat_det.app.forms import BadForm, read_file
from qbheat_det.app.server import BatchQueue, Budget, Limits, build_server, read_body, serve
from qbheat_det.core.errors import UserError
from tests.data.pictures import make_jpeg_of_scans

from .server_process import CELLS, ENTRY, ROOT, server_process


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


def test_freed_memory_is_returned_when_no_request_comes(client, monkeypatch):
    returned = threading.Event()
    monkeypatch.setattr(server, "return_freed_memory", returned.set)
    monkeypatch.setattr(server, "REST_SECONDS", 0.05)
    assert client.post("/predict", content=CELLS).status_code == 200
    assert returned.wait(30)


def test_a_form_is_answered_like_its_image(client):
    expected = client.post("/predict", content=CELLS).json()
    fields = {"note": "a field before the file"}
    assert client.post("/predict", files={"file": CELLS}, data=fields).json() == expected
    assert len(expected["boxes"]) > 5


def make_form(*parts, end=b"--"):
    """Returns a form of (header, content) parts with the boundary "B"."""
    body = b"".join(b"--B\r\n" + head + b"\r\n\r\n" + content + b"\r\n" for head, content in parts)
    return bytearray(body + b"--B" + end)


FILE = b'Content-Disposition: form-data; name="file"; filename="a.jpg"'
FIELD = b'Content-Disposition: form-data; name="filename"'


@pytest.mark.parametrize(
    "content", [b"", b"\r\n", b"\r\n--", b"x--B", b"\r\n\r\n--A", bytes(range(256))]
)
def test_the_file_of_a_form_is_read_byte_by_byte(content):
    content_type = 'multipart/form-data; boundary="B"'
    for parts in ([(FILE, content)], [(FIELD, b"x"), (FILE, content), (FIELD, b"")]):
        assert read_file(make_form(*parts), content_type) == content
        assert (
            read_file(b"preamble\r\n" + make_form(*parts, end=b"--\r\n"), content_type) == content
        )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (make_form((FIELD, b"x")), "0 files"),
        (make_form((FILE, b"x"), (FILE, b"y")), "2 files"),
        (make_form((FILE, b"x"))[:-5], "ends early"),
        (make_form((b"A" * 10_000, b"x")), "no header"),
        (bytearray(b"no form"), "boundary"),
        (bytearray(), "boundary"),
    ],
)
def test_bad_forms_are_named(body, named):
    with pytest.raises(BadForm, match=named):
        read_file(body, "multipart/form-data; boundary=B")
    with pytest.raises(BadForm, match="no boundary"):
        read_file(body, "multipart/form-data")


_FORM = "multipart/form-data; "


@pytest.mark.parametrize(
    ("content_type", "head"),
    [
        (_FORM + 'a="' + ";" * 60_000 + "; boundary=B", FILE),
        (_FORM + 'a=";' + '\\";' * 20_000 + "; boundary=B", FILE),
        (_FORM + "boundary*" + "9" * 5000 + "=B", FILE),
        (_FORM + "boundary*=idna''%ff", FILE),
        (_FORM + "boundary*=\0''zz", FILE),
        (_FORM + "boundary=B", b'Content-Disposition: form-data; filename="' + b";" * 8000),
        (_FORM + "boundary=B", b"Content-Disposition: form-data; filename*" + b"9" * 5000 + b"=x"),
        (_FORM + "boundary=B", b"Content-Disposition:" + b"; filename*" * 700),
    ],
)
def test_a_crafted_form_takes_no_time_and_raises_no_other_error(content_type, head):
    start = time.process_time()
    with contextlib.suppress(BadForm):
        read_file(make_form(*[(head, b"x")] * 20), content_type)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("head", "is_file"),
    [
        (b"Content-Disposition: form-data; name=file; filename=a.jpg", True),
        (b'content-type: image/png\r\ncontent-disposition: form-data;\r\n filename="a"', True),
        (b"Content-Disposition: form-data; filename*=UTF-8''%e2%82%ac.jpg", True),
        (b'Content-Disposition: form-data; name="file"; filename="a\\"; b.jpg"', True),
        (b'Content-Disposition: form-data; name="file"; filename=""', True),
        (b'Content-Disposition: form-data; name="a; filename=b"', False),
        (b"Content-Disposition: form-data; name=filename", False),
    ],
)
def test_a_part_with_a_file_name_is_a_file(head, is_file):
    body = make_form((head, b"content"), end=b"--")
    if is_file:
        assert read_file(body, "multipart/form-data;boundary=B") == b"content"
    else:
        with pytest.raises(BadForm, match="0 files"):
            read_file(body, "Multipart/Form-Data; Boundary=B; charset=utf-8")


@pytest.mark.parametrize("host", ["\0", "ä" * 70, "no such host"])
def test_an_unusable_host_is_named(host):
    with pytest.raises(UserError, match="--host"):
        listen(host, 0)


def test_health_model_and_description(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/model").json()["class_names"] == ["RBC", "WBC", "Platelets"]
    operation = client.get("/openapi.json").json()["paths"]["/predict"]["post"]
    assert set(operation["requestBody"]["content"]) == {"image/*", "multipart/form-data"}


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
        ({"files": {"file": b"text"}}, 422, "not an image"),
        ({"files": {"file": bytes(300_000)}}, 413, "0.2 MB"),
        ({"files": [("a", CELLS[:9]), ("b", CELLS[:9])]}, 422, "2 files"),
        ({"files": {"file": (None, "text")}}, 422, "0 files"),
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

    def read(megabytes, total):
        bodies, body = Budget(total), bytearray()
        asyncio.run(read_body(Parts(), Limits(megabytes=megabytes), bodies, body))
        assert not bodies.take(total - len(body) + 1)
        return body

    assert read(0.24, 1e6) == bytes(240_000)
    for megabytes, total, status in ((0.2, 1e6, 413), (0.24, 200_000, 503)):
        with pytest.raises(HTTPException) as caught:
            read(megabytes, total)
        assert caught.value.status_code == status


def test_a_budget_waits_until_others_give_back():
    async def run():
        budget = Budget(10)
        assert budget.take(8)
        waiter = asyncio.create_task(budget.wait(5))
        await asyncio.sleep(0.01)
        assert not waiter.done()
        await budget.give_back(8)
        await waiter
        return budget.take(6), budget.take(5)

    assert asyncio.run(run()) == (False, True)


def test_many_scans_are_refused_and_slow_decoding_ends(detector):
    with (
        ThreadPoolExecutor(1) as thread,
        TestClient(build_server(detector, thread, limits=Limits(decoding_seconds=0.5))) as c,
    ):
        refused = c.post("/predict", content=make_jpeg_of_scans(51))
        slow = c.post("/predict", content=make_jpeg_of_scans(50))
        assert c.post("/predict", content=CELLS).status_code == 200
    assert (refused.status_code, "more than 50 scans" in refused.text) == (422, True)
    assert (slow.status_code, "more than 0.5 s" in slow.text) == (422, True)


def test_health_tells_when_no_prediction_is_answered(detector, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(server, "STALL_SECONDS", 0.2)
    with (
        ThreadPoolExecutor(1) as thread,
        ThreadPoolExecutor(1) as other,
        TestClient(build_server(detector, thread)) as c,
    ):
        thread.submit(go_on.wait, 60)
        answer = other.submit(c.post, "/predict", content=CELLS)
        try:
            for _ in range(300):
                health = c.get("/health")
                if health.status_code == 503:
                    break
                time.sleep(0.1)
            assert "no request was answered" in health.text
        finally:
            go_on.set()
        assert answer.result(60).status_code == 200
        assert c.get("/health").json() == {"status": "ok"}


def test_health_tells_when_predictions_fail(detector, monkeypatch):
    def fail(images, **_):
        raise RuntimeError("out of memory")

    with (
        ThreadPoolExecutor(1) as thread,
        TestClient(build_server(detector, thread), raise_server_exceptions=False) as c,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(detector, "predict", fail)
            for _ in range(3):
                assert c.post("/predict", content=CELLS).status_code == 500
        assert "3 predictions failed" in c.get("/health").text
        assert c.post("/predict", content=CELLS).status_code == 200
        assert c.get("/health").status_code == 200


def test_the_description_needs_no_other_host(client):
    page = client.get("/docs")
    assert "POST /predict" in page.text
    assert "://" not in page.text.replace("http://HOST:PORT", "")


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
    with pytest.raises(UserError, match="host is empty"):
        serve(ENTRY, host="", port=0)


def _ask(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/predict", data=CELLS) as answer:
        return json.load(answer)["boxes"]


@pytest.mark.slow
def test_the_process_serves_and_ends_on_sigterm():
    with server_process() as (process, port):
        assert _ask(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.slow
def test_silent_and_slow_clients_neither_keep_others_out_nor_delay_the_end():
    header = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
    with server_process() as (process, port), contextlib.ExitStack() as stack:

        def connect(content):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(content)
            return client

        silent = [connect(content) for content in (b"", header) for _ in range(300)]
        assert _ask(port)
        for client in silent:
            client.settimeout(30)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""  # closed after ten seconds
        for _ in range(200):
            connect(b"no request\r\n\r\n")
        uploads = [connect(header + b"\r\n" + bytes(1000)) for _ in range(3)]
        assert _ask(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert len(uploads) == 3
        assert len(process.stderr.read()) < 1000


@pytest.mark.slow
def test_many_large_requests_at_once_need_bounded_memory():
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (2400, 2500, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(stream, "PNG", compress_level=0)  # 18 MB
    content = stream.getvalue()

    def ask(port):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/predict", data=content).close()
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:  # a refusal closes the connection while the client sends
            return 503
        return 200

    with server_process() as (process, port), ThreadPoolExecutor(80) as clients:
        ask(port)
        quiet = _memory(process.pid)
        codes = list(clients.map(ask, [port] * 80))
        assert {*codes} <= {200, 503}
        assert codes.count(200) >= 1
        assert _memory(process.pid) - quiet < 2**30
        assert _ask(port)


def _memory(pid):
    """Returns the peak of a process's memory in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
