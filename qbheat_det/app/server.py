# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The HTTP server of ``qbheat serve``, which needs FastAPI (the extra ``serve``).

One thread loads and runs the model, because OpenMP starts a pool of workers for each thread that
computes. With several pools there are more workers than cores, and a prediction takes twice as
long. While the model is busy, new requests wait and form the next batch. If the model is idle, a
request is processed at once. Images are decoded in processes of their own, which end after some
seconds. Limits on bytes, pixels, time and the number of requests bound the memory.
"""

import asyncio
import contextlib
import html
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse

from qbheat_det.api import (
    DecodingLimits,
    DecodingProcesses,
    DetectedBox,
    Detections,
    Detector,
    Image,
    UnreadableImage,
    count_decoders,
    end_if_imported_by_child,
    load_detector,
)
from qbheat_det.core.environment import VERSION, return_freed_memory

from .connections import listen, run_server
from .forms import BadForm, is_form, read_file
from .uploads import FORMATS

logger = logging.getLogger(__name__)

LOWEST_SCORE = 0.01  # boxes with a lower score are never returned
STALL_SECONDS = 30.0  # without an answer to any open request, after which /health says so
MAX_FAILURES = 3  # failed batches in succession, after which /health says so
BODIES = 10  # the bodies of all requests together have at most this many times ``megabytes``
REST_SECONDS = 5.0  # without a request, after which freed memory is returned to the system
USUAL_SCANS = 12  # of a JPEG; those with more keep at most all decoders but one busy
IMAGES = 4  # the decoded images together have at most this many times ``megapixels``
_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_FILE = {"schema": {"type": "object", "properties": {"file": _IMAGE["schema"]}}}
_BODY = {"required": True, "content": {"image/*": _IMAGE, "multipart/form-data": _FILE}}


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Attributes:
        megabytes: largest size of a request body, in MB.
        megapixels: largest size of an image, in million pixels.
        waiting: largest number of requests that are open at once, waiting or in progress.
            Additional requests are refused with status 503.
        seconds: longest time to receive a request body.
        decoding_seconds: longest time to decode an image.
    """

    megabytes: float = 20.0
    megapixels: float = 25.0
    waiting: int = 64
    seconds: float = 30.0
    decoding_seconds: float = 10.0


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
        """``predict`` runs in ``thread``, and gets up to ``size`` RGB images (H, W, 3), uint8.

        The attribute ``num_failures`` is the number of the last batches that all failed.
        """
        self.num_failures = 0
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
            self.num_failures += 1
            if self.num_failures <= MAX_FAILURES:  # so that the log stays short
                logger.exception("the model failed")
            for _, future in batch:
                future.set_exception(error)
        else:
            self.num_failures = 0
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)


class Budget:
    """An amount, such as of pixels, that requests share."""

    def __init__(self, total: float) -> None:
        self._total = total
        self._held = 0.0
        self._released = asyncio.Condition()

    def take(self, amount: float) -> bool:
        """Takes an amount, and returns whether there was enough."""
        if self._held + amount > self._total:
            return False
        self._held += amount
        return True

    async def wait(self, amount: float) -> None:
        """Takes an amount as soon as there is enough."""
        async with self._released:
            await self._released.wait_for(lambda: self.take(amount))

    async def give_back(self, amount: float) -> None:
        self._held -= amount
        async with self._released:
            self._released.notify_all()


