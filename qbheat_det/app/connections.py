# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Limits of connections and of the shutdown, which Uvicorn has no settings for.

Uvicorn closes a connection that is idle after a response, but waits without end for the header of a
request, and for a client that does not read its response.
"""

import asyncio
import os
import threading
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256  # below the usual limit of 1024 open files
HEADER_SECONDS = 10.0
"""Longest time until the header of a request is complete, and to take a response."""
SHUTDOWN_SECONDS = 7
"""Longest time for current requests after SIGTERM. One second later the process ends anyway."""


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit for headers and responses, and a limit of connections.

    A connection above the limit replaces one that has no request in progress, so that idle clients
    cannot keep others out.
    """

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            others = (other for other in self.connections if other is not self)
            idle = (other for other in others if isinstance(other, LimitedProtocol))
            replaced = next((other for other in idle if other._is_idle), self)
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
