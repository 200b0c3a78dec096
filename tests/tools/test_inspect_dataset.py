# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/inspect_dataset.py from its command line: clean data, every error at once, wrong use."""

import html
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image as PILImage

from qbheat_det.analysis import dataset_report
from qbheat_det.core.figures import Image
from qbheat_det.data import ToySpec, prepare_toy_set, register_toy_set
from tests.tool_modules import load_tool

CONFIG = str(Path(__file__).parents[2] / "configs" / "demo" / "toy_retinanet.yaml")
NAMES = ("inspect_test_train", "inspect_test_val")

Content = dict[str, Any]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("inspect_dataset")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the charts, which take seconds."""
    image = Image(b"<svg/>", "image/svg+xml", "chart")
    monkeypatch.setattr(dataset_report, "chart_image", lambda *_, **__: image)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    for name in ("train", "val"):
        prepare_toy_set(ToySpec(name=name, num_images=8, image_size=64), cache)
    return cache


@pytest.fixture
def data(drawn: Path, tmp_path: Path) -> dict[str, Path]:
    """A copy of two small sets: folders with annotations.json and images/."""
    folders = {}
    for name in ("train", "val"):
        source = next(drawn.glob(f"toy_{name}_*px_??????????"))
        folders[name] = Path(shutil.copytree(source, tmp_path / name))
    return folders


def change(folder: Path, do: Callable[[Content], object]) -> None:
    path = folder / "annotations.json"
    content = json.loads(path.read_text())
    do(content)
    path.write_text(json.dumps(content))


def flags(data: dict[str, Path]) -> list[str]:
    arguments = []
    for split, folder in data.items():
        arguments += [f"--{split}-json", str(folder / "annotations.json")]
        arguments += [f"--{split}-images", str(folder / "images")]
    return arguments


def test_clean_data_end_in_zero_with_numbers_counted_by_hand(
    tool: ModuleType, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = ["--config-file", CONFIG, *flags(data), "--output", str(output)]
    code = tool.main([*arguments, "--num-samples", "3"])
    text = capsys.readouterr().out
    assert code == 0
    assert "No errors." in text
    rows = {line[:24].strip(): line.split() for line in text.splitlines()}
    contents = [json.loads((f / "annotations.json").read_text()) for f in data.values()]
    assert rows["images"][1:] == ["8", "8"]
    assert rows["boxes"][1:] == [str(len(content["annotations"])) for content in contents]
    page = (output / "report.html").read_text()
    assert page.count("data:image/jpeg") == 3
    assert "<h2>Training images</h2>" in page
    assert page.count("128 x 128") == 6  # alternative text and caption of each
    assert page.count("data:image/svg+xml") == 5
    assert (output / "errors.txt").read_text() == ""


@pytest.mark.usefixtures("_no_charts")
def test_registered_datasets_are_inspected_by_name(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        register_toy_set(name, ToySpec(name=name, num_images=4, image_size=64), tmp_path / "cache")
    sets = ["DATASETS.TRAIN", f"('{NAMES[0]}',)", "DATASETS.TEST", f"('{NAMES[1]}',)"]
    try:
        arguments = ["--config-file", CONFIG, "--output", str(tmp_path / "out"), *sets]
        assert tool.main(arguments) == 0
    finally:
        for name in NAMES:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "errors.txt"}


def spoil(train: Path) -> dict[str, str]:
    """Puts every kind of error into a set; returns what must be said of each."""
    names = sorted(path.name for path in (train / "images").iterdir())
    images = [train / "images" / name for name in names]
    images[0].unlink()
    images[1].write_bytes(images[1].read_bytes()[:-300])
    images[2].write_bytes(b"")
    images[3].write_text("<html>not found</html>")
    PILImage.new("RGB", (64, 65)).save(images[4])

    def do(content: Content) -> None:
        ids = {image["file_name"]: image["id"] for image in content["images"]}
        good = {"category_id": 1, "bbox": [1, 2, 9, 9], "image_id": ids[names[7]], "iscrowd": 0}
        bad: list[Content] = [
            {"bbox": [64, 2, 9, 9]},
            {"bbox": [1, 2, 0, 9]},
            {"bbox": [1, 2, -3, 9]},
            {"bbox": [1, 2, float("nan"), 9]},
            {"category_id": 3},
            {"image_id": 12345},
            {"segmentation": "text"},
        ]
        rows = [{**good, **fields, "id": 1001 + i} for i, fields in enumerate(bad)]
        content["annotations"] += [*rows, {**good, "id": 2001}, {**good, "id": 2001}]
        content["images"].append({**content["images"][7], "id": 2**53 + 1})

    change(train, do)
    return {
        "missing image file": repr(names[0]),
        "truncated or damaged image": names[1],
        "empty image file": names[2],
        "unreadable image": names[3],
        "image of another size than annotated": "width 64 and height 64, but the image has",
        "box outside its image": "annotation id 1001",
        "box without area": "annotation id 1002",
        "box of negative size": "annotation id 1003",
        "annotation without a sound bbox": "annotation id 1004",
        "unknown category": "annotation id 1005: category_id",
        "unknown image": "annotation id 1006: image_id must be",
        "segmentation that cannot be drawn": "annotation id 1007",
        "annotation id twice": "annotation id 2001",
        "image id too large": "image id 9007199254740993",
    }


@pytest.mark.usefixtures("_no_charts")
def test_every_error_is_found_at_once_and_the_rest_is_still_shown(
    tool: ModuleType, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = spoil(data["train"])
    shutil.copy(data["train"] / "images" / "000007.jpg", data["val"] / "images" / "000002.jpg")
    expected["image in training and evaluation"] = "000002.jpg"
    output = tmp_path / "out"
    arguments = ["--config-file", CONFIG, *flags(data), "--output", str(output)]
    assert tool.main(arguments) == 1
    text = capsys.readouterr().out
    lines = (output / "errors.txt").read_text().splitlines()
    assert len(lines) == len(expected)
    page = (output / "report.html").read_text()
    for kind, part in expected.items():
        assert f"  {kind}: 1" in text
        assert len([line for line in lines if part in line]) >= 1, part
        assert part in html.unescape(page)
    assert page.count("data:image/jpeg") == 3  # of eight images, five are bad


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda f: (f / "annotations.json").write_text("hello"), "JSON"),
    "half": (
        lambda f: (f / "annotations.json").write_bytes(
            (f / "annotations.json").read_bytes()[:1000]
        ),
        "JSON",
    ),
    "results": (lambda f: (f / "annotations.json").write_text("[]"), "COCO's format"),
    "no_images": (lambda f: change(f, lambda c: c.update(images=[])), "'images' is empty"),
    "no_boxes": (lambda f: change(f, lambda c: c.update(annotations=[])), "no box to train on"),
    "other_classes": (
        lambda f: change(f, lambda c: c["categories"][0].update(name="other")),
        "lacks 'other'",
    ),
}


@pytest.mark.usefixtures("_no_charts")
@pytest.mark.parametrize("case", BROKEN)
def test_an_unusable_file_is_an_error(
    case: str,
    tool: ModuleType,
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    do, expected = BROKEN[case]
    do(data["train"])
    output = tmp_path / "out"
    arguments = ["--config-file", CONFIG, *flags(data), "--output", str(output)]
    assert tool.main([*arguments, "--num-samples", "1"]) == 1
    assert expected in capsys.readouterr().out
    assert len((output / "errors.txt").read_text().splitlines()) == 1


@pytest.mark.usefixtures("_no_charts")
def test_masks_are_asked_for_where_the_config_trains_them(
    tool: ModuleType, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(data["train"], lambda c: c["annotations"][0].pop("segmentation"))
    arguments = ["--config-file", CONFIG, *flags(data), "--output", str(tmp_path / "out")]
    assert tool.main(arguments) == 0
    assert tool.main([*arguments, "MODEL.MASK_ON", "True"]) == 1
    assert "object without a mask: 1" in capsys.readouterr().out


@pytest.mark.usefixtures("_no_charts")
def test_what_training_can_handle_is_a_warning(
    tool: ModuleType, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = json.loads((data["train"] / "annotations.json").read_text())
    gone = train["annotations"][0]["category_id"]

    def drop_a_class(content: Content) -> None:
        kept = [a for a in content["annotations"] if a["category_id"] != gone]
        content["annotations"] = kept

    change(data["val"], drop_a_class)
    arguments = ["--config-file", CONFIG, *flags(data), "--output", str(tmp_path / "out")]
    assert tool.main(arguments) == 0
    text = capsys.readouterr().out
    assert "warning: " in text
    assert "'val' has no box of" in text


@pytest.mark.usefixtures("_no_charts")
def test_one_set_for_both_is_a_warning(
    tool: ModuleType, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"train": data["train"], "val": data["train"]}
    arguments = ["--config-file", CONFIG, *flags(both), "--output", str(tmp_path / "out")]
    assert tool.main(arguments) == 0
    assert "are the same data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--train-json", "x.json"], "--train-images"),
        (["--train-json", "/nowhere/x.json", "--train-images", "/"], "/nowhere/x.json"),
        (["--config-file", "nowhere.yaml"], "nowhere.yaml"),
        (["--config-file", CONFIG, "DATASETS.TRAIN", "('none',)"], "no dataset 'none'"),
        (["--config-file", CONFIG, "SOLVER.MAXITER", "3"], "SOLVER.MAX_ITER"),
        ([], "names no dataset"),
        (["--num-threads", "0"], "--num-threads must be 1 or more"),
    ],
)
def test_wrong_use_ends_in_two(
    arguments: list[str], expected: str, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(arguments)
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err
