# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The HTTP server of ``qbheat serve``, which needs FastAPI (the extra ``serve``).

One thread loads and runs the model, because OpenMP starts a pool of workers for each thread that
computes. With several pools there are more workers than cores, and a prediction takes twice as
long. While the model is busy, new requests wait and form the next batch. If the model is idle, a
request is processed at once. Limits on bytes, pixels, time and the number of requests bound the
memory.
"""

import asyncio
import io
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from qbheat_det.api import (
    DetectedBox,
    Detections,
    Detector,
    Image,
    UnreadableImage,
    decode_image,
    load_detector,
)
from qbheat_det.core.environment import VERSION
from qbheat_det.core.errors import UserError

from .uploads import FORMATS

logger = logging.getLogger(__name__)

LOWEST_SCORE = 0.01  # boxes with a lower score are never returned
_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_BODY = {"required": True, "content": {"image/*": _IMAGE}}


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Attributes:
        megabytes: largest size of a request body, in MB.
        megapixels: largest size of an image, in million pixels.
        waiting: largest number of requests that are open at once, waiting or in progress.
            Additional requests are refused with status 503.
        seconds: longest time to receive a request body.
    """

    megabytes: float = 20.0
    megapixels: float = 25.0
    waiting: int = 64
    seconds: float = 30.0


class Box(BaseModel):
    """A box with its corners in pixels of the upright image, its score in [0, 1], and its class."""

    xyxy: tuple[float, float, float, float]
    score: float
    class_name: str
    class_id: int

    @classmethod
    def of(cls, box: DetectedBox) -> "Box":
        """Returns a box whose corners are rounded to 0.01 pixels, and its score to 0.0001."""
        left, top, right, bottom = (round(edge, 2) for edge in box.xyxy)
        return cls(
            xyxy=(left, top, right, bottom),
            score=round(box.score, 4),
            class_name=box.class_name,
            class_id=box.class_id,
        )


class Boxes(BaseModel):
    """The size of an image in pixels, and its boxes in descending order of scores."""

    width: int
    height: int
    boxes: list[Box]


class ModelInfo(BaseModel):
    """The weights and the class names of the served model."""

    weights: str
    class_names: list[str]


class BatchQueue:
    """Queues images, and predicts on batches of them in one thread."""

    def __init__(
        self,
        predict: Callable[[list[Image]], Sequence[Detections]],
        size: int,
        thread: ThreadPoolExecutor,
    ) -> None:
        """``predict`` runs in ``thread``, and gets up to ``size`` RGB images (H, W, 3), uint8."""
        self._predict = predict
        self._size = size
        self._thread = thread
        self._waiting: deque[tuple[Image, Future[Detections]]] = deque()

    def submit(self, image: Image) -> "Future[Detections]":
        """Queues an RGB image (H, W, 3), uint8, and returns the future of its detections."""
        future: Future[Detections] = Future()
        self._waiting.append((image, future))
        self._thread.submit(self._run)
        return future

    def _run(self) -> None:
        """Predicts on the next batch. Each image causes one call, so many calls find no image."""
        batch_size = min(self._size, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(batch_size)]
        if not batch:  # earlier calls processed all images
            return
        try:
            results = self._predict([image for image, _ in batch])
        except Exception as error:  # such as out of memory, after which the server continues
            logger.exception("the model failed")
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)


