# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fingerprints of image files, which identify copies that were moved or renamed."""

import hashlib
import os
from collections.abc import Sequence

from qbheat_det.data.images import run_threads

# A large file is read in evenly spaced blocks.
_NUM_BLOCKS = 16
_BLOCK_SIZE = 4096  # bytes


def fingerprint_images(paths: Sequence[str]) -> dict[str, str]:
    """Maps each path to the fingerprint of the file. Files that cannot be read are left out.

    A fingerprint is a hash of the file's size and content. Of large files, only 64 KiB are hashed.
    """
    fingerprints = run_threads(_fingerprint, paths, "Reading fingerprints")
    return {
        path: fingerprint
        for path, fingerprint in zip(paths, fingerprints, strict=True)
        if fingerprint is not None
    }


def _fingerprint(path: str) -> str | None:
    """Returns the fingerprint of a file, or None if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest = hashlib.blake2b(str(size).encode(), digest_size=12)
            if size <= _NUM_BLOCKS * _BLOCK_SIZE:
                digest.update(stream.read())
            else:
                for number in range(_NUM_BLOCKS):
                    stream.seek(number * (size - _BLOCK_SIZE) // (_NUM_BLOCKS - 1))
                    digest.update(stream.read(_BLOCK_SIZE))
    except OSError:
        return None
    return digest.hexdigest()
