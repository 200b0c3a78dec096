# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat serve`` under load, of which a fifth is hostile: answers, latency, memory, the end."""

import contextlib
import http.client
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server needs FastAPI: pip install -e .[serve]")

from qbheat_det.app.server import REST_SECONDS
from tests.data.pictures import make_jpeg_of_scans

from .server_process import CELLS, server_process

NUM_GOOD = 19
NUM_HOSTILE = 5  # of 24 clients
WARM_UP_SECONDS = 10  # with images of every size, for which PyTorch keeps something
QUIET_SECONDS = 20
SECONDS = 60
HEADER = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"


def ask(port, body):
    """Returns the status and the seconds of a request on a new connection."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/predict", body)
        status = connection.getresponse().status
    finally:
        connection.close()
    return status, time.monotonic() - start


def send_scans(port, is_over):
    """Sends images that take as long as possible to decode."""
    body = make_jpeg_of_scans(50)
    while not is_over():
        assert ask(port, body)[0] in (200, 422, 503)


def send_slowly(port, is_over):
    """Opens connections whose headers never end."""
    while not is_over():
        with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
            for byte in HEADER:
                if is_over():
                    return
                time.sleep(0.2)
                try:
                    client.send(bytes([byte]))
                except OSError:  # the server has closed it
                    break


def disconnect(port, is_over):
    """Closes connections in the middle of an upload, and before the answer."""
    while not is_over():
        for body in (
            HEADER + b"\r\n" + CELLS,
            HEADER.replace(b"1000000", b"%d" % len(CELLS)) + b"\r\n" + CELLS,
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(body)
        time.sleep(0.05)


def measure(port, seconds, hostile=()):
    """Returns the statuses and the seconds of the requests of ``NUM_GOOD`` clients."""
    end = time.monotonic() + seconds
    answers = []
    faults = []

    def is_over():
        return time.monotonic() > end

    def ask_often():
        while not is_over():
            answers.append(ask(port, CELLS))

    def run(work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:
            faults.append(error)

    works = [(ask_often,)] * NUM_GOOD + [(work, port, is_over) for work in hostile]
    threads = [threading.Thread(target=run, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    statuses, durations = zip(*answers, strict=True)
    return statuses, np.array(durations)


def memory_of(pid):
    """Returns the memory in bytes of a process and its descendants; shared pages count once."""
    parents = {}
    for task in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            status = (task / "stat").read_text().rpartition(")")[2]
            parents[int(task.name)] = int(status.split()[1])
    family = {pid}
    children = family
    while children:
        children = {child for child, parent in parents.items() if parent in children}
        family |= children
    total = 0
    for member in family:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
            total += 1024 * int(rollup.split("Pss:")[1].split()[0])
    return total


def memory_at_rest(pid):
    """Returns the memory of the server after it has returned what it does not use."""
    time.sleep(REST_SECONDS + 3)
    return memory_of(pid)


@pytest.mark.slow
def test_a_fifth_of_hostile_clients_keeps_nobody_from_an_answer():
    hostile = [send_scans, send_scans, send_slowly, send_slowly, disconnect]
    with server_process() as (process, port):
        measure(port, WARM_UP_SECONDS, hostile)
        _, quiet = measure(port, QUIET_SECONDS)
        before = memory_at_rest(process.pid)
        statuses, mixed = measure(port, SECONDS, hostile)
        after = memory_at_rest(process.pid)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        ended = time.monotonic() - started
    p95_quiet, p95_mixed = (np.percentile(durations, 95) for durations in (quiet, mixed))
    print(
        f"quiet: {len(quiet) / QUIET_SECONDS:.1f} images/s, p95 {p95_quiet:.2f} s; "
        f"mixed: {len(mixed) / SECONDS:.1f} images/s, p95 {p95_mixed:.2f} s; "
        f"memory at rest {before / 2**20:.0f} to {after / 2**20:.0f} MiB; SIGTERM {ended:.1f} s"
    )
    assert set(statuses) == {200}
    assert p95_mixed <= 2 * p95_quiet
    assert after - before < 100 * 2**20  # glibc keeps up to 64 MB
