# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The selection of images: which it takes, which it leaves out, and what it writes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.labelling import select, selection, write_selection
from qbheat_det.labelling.selection import uncertainty
from tests.tool_modules import load_tool

DETECTOR = "retinanet/285M_bccd"
CELLS = Path(__file__).resolve().parents[2] / "docs" / "cells.jpg"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with six pictures, one of them twice and nearly, and a broken file."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(6):
        coarse = generator.integers(0, 255, (3 + number, 4, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((160, 120))
        image.save(folder / f"{number}.png")
    image.save(folder / "5_again.png")
    (folder / "broken.png").write_bytes(b"not an image")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def names(files: list[str]) -> set[str]:
    return {Path(file).name for file in files}


@pytest.mark.parametrize("strategy", ["typiclust", "prob_cover", "k_center"])
def test_each_picture_is_selected_once_and_what_is_left_out_is_named(
    photos: Path, strategy: str
) -> None:
    found = select(photos, 6, strategy=strategy)  # type: ignore[arg-type]
    assert names(found.files) == {f"{number}.png" for number in range(6)}
    assert [Path(path).name for path in found.pool.repeated] == ["5_again.png"]
    assert [Path(path).name for path in found.pool.unreadable] == ["broken.png"]


def test_images_with_labels_and_their_copies_are_never_selected(
    photos: Path, tmp_path: Path
) -> None:
    records = [{"id": 1, "file_name": "5.png", "width": 160, "height": 120}]
    content = {"images": records, "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "labels.json").write_text(json.dumps(content))
    for name in ("5.png", "4.png"):  # at another place
        (tmp_path / name).write_bytes((photos / name).read_bytes())
    records.append({"id": 2, "file_name": "4.png", "width": 160, "height": 120})
    (tmp_path / "labels.json").write_text(json.dumps(content))
    found = select(photos, 4, data=str(tmp_path / "labels.json"))
    assert names(found.files) == {f"{number}.png" for number in range(4)}
    assert found.pool.num_labelled == 2


def test_vectors_come_from_the_cache(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [str(photos / f"{number}.png") for number in range(3)]
    first = selection.embed_images(files)
    monkeypatch.setattr(selection, "encode", None)
    again = selection.embed_images(files[::-1])
    torch.testing.assert_close(again.vectors, first.vectors.flip(0), rtol=0, atol=0)


def test_uncertainty_by_hand() -> None:
    assert uncertainty([]) == uncertainty([0.0, 1.0]) == 0
    assert uncertainty([0.5, 0.5]) == pytest.approx(2 * np.log(2))
    assert uncertainty([0.5]) > uncertainty([0.9])


def test_a_detector_brings_uncertain_images_and_its_boxes(photos: Path, tmp_path: Path) -> None:
    found = select([photos, CELLS], 1, weights=DETECTOR)
    assert names(found.files) == {"cells.jpg"}  # the only one with cells
    paths = {path.name: path for path in write_selection(found, tmp_path)}
    (task,) = json.loads(paths["label_studio.json"].read_text())
    dataset = json.loads(paths["cvat.json"].read_text())
    boxes = task["predictions"][0]["result"]
    assert len(boxes) == len(dataset["annotations"]) > 5
    assert paths["selected.txt"].read_text() == f"{CELLS}\n"
    page = paths["index.html"].read_text()
    assert page.count("<img") == 1
    assert "http" not in page


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--budget", "7"], "--budget"),
        (["--budget", "0"], "--budget"),
        (["--budget", "1", "--strategy", "uncertainty"], "--weights"),
        (["--budget", "1", "--encoder", DETECTOR], DETECTOR),
        (["--budget", "1", "--weights", "no_such_run"], "no_such_run"),
    ],
)
def test_bad_input_is_named(
    photos: Path,
    tmp_path: Path,
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["--images", str(photos), "--output", str(tmp_path / "next")]
    with pytest.raises((SystemExit, UserError)):
        load_tool("select_images").main([*base, *arguments])
    assert named in capsys.readouterr().err
    assert not (tmp_path / "next").exists()
