# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Copies files of a run to or from a URL with fsspec. Runs as a script in a separate process.

Therefore training does not wait for a transfer, and obstore's threads, which do not survive a fork,
are not in the process that forks data loaders. The script imports nothing from the package. The
file systems of fsspec retry failed requests.
"""

import os
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec

TAG = "last_checkpoint"
_PERIODIC = re.compile(r"model_(\d{7,})\.pth")


def open_address(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path of the folder in that file system."""
    try:
        from obstore.fsspec import register

        register(["s3", "gs", "az"])
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            os.environ["AWS_ALLOW_HTTP"] = "true"
    except ImportError:  # fsspec will name the missing package, such as s3fs
        pass
    files, root = fsspec.core.url_to_fs(address)
    root = root.rstrip("/")
    files.makedirs(root, exist_ok=True)
    return files, root


def send(folder: Path, address: str, kept: int, names: list[str]) -> None:
    """Sends files in the given order; ``last_checkpoint`` must be the last one.

    Then removes all periodic checkpoints except the ``kept`` newest ones; 0 keeps all.
    """
    files, root = open_address(address)
    for name in names:
        files.put_file(str(folder / name), f"{root}/{name}")
    if not kept or TAG not in names:
        return
    there = [os.path.basename(path) for path in files.ls(root, detail=False)]
    periodic = sorted(filter(_PERIODIC.fullmatch, there), key=_number)
    sent = min(map(_number, names))
    past = [name for name in periodic if _number(name) <= sent]
    for name in {*past[:-kept], *(name for name in periodic if _number(name) > sent)}:
        files.rm_file(f"{root}/{name}")


def fetch(folder: Path, address: str, names: list[str]) -> None:
    """Checks that the URL is writable, and fetches the last checkpoint and the named files.

    On a single machine, a local checkpoint that is newer than the remote one is kept. With several
    machines, all of them start from the remote checkpoint.
    """
    files, root = open_address(address)
    probe = f"{root}/.{uuid.uuid4().hex}"  # unique, as other machines write probes too
    files.pipe_file(probe, b"")
    files.rm_file(probe)
    if not files.exists(f"{root}/{TAG}"):
        return
    last = os.path.basename(files.cat_file(f"{root}/{TAG}").decode().strip())
    tag = folder / TAG
    own = tag.read_text().strip() if tag.is_file() else ""
    is_later = _number(own) > _number(last) and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    if own and (folder / own).is_file() and (own == last or is_later):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in (last, *names, TAG):
        if not files.exists(f"{root}/{name}"):
            continue
        partial = folder / f".{name}.{uuid.uuid4().hex[:8]}.incomplete"
        try:
            files.get_file(f"{root}/{name}", str(partial))
            os.replace(partial, folder / name)
        finally:
            partial.unlink(missing_ok=True)


def _number(name: str) -> int:
    found = _PERIODIC.fullmatch(name)
    return int(found[1]) if found else 10**9  # model_final.pth


def _run(action: str, folder: str, address: str, *words: str) -> str:
    """Runs a transfer and returns its error message; "" if it succeeded."""
    try:
        if action == "send":
            send(Path(folder), address, int(words[0]), list(words[1:]))
        else:
            fetch(Path(folder), address, list(words))
    except OSError as error:
        where = f": '{error.filename}'" if error.filename else ""
        return f"{error.strerror or error}{where}"
    except Exception as error:  # the type depends on the file system
        # obstore prints structs after the first line.
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return ""


if __name__ == "__main__":
    reason = _run(*sys.argv[1:])
    print(reason, flush=True)
    os._exit(bool(reason))  # skips Python's shutdown, in which obstore's threads abort
