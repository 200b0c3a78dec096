# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws docs/suspects.png and docs/app.png: the page of suspects and the app, in a browser.

usage: python -m docs.draw_pages SUSPECTS

SUSPECTS is a folder that ``qbheat inspect --labels --output SUSPECTS`` has written. It needs the
extra ``app``, ``pip install playwright`` and Chromium.
"""

import io
import shutil
import sys
from pathlib import Path

import PIL.Image
from playwright.sync_api import Page, sync_playwright

from tests.servers import serving

DOCS = Path(__file__).parent
_DETECTOR = "retinanet/285M_bccd"
_STEPS = 3  # of the slider, from 0.3 to 0.45
# Keeps the first suspect of each kind.
_KEEP_KINDS = """() => {
  const seen = new Set();
  document.querySelectorAll("li").forEach((row, index) => {
    const kind = content.suspects[index].kind;
    if (seen.has(kind)) row.remove();
    seen.add(kind);
  });
}"""
_MINUTES = 10 * 60_000  # milliseconds that a step may take on a busy machine


def draw_suspects(page: Page, folder: Path) -> None:
    """Draws the buttons and the most probable suspect of each kind."""
    page.set_viewport_size({"width": 1240, "height": 900})
    page.goto((folder / "suspects.html").resolve().as_uri())
    page.evaluate(_KEEP_KINDS)
    page.keyboard.press("a")
    top = page.locator("header").bounding_box()
    bottom = page.locator("li").nth(3).bounding_box()
    assert top is not None
    assert bottom is not None
    end = bottom["y"] + bottom["height"] + 8
    clip = {"x": 0, "y": top["y"] - 8, "width": 1240, "height": end - top["y"] + 8}
    write(page.screenshot(clip=clip), "suspects.png")


def draw_app(page: Page, folder: Path) -> None:
    """Draws the app with the boxes in docs/cells.jpg."""
    page.set_viewport_size({"width": 1100, "height": 762})
    command = [sys.executable, str(DOCS.parent / "tools" / "app.py")]
    command += ["--weights", _DETECTOR, "--suspects", str(folder)]
    with serving(command) as address:
        page.goto(address)
        page.locator("input[type=file]").first.set_input_files(str(DOCS / "cells.jpg"))
        page.get_by_text("cells.jpg").first.wait_for()
        page.get_by_role("button", name="Find objects").click()
        page.get_by_text("1 of 1 files predicted").wait_for()
        slider = page.get_by_role("slider")
        slider.focus()
        for _ in range(_STEPS):
            slider.press("ArrowRight")
        page.mouse.wheel(0, -2000)
        page.wait_for_timeout(10_000)  # the pictures are drawn again
        write(page.screenshot(), "app.png")


def write(png: bytes, name: str) -> None:
    """Writes a screenshot with at most 256 colors, which makes it small."""
    PIL.Image.open(io.BytesIO(png)).convert("RGB").quantize().save(DOCS / name, optimize=True)


def main() -> None:
    folder = Path(sys.argv[1])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        page = browser.new_page()
        page.set_default_timeout(_MINUTES)
        draw_suspects(page, folder)
        draw_app(page, folder)
        browser.close()


if __name__ == "__main__":
    main()
