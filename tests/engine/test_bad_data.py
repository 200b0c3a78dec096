# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Bad data through tools/train_net.py: a message with file and id, before anything is written."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.data import ToySpec, prepare_toy_set
from tests.tool_modules import load_tool

from .conftest import forget_runs

ROOT = Path(__file__).resolve().parents[2]
Content = dict[str, Any]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = ToySpec(name="tiny", num_images=4, image_size=64)
    return Path(prepare_toy_set(spec, tmp_path_factory.mktemp("cache")))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, drawn: Path, tmp_path: Path) -> Iterator[Refused]:
    """Returns what spoils one split, runs the tool, and gives the message that it ends with."""
    module = load_tool("train_net")
    monkeypatch.setattr("qbheat_det.engine.run_distributed", lambda main, args: main(args))

    def run(
        spoil: Callable[[Path], object],
        split: str,
        capsys: pytest.CaptureFixture[str],
        *opts: str,
        config: str = "retinanet_285M_toy.yaml",
    ) -> str:
        argv = ["train_net.py", "--config-file", str(ROOT / "configs" / "quick_schedules" / config)]
        for name in ("train", "val"):
            folder = Path(shutil.copytree(drawn, tmp_path / name))
            if name == split:
                spoil(folder)
            argv += [f"--{name}-json", str(folder / "annotations.json")]
            argv += [f"--{name}-images", str(folder / "images")]
        output = tmp_path / "output"
        monkeypatch.setattr(sys, "argv", [*argv, "OUTPUT_DIR", str(output), *opts])
        with pytest.raises(SystemExit) as stopped:
            module.invoke_main()
        assert stopped.value.code == 2
        assert not output.exists()
        error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(error) == 1
        return error[0]

    yield run
    forget_runs()


def edit(change: Callable[[Content], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / "annotations.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def annotation(**fields: object) -> Callable[[Path], object]:
    return edit(lambda content: content["annotations"][1].update(fields))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


# The other bad entries are in tests/data.
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "image_missing": (lambda f: (f / "images" / "000002.jpg").unlink(), "json: image id 2"),
    "jpeg_truncated": (
        lambda f: truncate(f / "images" / "000002.jpg", 900),
        "000002.jpg' (image id 2)",
    ),
    "category_unknown": (annotation(category_id=3), "annotations.json: annotation id 2"),
    "json_half": (lambda f: truncate(f / "annotations.json", 500), "annotations.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_end_in_a_message_before_anything_is_written(
    case: str, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = BAD[case]
    split = ("train", "val")[len(case) % 2]
    message = refused(spoil, split, capsys)
    assert f"/{split}/" in message
    assert expected in message


def drop_segmentation(content: Content) -> None:
    del content["annotations"][1]["segmentation"]


def draw_as_rle(content: Content) -> None:
    content["annotations"][1]["segmentation"] = {"size": [64, 64], "counts": [0, 64, 64 * 63]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [(drop_segmentation, "MODEL.MASK_ON"), (draw_as_rle, "INPUT.MASK_FORMAT")],
)
def test_masks_that_are_missing_are_named_where_masks_are_trained(
    change: Callable[[Content], object],
    expected: str,
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(edit(change), "val", capsys, config="mask_rcnn_285M_toy.yaml")
    assert "image id 1" in message
    assert expected in message
