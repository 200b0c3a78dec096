# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Seconds from a built detector to its first result, including compiling for one image size."""

import os
import tempfile
from unittest.mock import patch

import benchmarks.forms as forms
from benchmarks.detectors import HEIGHT, WIDTH
from benchmarks.timing import Result
from benchmarks.workers import started

_FOLDERS = ("QBHEAT_CACHE", "TORCHINDUCTOR_CACHE_DIR")  # compiled code; empty at first


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Deploys 285M + 211 and compiles DETR-R50, each once and in its own process."""
    height, width = (HEIGHT // 4, WIDTH // 4) if quick else (HEIGHT, WIDTH)
    numbers = [str(number) for number in (height, width, threads, int(quick))]
    seconds = []
    for contender in (("285m_211", forms.DEPLOYED), ("detr_r50", forms.COMPILED)):
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: f"{folder}/{name}" for name in _FOLDERS}
            command = [forms.__file__, *contender, *numbers]
            with patch.dict(os.environ, caches), started(command) as (_, ready):
                seconds.append(float(ready["first"]))
    name = "deployment/seconds_to_first_image_of_a_size"
    return [Result.lower_is_better(name, *seconds, "s")]
