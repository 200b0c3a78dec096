# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs an ONNX file in onnxruntime or OpenVINO, in a process without PyTorch.

Run as a program with RUNTIME PATH THREADS, it makes forward passes on request; see ``workers.py``.
Its first answer is empty and comes after the first result. Later answers have the ``seconds`` of a
forward pass on the wall clock, its ``cpu_seconds`` of all threads, and the process's peak memory,
``mib``.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workers import open_answers, resident_mib

ONNXRUNTIME = "onnxruntime"
OPENVINO_F32 = "openvino-f32"
OPENVINO = "openvino"
"""OpenVINO in its default precision, which is bfloat16 if the processor supports it."""


def open_file(runtime: str, path: str, threads: int) -> Callable[[], Any]:
    """Opens a file of one input and a fixed size. Returns a function that runs it on noise.

    The noise is uint8 or, for files whose input is pixels in float32, in [0, 1).
    """
    if runtime == ONNXRUNTIME:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Otherwise threads wait actively after a run, and slow the process whose turn is next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        noise = make_noise(given.shape, is_integer=given.type == "tensor(uint8)")
        return lambda: session.run(None, {given.name: noise})

    import openvino

    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if runtime == OPENVINO_F32:
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    (taken,) = compiled.inputs
    noise = make_noise(list(taken.shape), is_integer=taken.element_type == openvino.Type.u8)
    request = compiled.create_infer_request()
    return lambda: request.infer([noise])


def make_noise(shape: list[int], *, is_integer: bool) -> Any:
    """Returns an array of this shape, uint8 or float32, the same in each call."""
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    if is_integer:
        return noise
    return noise.astype(np.float32) / 256


def main() -> None:
    """Opens the file, and answers requests until standard input ends."""
    runtime, path, threads = sys.argv[1:]
    answer = open_answers()
    try:
        forward = open_file(runtime, path, int(threads))
        forward()
        answer({})
        for _ in sys.stdin:
            start = time.perf_counter()
            cpu_start = time.process_time()
            forward()
            cpu_seconds = time.process_time() - cpu_start
            seconds = time.perf_counter() - start
            mib = resident_mib(peak=True)
            answer({"seconds": seconds, "cpu_seconds": cpu_seconds, "mib": mib})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
