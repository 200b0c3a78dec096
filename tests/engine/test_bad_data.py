# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Bad data through tools/train_net.py: a sentence with file and id, before anything is written."""

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
    """Returns what spoils one split, runs the tool, and gives the sentence that it ends with."""
    module = load_tool("train_net")
    monkeypatch.setattr(module, "run_distributed", lambda main, args: main(args))

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


def no_boxes(content: Content) -> None:
    content["annotations"] = []


def only_crowds(content: Content) -> None:
    for entry in content["annotations"]:
        entry["iscrowd"] = 1


BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "image_missing": (
        lambda f: (f / "images" / "000002.jpg").unlink(),
        ["annotations.json: image id 2", "no file '000002.jpg'"],
    ),
    "jpeg_truncated": (
        lambda f: truncate(f / "images" / "000002.jpg", 900),
        ["000002.jpg' (image id 2)", "is the file whole?"],
    ),
    "image_empty": (
        lambda f: truncate(f / "images" / "000002.jpg", 0),
        ["000002.jpg' (image id 2)", "empty"],
    ),
    "image_is_text": (
        lambda f: (f / "images" / "000002.jpg").write_text("404"),
        ["000002.jpg' (image id 2)", "no image"],
    ),
    "width_wrong": (
        edit(lambda c: c["images"][1].update(width=65)),
        ["000002.jpg' (image id 2)", "width 65", "has width 64"],
    ),
    "width_missing": (
        edit(lambda c: c["images"][1].pop("width")),
        ["annotations.json: image id 2", "width", "is missing"],
    ),
    "box_outside": (
        annotation(bbox=[65, 3, 9, 9]),
        ["annotations.json: annotation id 2", "outside its image"],
    ),
    "box_without_area": (
        annotation(bbox=[5, 3, 0, 9]),
        ["annotations.json: annotation id 2", "no area"],
    ),
    "box_nan": (
        annotation(bbox=[5, 3, float("nan"), 9]),
        ["annotations.json: annotation id 2", "finite"],
    ),
    "annotation_id_twice": (
        annotation(id=1),
        ["annotations.json: annotation id 1", "more than once"],
    ),
    "image_id_twice": (
        edit(lambda c: c["images"][1].update(id=1)),
        ["annotations.json: image id 1", "more than once"],
    ),
    "image_id_too_large": (
        edit(lambda c: c["images"][1].update(id=2**53)),
        ["annotations.json: image id 9007199254740992", "2**53"],
    ),
    "category_unknown": (
        annotation(category_id=3),
        ["annotations.json: annotation id 2", "category_id 3"],
    ),
    "image_unknown": (
        annotation(image_id=77),
        ["annotations.json: annotation id 2", "image_id 77"],
    ),
    "set_empty": (edit(lambda c: c.update(images=[])), ["annotations.json: ", "is empty"]),
    "boxes_none": (edit(no_boxes), ["annotations.json: ", "no box to train on"]),
    "boxes_all_crowds": (edit(only_crowds), ["annotations.json: ", "no box to train on"]),
    "json_half": (
        lambda f: truncate(f / "annotations.json", 500),
        ["annotations.json is not JSON"],
    ),
    "json_missing": (
        lambda f: (f / "annotations.json").unlink(),
        ["annotations.json' does not exist"],
    ),
    "images_missing": (
        lambda f: shutil.rmtree(f / "images"),
        ["images' of ", "does not exist"],
    ),
}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("case", BAD)
def test_bad_data_end_in_a_sentence_before_anything_is_written(
    case: str, split: str, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, expected = BAD[case]
    sentence = refused(spoil, split, capsys)
    for part in [f"/{split}/", *expected]:
        assert part in sentence


def drop_segmentation(content: Content) -> None:
    del content["annotations"][1]["segmentation"]


def draw_as_rle(content: Content) -> None:
    content["annotations"][1]["segmentation"] = {"size": [64, 64], "counts": [0, 64, 64 * 63]}


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [(drop_segmentation, "MODEL.MASK_ON"), (draw_as_rle, "set it to bitmask")],
)
def test_masks_that_are_missing_are_named_where_masks_are_trained(
    change: Callable[[Content], object],
    expected: str,
    split: str,
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence = refused(edit(change), split, capsys, config="mask_rcnn_285M_toy.yaml")
    assert "image id 1" in sentence
    assert expected in sentence
