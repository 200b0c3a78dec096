# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Limits of connections and of the shutdown, which Uvicorn has no settings for.

Uvicorn closes a connection that is idle after a response, but waits without end for the header of a
request, and for a client that does not read its response. The server and the page use these limits.
"""

import asyncio
import os
import socket
import threading
import time
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qbheat_det.core.errors import UserError

MAX_CONNECTIONS = 256  # below the usual limit of 1024 open files
HEADER_SECONDS = 10.0
"""Longest time until the header of a request is complete, and to take a response."""
SHUTDOWN_SECONDS = 7
"""Longest time for current requests after SIGTERM. One second later the process ends anyway."""
_BACKLOG = 128  # connections that the system accepts before the server does


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit for headers and responses, and a limit of connections.

    A connection above the limit replaces the one that has had no request in progress for the
    longest time, so that idle clients cannot keep others out.
    """

    _idle_since = 0.0  # time of the event loop

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            idle = []
            for other in self.connections:
                if isinstance(other, LimitedProtocol) and other is not self and other._is_idle:
                    idle.append(other)
            # A client that has just connected shall have the time to send its request.
            replaced = min(idle, key=lambda other: other._idle_since, default=self)
            self.connections.discard(replaced)  # the transport does so only later
            replaced.transport.abort()
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_header()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def _await_header(self) -> None:
        """Starts the time limit of the next header."""
        if self._timer is not None:
            self._timer.cancel()
        self._idle_since = self.loop.time()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._is_idle:
            self.transport.abort()


class Server(uvicorn.Server):
    """A server whose process ends within ten seconds after a signal, even if a request hangs."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        timer = threading.Timer(SHUTDOWN_SECONDS + 1, os._exit, [0])
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


def run_server(app: Any, listener: socket.socket) -> None:
    """Serves an ASGI application on a listening socket until a signal.

    Uvicorn finishes the current requests, and then raises the signal again.
    """
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        loop="asyncio",  # decided here, as LimitedProtocol is tested with it
        log_level="error",  # a warning for each bad request would fill the disk
        backlog=_BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    Server(config).run(sockets=[listener])


class LimitedBodies:
    """ASGI middleware that disconnects a client whose request body takes too long."""

    def __init__(self, app: Any, seconds: float) -> None:
        """``seconds`` is the longest time to receive the body of a request."""
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        end = time.monotonic() + self._seconds
        is_complete = False

        async def receive_in_time() -> Any:
            nonlocal is_complete
            if is_complete:  # the next message comes when the client disconnects
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                return {"type": "http.disconnect"}
            is_complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time, send)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises a ``UserError`` if ``host`` or ``port`` is unusable."""
    if not host:  # the system would listen on all addresses
        raise UserError("the host is empty: choose --host 127.0.0.1, or 0.0.0.0 for all addresses")
    is_ipv6 = ":" in host
    listener = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # connections wait until the server starts
    except (OSError, OverflowError, TypeError) as error:  # TypeError for a host with odd characters
        listener.close()
        address = f"{host}:{port}"
        raise UserError(
            f"cannot listen on {address!a} ({error}): choose another --host or --port"
        ) from error
    return listener
