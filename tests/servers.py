# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Servers in processes of their own, on free ports, for tests."""

import contextlib
import socket
import subprocess
import time
import urllib.request


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def serving(command, path="/", **options):
    """Runs ``command --port N`` until the context ends. Yields its address once ``path`` answers.

    ``options`` are those of ``subprocess.Popen``.
    """
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([*command, "--port", port], **options)
    try:
        for _ in range(600):  # importing takes minutes on a busy machine
            try:
                urllib.request.urlopen(address + path, timeout=5).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(60)
