# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A headless Chromium over the DevTools protocol, with the standard library alone.

Commands and answers are JSON texts, each ended by a zero byte, on two pipes: what
``--remote-debugging-pipe`` takes for file descriptors 3 and 4. No port is opened.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which(
    "google-chrome"
)  # fmt: skip
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio"),
)


class Browser:
    """One page in a browser; ``faults`` collects what a person would see red in the console."""

    def __init__(self, profile: Path, *, seconds: float = 60) -> None:
        assert CHROMIUM is not None
        self._seconds = seconds
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The shell moves the pipes to 3 and 4 and becomes the browser.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [event for event in self.events if _is_fault(event)]

    @property
    def requests(self) -> list[str]:
        """Addresses of all that the page asked for, those of pictures inside it left out."""
        asked = (
            str(event["params"]["request"]["url"])
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        )
        return [address for address in asked if not address.startswith("data:")]

    def open(self, page: Path, *, width: int, height: int, scheme: str) -> None:
        """Opens a file at a size in CSS pixels, on a "light" or "dark" screen, and waits for it."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Returns what a JavaScript expression comes to, a promise awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """Returns what is on the screen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        """Returns the next message; events are kept as well."""
        end = monotonic() + self._seconds
        while b"\0" not in self._buffer:
            ready = select.select([self._read], [], [], max(0.0, end - monotonic()))[0]
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, f"the browser said nothing for {self._seconds} s, or has ended"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


def _is_fault(event: dict[str, Any]) -> bool:
    method, params = event["method"], event.get("params", {})
    if method == "Runtime.consoleAPICalled":
        return params["type"] in ("error", "warning", "assert")
    if method == "Log.entryAdded":
        return params["entry"]["level"] in ("error", "warning")
    return method in ("Runtime.exceptionThrown", "Network.loadingFailed")