def build_server(
    detector: Detector,
    thread: ThreadPoolExecutor,
    *,
    batch_size: int = 8,
    limits: Limits | None = None,
) -> FastAPI:
    """Returns an ASGI application that serves a detector and runs it only in ``thread``.

    ``POST /predict`` detects objects in an image, which is the request body.
    ``GET /health`` returns success when the model is loaded. ``GET /model`` returns the weights and
    class names. ``/docs`` documents the API.
    """
    limits = limits or Limits()
    app = FastAPI(title="qbheat_det", version=VERSION, description="Detects objects in images.")
    app.add_exception_handler(RequestValidationError, explain_error)

    def predict(images: list[Image]) -> list[Detections]:
        return detector.predict(images, threshold=LOWEST_SCORE, batch_size=batch_size)

    def decode(body: bytes) -> Image:
        stream = io.BytesIO(body)
        max_pixels = limits.megapixels * 1e6
        image = decode_image(stream, "the image", formats=FORMATS, max_pixels=max_pixels)
        detector.check_image(image, "the image")
        return image

    batches = BatchQueue(predict, batch_size, thread)
    # Decoded images need much memory. While one batch is predicted, the next one is decoded.
    slots = asyncio.Semaphore(2 * batch_size)
    active = 0  # number of open requests

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/model")
    async def model() -> ModelInfo:
        return ModelInfo(weights=detector.weights, class_names=detector.class_names)

    @app.post("/predict", openapi_extra={"requestBody": _BODY})
    async def predict_image(request: Request, threshold: float = Query(0.3, ge=0, le=1)) -> Boxes:
        """Detects objects in a JPEG, PNG, WebP or BMP image."""
        nonlocal active
        unknown = request.query_params.keys() - {"threshold"}
        if unknown:
            raise HTTPException(422, f"no parameter '{min(unknown)}': there is 'threshold'")
        if active >= limits.waiting:
            raise HTTPException(503, "busy: try again later", {"Retry-After": "1"})
        active += 1
        try:
            body = await read_body(request, limits)
            async with slots:
                image = await asyncio.to_thread(decode, body)
                detections = await asyncio.wrap_future(batches.submit(image))
        except UnreadableImage as error:
            hint = "send a JPEG, PNG, WebP or BMP file: curl --data-binary @photo.jpg"
            raise HTTPException(422, f"{error.reason}; {hint}") from error
        finally:
            active -= 1
        height, width = image.shape[:2]
        boxes = [Box.of(box) for box in detections if box.score >= threshold]
        return Boxes(width=width, height=height, boxes=boxes)

    return app


async def explain_error(_: Request, error: Exception) -> JSONResponse:
    """Responds to invalid parameters with status 422 and the first error."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}"}, 422)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Returns the body of a request. Raises an ``HTTPException`` if it exceeds a limit."""

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > round(limits.megabytes * 1e6):
                raise HTTPException(413, f"the image has more than {limits.megabytes:g} MB")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), limits.seconds)
    except asyncio.TimeoutError as error:
        raise HTTPException(408, f"the image took more than {limits.seconds:g} s") from error
    except ClientDisconnect as error:  # nobody will receive the response
        raise HTTPException(400, "the client closed the connection") from error


def serve(
    weights: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str | None = None,
    fast: bool = False,
    batch_size: int = 8,
    limits: Limits | None = None,
) -> None:
    """Serves a detector over HTTP until the process is interrupted.

    Args:
        weights: a model zoo name, a weights file, a run's folder, or an exported ``.onnx`` file.
        host: address to listen on. There is no authentication.
        port: port to listen on. 0 selects a free port.
        device: "cpu" or "cuda"; by default "cuda" if a GPU is available.
        fast: serve the detector in its fastest equivalent form (``Detector.deploy``).
        batch_size: largest number of images that the model processes together.
        limits: limits on requests; by default ``Limits()``.

    Raises:
        UserError: the model is not a detector, or the port is in use.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="model")
    detector = thread.submit(load_and_warm_up, weights, device, fast).result()
    with listen(host, port) as listener:
        app = build_server(detector, thread, batch_size=batch_size, limits=limits)
        bracketed = f"[{host}]" if ":" in host else host  # IPv6 has colons
        address = f"http://{bracketed}:{listener.getsockname()[1]}"
        print(f"serving {detector.weights} on {address}, described at {address}/docs", flush=True)
        # Uvicorn finishes the current requests, and then raises the signal again. Without this
        # handler, the exit code would then be that of a killed process.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30)
        uvicorn.Server(config).run(sockets=[listener])


def load_and_warm_up(weights: str, device: str | None, fast: bool) -> Detector:
    """Loads a detector, and predicts once, because the first prediction is slow."""
    detector = load_detector(weights, device=device, fast=fast)
    black_image = np.zeros((480, 640, 3), np.uint8)
    detector.predict(black_image)
    return detector


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises a ``UserError`` if the port is in use."""
    is_ipv6 = ":" in host
    listener = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # connections wait until the server starts
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({error}): choose another --port"
        ) from error
    return listener