class Progress:
    """The open requests, and the time since one of them was last answered."""

    def __init__(self) -> None:
        self.num_open = 0
        self._last = 0.0

    def open(self) -> None:
        if self.num_open == 0:
            self._last = time.monotonic()
        self.num_open += 1

    def close(self) -> None:
        self.num_open -= 1
        self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds without an answer, 0 if no request is open."""
        return time.monotonic() - self._last if self.num_open else 0.0


class PredictionService:
    """Answers requests with the boxes of a detector, within limits."""

    def __init__(
        self,
        detector: Detector,
        thread: ThreadPoolExecutor,
        batch_size: int,
        limits: Limits,
    ) -> None:
        """``build_server`` describes the arguments."""
        self._detector = detector
        self._thread = thread
        self._limits = limits
        self._batches = BatchQueue(self._predict_batch, batch_size, thread)
        self._decoders = DecodingProcesses(count_decoders())
        self._decoding_limits = DecodingLimits(
            FORMATS, limits.megapixels * 1e6, limits.decoding_seconds
        )
        self._idle_decoders = asyncio.Semaphore(self._decoders.count)
        self._many_scans = asyncio.Semaphore(max(1, self._decoders.count - 1))
        self._bodies = Budget(BODIES * limits.megabytes * 1e6)
        self._pixels = Budget(IMAGES * limits.megapixels * 1e6)
        self._waiting = Progress()  # requests whose body is complete
        self._num_open = 0
        self._rest: asyncio.TimerHandle | None = None

    def check_health(self) -> None:
        """Raises an ``HTTPException`` if predictions are not answered."""
        seconds = self._waiting.seconds
        if seconds > STALL_SECONDS:
            raise HTTPException(503, f"no request was answered for {seconds:.0f} s")
        num_failures = self._batches.num_failures
        if num_failures >= MAX_FAILURES:
            raise HTTPException(503, f"the last {num_failures} predictions failed")

    async def predict(self, request: Request) -> tuple[int, int, Detections]:
        """Returns the height, the width and the detections of the image that a request sends.

        Raises an ``HTTPException`` if there is none.
        """
        if self._num_open >= self._limits.waiting:
            raise _busy()
        self._num_open += 1
        body = bytearray()
        try:
            await read_body(request, self._limits, self._bodies, body)
            self._waiting.open()
            try:
                return await self._predict(request, take_image(request, body))
            finally:
                self._waiting.close()
        except UnreadableImage as error:
            hint = "send a JPEG, PNG, WebP or BMP file: curl -F file=@photo.jpg"
            raise HTTPException(422, f"{error.reason}; {hint}") from error
        except ClientDisconnect as error:  # nobody will receive the response
            raise HTTPException(400, "the client closed the connection") from error
        except asyncio.CancelledError as error:  # the time after a signal is over
            raise HTTPException(503, "the server stops") from error
        finally:
            self._num_open -= 1
            self._rest_later()
            await self._bodies.give_back(len(body))

    async def _predict(self, request: Request, body: bytearray) -> tuple[int, int, Detections]:
        """Decodes the content of an image file, and waits for its detections."""
        # Each scan of a JPEG takes as long as an image. One decoder stays free for usual files.
        has_many_scans = body.count(b"\xff\xda") > USUAL_SCANS
        lane: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if has_many_scans:
            lane = self._many_scans
        async with lane, self._idle_decoders:
            if await request.is_disconnected():
                raise ClientDisconnect()
            image = await asyncio.to_thread(
                self._decoders.decode, body, "the image", self._decoding_limits
            )
            height, width = image.shape[:2]
            # The decoder stays busy until there is memory, so that no other image is decoded.
            await self._pixels.wait(height * width)
        try:
            self._detector.check_image(image, "the image")
            return height, width, await asyncio.wrap_future(self._batches.submit(image))
        finally:
            await self._pixels.give_back(height * width)

    def _rest_later(self) -> None:
        """Returns freed memory to the system if no request comes for some seconds."""
        if self._rest is not None:
            self._rest.cancel()
        self._rest = asyncio.get_running_loop().call_later(REST_SECONDS, self._return_memory)

    def _return_memory(self) -> None:
        if self._num_open == 0:  # otherwise, the end of the open requests starts the time again
            self._thread.submit(return_freed_memory)

    def _predict_batch(self, images: list[Image]) -> list[Detections]:
        return self._detector.predict(images, threshold=LOWEST_SCORE, batch_size=len(images))


def build_server(
    detector: Detector,
    thread: ThreadPoolExecutor,
    *,
    batch_size: int = 8,
    limits: Limits | None = None,
) -> FastAPI:
    """Returns an ASGI application that serves a detector and runs it only in ``thread``.

    ``POST /predict`` detects objects in an image, which is the request body.
    ``GET /health`` tells whether predictions are answered. ``GET /model`` returns the weights and
    class names. ``/docs`` documents the API.
    """
    service = PredictionService(detector, thread, batch_size, limits or Limits())
    # FastAPI's pages for ``/docs`` would load scripts from other hosts.
    app = FastAPI(
        title="qbheat_det",
        version=VERSION,
        description="Detects objects in images.",
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(RequestValidationError, explain_error)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Tells whether predictions are answered."""
        service.check_health()
        return {"status": "ok"}

    @app.get("/model")
    async def model() -> ModelInfo:
        """Returns the weights and the class names."""
        return ModelInfo(weights=detector.weights, class_names=detector.class_names)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(describe(app.openapi()))

    @app.post("/predict", openapi_extra={"requestBody": _BODY})
    async def predict_image(request: Request, threshold: float = Query(0.3, ge=0, le=1)) -> Boxes:
        """Detects objects in a JPEG, PNG, WebP or BMP image, or in the file of a form."""
        unknown = request.query_params.keys() - {"threshold"}
        if unknown:
            raise HTTPException(422, f"no parameter '{min(unknown)}': there is 'threshold'")
        height, width, detections = await service.predict(request)
        boxes = [Box.of(box) for box in detections if box.score >= threshold]
        return Boxes(width=width, height=height, boxes=boxes)

    return app


