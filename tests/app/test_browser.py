# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The page in a real Chromium: predictions, the selection of images, the review of labels."""

import json
import os
import shutil
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from qbheat_det.labelling import SUSPECT_FILES, LabelSuspect
from tests.data.pictures import draw, save
from tests.servers import serving

pytest.importorskip("gradio", reason="the page needs Gradio: pip install -e .[app]")
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="driving a browser needs playwright: pip install playwright"
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
TOOL = Path(__file__).resolve().parents[2] / "tools" / "app.py"
ENTRY = "retinanet/285M_bccd"
SUSPECTS = [
    LabelSuspect("class", 0.9, 1, "0.png", 7, 2, "cat", (20, 20, 50, 40), "dog", (20, 20, 50, 40)),
    LabelSuspect("missing", 0.8, 2, "1.png", None, 1, "dog", (60, 30, 40, 40)),
    LabelSuspect("extra", 0.7, 3, "2.png", 9, 1, "dog", (10, 10, 30, 30), "dog", (10, 10, 30, 30)),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server in a process of its own, which leaves no file behind."""
    folder = tmp_path_factory.mktemp("temporary")
    photos = tmp_path_factory.mktemp("photos")
    for number in range(6):
        save(photos / f"{number}.png", draw(160, 120, seed=number))
    suspects = tmp_path_factory.mktemp("suspects")
    content = {"data": "d", "image_root": str(photos), "suspects": [*map(asdict, SUSPECTS)]}
    (suspects / SUSPECT_FILES[0]).write_text(json.dumps(content))
    command = [sys.executable, str(TOOL), "--weights", ENTRY, "--images", str(photos)]
    command += ["--suspects", str(suspects)]
    own = {"TMPDIR": str(folder), "PYTHONPATH": str(TOOL.parents[1])}
    with serving(command, env={**os.environ, **own}) as url:
        yield url
    assert not list(folder.glob("qbheat_app_*"))


@pytest.fixture
def page(address):
    """The page; at the end, nothing was asked of other hosts and nothing failed in it."""
    asked = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(90_000)
        page.on("requestfinished", lambda request: asked.append(request.url))
        page.goto(address)
        page.get_by_role("button", name="Find objects").wait_for()
        yield page
        browser.close()
    assert asked
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@pytest.fixture
def photo(tmp_path):
    """Red discs on a light ground, which the blood cells' detector takes for cells."""
    y, x = np.mgrid[:320, :420]
    pixels = np.full((320, 420, 3), (225, 215, 205), dtype=np.uint8)
    for cy in range(60, 300, 100):
        for cx in range(60, 400, 100):
            pixels[(y - cy) ** 2 + (x - cx) ** 2 < 38**2] = (190, 120, 120)
    return Path(save(tmp_path / "cells.png", pixels))


def upload(page, *files):
    page.locator("input[type=file]").first.set_input_files(list(map(str, files)))
    for file in files:
        page.get_by_text(file.stem, exact=False).first.wait_for()


def download(page):
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download boxes.json").click()
    with zipfile.ZipFile(waiting.value.path()) as archive:
        assert any(name.endswith(".jpg") for name in archive.namelist())
        return json.loads(archive.read("boxes.json"))


def test_boxes_follow_the_threshold_and_what_is_no_image_is_named(page, photo, tmp_path):
    page.get_by_role("button", name="Find objects").click()
    page.get_by_text("choose images first").wait_for()
    (tmp_path / "script.png").write_bytes(b"%!PS\n(/etc/passwd) run")
    upload(page, photo, tmp_path / "script.png")
    page.get_by_role("button", name="Find objects").click()
    page.get_by_text(f"1 of 2 files predicted by {ENTRY}").wait_for()
    assert "script.png: not an image" in page.locator("#status").inner_text()
    many = download(page)
    assert many
    assert {box["file_name"] for box in many} == {"cells.png"}
    assert min(box["score"] for box in many) >= 0.3
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("End")
    page.get_by_text("cells.png: 0 boxes").first.wait_for()
    assert download(page) == []


def test_the_second_tab_draws_attention_and_reconstructions(page, photo):
    page.get_by_role("tab", name="What the encoder sees").click()
    page.locator("input[type=file]").last.set_input_files(str(photo))
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("What a part tells of the rest").wait_for()
    for text in ("Where each token looks", "Which tokens each place reads"):
        assert page.get_by_text(text).is_visible()


def test_images_are_accepted_and_skipped_with_keys_and_buttons(page):
    page.get_by_role("tab", name="Select images to label").click()
    page.get_by_label("Number of images").fill("3")
    page.get_by_role("button", name="Select", exact=True).click()
    status, seen = page.locator("#review"), []
    for counts, act in (
        ("0 of 3 accepted, 0 skipped", lambda: page.keyboard.press("a")),
        ("1 of 3 accepted, 0 skipped", lambda: page.keyboard.press("s")),
        ("1 of 3 accepted, 1 skipped", lambda: page.keyboard.press("b")),
        ("0 of 3 accepted, 1 skipped", lambda: page.locator("#accept").click()),
        ("1 of 3 accepted, 1 skipped", lambda: page.locator("#skip").click()),
        ("1 of 3 accepted, 2 skipped", lambda: page.keyboard.press("a")),
    ):
        page.get_by_text(counts).wait_for()
        seen.append(status.locator("code").inner_text())
        page.locator("h1").click()  # the keys are for the page, not for a field
        act()
    page.get_by_text("2 of 3 accepted").wait_for()
    assert seen[0] == seen[3]
    assert len({*seen}) == 4
    page.get_by_role("button", name="Write list").click()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download selection.zip").click()
    with zipfile.ZipFile(waiting.value.path()) as archive:
        listed = archive.read("selected.txt").decode().splitlines()
        tasks = json.loads(archive.read("label_studio.json"))
    assert [Path(path).name for path in listed] == [seen[0], seen[5]]
    assert len(tasks) == 2


def test_corrections_are_accepted_and_skipped_with_keys_and_buttons(page):
    page.get_by_role("tab", name="Check labels").click()
    page.get_by_role("button", name="Write the accepted corrections").click()
    page.get_by_text("open a folder first").wait_for()
    page.get_by_role("button", name="Open", exact=True).click()
    for counts, text, act in (
        ("0 accepted, 0 skipped", SUSPECTS[0].text, lambda: page.keyboard.press("a")),
        ("1 accepted, 0 skipped", SUSPECTS[1].text, lambda: page.keyboard.press("a")),
        ("2 accepted, 0 skipped", SUSPECTS[2].text, lambda: page.keyboard.press("b")),
        ("2 accepted, 0 skipped", SUSPECTS[1].text, lambda: page.locator("#skip-label").click()),
        ("1 accepted, 1 skipped", SUSPECTS[2].text, lambda: page.locator("#accept-label").click()),
    ):
        page.get_by_text(counts).wait_for()
        page.get_by_text(text).wait_for()
        page.locator("h1").click()  # the keys are for the page, not for a field
        act()
    page.get_by_text("2 accepted, 1 skipped").wait_for()
    page.get_by_role("button", name="Write the accepted corrections").click()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download corrections.json").click()
    corrections = json.loads(Path(waiting.value.path()).read_text())
    assert corrections["data"] == "d"
    assert [one["annotation_id"] for one in corrections["suspects"]] == [7, 9]
