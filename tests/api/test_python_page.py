# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The code of docs/python.md runs, block after block, in a folder with photos."""

import re
from pathlib import Path

import pytest

from qbheat_det.data import ToySpec, prepare_toy_set
from tests.data.pictures import draw, save

TEXT = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
QUICK = {
    "SOLVER.IMS_PER_BATCH": 4,
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "INPUT.MIN_SIZE_TEST": 64,
}


def _prepare(folder: Path) -> None:
    import cv2

    (folder / "photos").mkdir()
    for name in ("photo.jpg", "photos/a.jpg", "photos/b.jpg"):
        save(folder / name, draw(120, 90, seed=len(name)))
    writer = cv2.VideoWriter(
        str(folder / "video.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 5, (96, 64)
    )
    for index in range(2):
        writer.write(draw(96, 64, seed=index))
    writer.release()
    toy = prepare_toy_set(ToySpec("train", num_images=20, image_size=64), folder)
    (folder / "train.json").write_bytes((toy / "annotations.json").read_bytes())
    (toy / "images").rename(folder / "images")


def _run(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("supervision")
    _prepare(folder)
    monkeypatch.chdir(folder)
    code = "\n".join(blocks)
    # The page's data and settings are of hours; the same call with those of seconds.
    code = code.replace('"data.yaml"', '"train.json"').replace(
        '{"SOLVER.BASE_LR": 0.005}', repr({"SOLVER.BASE_LR": 0.005, **QUICK})
    )
    exec(compile(code, "docs/python.md", "exec"), {})


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) == 8


def test_predicting_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(BLOCKS[:4], tmp_path, monkeypatch)
    for name in ("drawn.jpg", "tasks.json", "cvat.json"):
        assert (tmp_path / name).stat().st_size


@pytest.mark.slow
def test_the_whole_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(BLOCKS, tmp_path, monkeypatch)
    assert (tmp_path / "output" / "mine" / "model_final.safetensors").is_file()