def describe(schema: dict[str, Any]) -> str:
    """Returns an HTML page with the requests of an OpenAPI schema."""
    rows = []
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            names = [parameter["name"] for parameter in operation.get("parameters", [])]
            cells = [f"{method.upper()} {path}", ", ".join(names), operation.get("description", "")]
            rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    title = html.escape(f"{schema['info']['title']} {schema['info']['version']}")
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        f"<h1>{title}</h1><p>{html.escape(schema['info']['description'])}</p>"
        "<pre>curl -F file=@photo.jpg 'http://HOST:PORT/predict?threshold=0.5'</pre>"
        f"<table border='1' cellpadding='6'><tr><th>request<th>parameters<th>answer</tr>{table}"
        "</table><p>The full description is <a href='openapi.json'>openapi.json</a>.</p></html>"
    )


def _busy() -> HTTPException:
    return HTTPException(503, "busy: try again later", {"Retry-After": "1"})


async def explain_error(_: Request, error: Exception) -> JSONResponse:
    """Responds to invalid parameters with status 422 and the first error."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}"}, 422)


def take_image(request: Request, body: bytearray) -> bytearray:
    """Returns the image in a request body: the body itself, or the file in a form.

    Raises an ``HTTPException`` if a form does not have exactly one file.
    """
    content_type = request.headers.get("content-type", "")
    if not is_form(content_type):
        return body
    try:
        return read_file(body, content_type)
    except BadForm as error:
        raise HTTPException(422, f"{error}: curl -F file=@photo.jpg") from error


async def read_body(request: Request, limits: Limits, bodies: Budget, body: bytearray) -> None:
    """Appends the body of a request to ``body``, whose bytes are taken from ``bodies``.

    Raises an ``HTTPException`` if it exceeds a limit.
    """

    async def read() -> None:
        async for part in request.stream():
            if len(body) + len(part) > round(limits.megabytes * 1e6):
                raise HTTPException(413, f"the image has more than {limits.megabytes:g} MB")
            if not bodies.take(len(part)):
                raise _busy()
            body.extend(part)

    try:
        await asyncio.wait_for(read(), limits.seconds)
    except asyncio.TimeoutError as error:
        raise HTTPException(408, f"the image took more than {limits.seconds:g} s") from error


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
        UserError: the model is not a detector, the port is in use, or a script calls this function
            outside of ``if __name__ == "__main__":``.
    """
    end_if_imported_by_child()
    thread = ThreadPoolExecutor(1, thread_name_prefix="model")
    detector = thread.submit(load_and_warm_up, weights, device, fast).result()
    with listen(host, port) as listener:
        app = build_server(detector, thread, batch_size=batch_size, limits=limits)
        bracketed = f"[{host}]" if ":" in host else host  # IPv6 has colons
        address = f"http://{bracketed}:{listener.getsockname()[1]}"
        print(f"serving {detector.weights} on {address}, described at {address}/docs", flush=True)
        # Uvicorn finishes the current requests, and then raises the signal again. Without this
        # handler, the exit code would then be that of a killed process. A normal exit would wait
        # for the threads.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        run_server(app, listener)


def load_and_warm_up(weights: str, device: str | None, fast: bool) -> Detector:
    """Loads a detector, and predicts once, because the first prediction is slow."""
    detector = load_detector(weights, device=device, fast=fast)
    black_image = np.zeros((480, 640, 3), np.uint8)
    detector.predict(black_image)
    return detector
