# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Detector`` and ``Encoder``: the same for every image and batch; results; training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from detectron2.structures import Boxes, Instances

import qbheat_det
from qbheat_det.api import Detections, Detector, Encoder, predict_files, save_annotations
from qbheat_det.core.errors import UserError
from qbheat_det.data import ToySpec, prepare_toy_set
from qbheat_det.inference import images as images_module
from qbheat_det.inference.images import read_rgb
from tests.export.tiny_models import save as save_tiny


def _pixels(path: Path) -> np.ndarray:
    return np.asarray(PIL.Image.open(path).convert("RGB"))


SINGLE: dict[str, Callable[[Path, str], Any]] = {
    "file": lambda path, _: path,
    "text": lambda path, _: str(path),
    "address": lambda path, url: f"{url}/{path.name}",
    "pillow": lambda path, _: PIL.Image.open(path),
    "array": lambda path, _: _pixels(path),
    "tensor": lambda path, _: torch.from_numpy(_pixels(path).copy()).permute(2, 0, 1),
    "floats": lambda path, _: torch.from_numpy(_pixels(path).copy()).permute(2, 0, 1) / 255,
}


@pytest.mark.parametrize("kind", SINGLE)
def test_boxes_are_those_of_the_tool_for_every_kind_of_image(
    kind: str, detector: Detector, weights: str, photos: Path, address: str
) -> None:
    path = photos / "0.png"
    expected = predict_files(weights, [str(path)], score_threshold=0.3, device="cpu").results
    found = detector.predict(SINGLE[kind](path, address))
    assert expected
    assert found.to_coco() == [
        {key: value for key, value in box.items() if key != "file_name"} for box in expected
    ]
    np.testing.assert_array_equal(found.image, _pixels(path))


def _assert_same(found: list[Detections], expected: list[Detections]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.boxes, other.boxes, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-4, atol=1e-5)
        assert one.labels == other.labels


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batches_give_what_single_images_give(
    batch_size: int, detector: Detector, photos: Path
) -> None:
    files = sorted(photos.glob("*.png"))
    expected = [detector.predict(path, threshold=0) for path in files]
    sizes: list[int] = []
    hook = detector.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    sources = files, photos, str(photos / "*.png")
    for source in sources:
        found = detector.predict(source, threshold=0, batch_size=batch_size)
        _assert_same(found, expected)
        assert [Path(one.file_name).name for one in found] == [path.name for path in files]
    hook.remove()
    # Images 0 and 2 have one size; a batch of 8 holds all.
    assert sizes == {1: [1] * 4, 3: [2, 1, 1], 8: [2, 1, 1]}[batch_size] * len(sources)


def test_a_video_is_read_frame_by_frame(detector: Detector, photos: Path) -> None:
    found = detector.predict(photos / "v.avi", batch_size=1)
    read: list[int] = []
    hook = detector.model.register_forward_pre_hook(lambda *_: read.append(1))
    first = next(found)
    assert (first.frame, len(read)) == (0, 1)
    assert first.image.shape == (64, 96, 3)
    assert [one.frame for one in found] == [1, 2]
    hook.remove()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("nowhere.jpg", "nowhere.jpg"),
        ("broken.jpg", "broken.jpg"),
        (["0.png", "broken.jpg"], "broken.jpg"),
        (["v.avi"], "v.avi"),
        ("*.gif", "gif"),
        ([], "empty"),
        (np.zeros((8, 8, 3), np.float32), "uint8"),
        (np.zeros((8, 8), np.uint8), "uint8"),
        (np.zeros((0, 8, 3), np.uint8), "uint8"),
        (np.zeros((1, 9000, 3), np.uint8), "elongated"),
        (None, "uint8"),
        (torch.zeros(8, 8, 3), "3, H, W"),
        (torch.full((3, 8, 8), 200.0), r"\[0, 1\]"),
        (torch.full((3, 8, 8), torch.nan), r"\[0, 1\]"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "int64"),
        (PIL.Image.new("I;16", (8, 8)), "16 bits"),
    ],
)
def test_what_is_no_image_is_refused(
    source: Any, named: str, detector: Detector, photos: Path
) -> None:
    if isinstance(source, str | list):
        inside = [str(photos / name) for name in ([source] if isinstance(source, str) else source)]
        source = inside if isinstance(source, list) else inside[0]
    with pytest.raises(UserError, match=named):
        detector.predict(source)


@pytest.mark.parametrize("path", ["broken.jpg", "missing.png", "redirect", "0.png"])
def test_an_address_that_gives_no_image_is_refused(
    path: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "0.png":
        monkeypatch.setattr(images_module, "MAX_DOWNLOAD", 100)
    with pytest.raises(UserError, match=path):
        read_rgb(f"{address}/{path}")


def test_arguments_that_make_no_sense_are_refused(detector: Detector, photos: Path) -> None:
    for arguments in ({"threshold": 50}, {"batch_size": 0}):
        with pytest.raises(UserError, match=next(iter(arguments))):
            detector.predict(photos / "0.png", **arguments)  # type: ignore[arg-type]


def test_a_turned_photo_is_upright_however_it_is_given(tmp_path: Path) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(np.zeros((10, 30, 3), np.uint8)).save(tmp_path / "t.jpg", exif=exif)
    assert read_rgb(tmp_path / "t.jpg").shape == (30, 10, 3)
    assert read_rgb(PIL.Image.open(tmp_path / "t.jpg")).shape == (30, 10, 3)


def test_the_deployed_form_finds_the_same(detector: Detector, photos: Path) -> None:
    deployed = detector.deploy(compile="off")
    assert "deployed" in repr(deployed)
    assert "deployed" not in repr(detector)
    files = sorted(photos.glob("*.png"))
    _assert_same(deployed.predict(files, threshold=0.4), detector.predict(files, threshold=0.4))
    for action in (deployed.deploy, lambda: deployed.train("data.yaml")):
        with pytest.raises(UserError, match="deployed"):
            action()


def test_an_encoders_maps_are_its_backbones(tmp_path: Path, photos: Path) -> None:
    encoder = qbheat_det.load(save_tiny(tmp_path / "run", "qb_heat"), device="cpu")
    assert isinstance(encoder, Encoder)
    outputs = encoder(photos / "0.png")
    mean, std = (torch.tensor(encoder.cfg.MODEL[key]) for key in ("PIXEL_MEAN", "PIXEL_STD"))
    with torch.no_grad():
        pixels = torch.from_numpy(_pixels(photos / "0.png").copy())
        expected = encoder.model(((pixels - mean) / std).permute(2, 0, 1)[None])
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    both = encoder([photos / "0.png", photos / "2.png"])
    assert {len(output) for output in both.values()} == {2}
    with pytest.raises(UserError, match="empty"):
        encoder([])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two_maps", "qb_heat"])
def test_an_exported_file_gives_the_same(kind: str, tmp_path: Path, photos: Path) -> None:
    pytest.importorskip("onnxscript")
    original: Any = qbheat_det.load(save_tiny(tmp_path / "run", kind), device="cpu")
    original.export(tmp_path / "m.onnx", images=[photos / "0.png", photos / "1.png"])
    exported: Any = qbheat_det.load(tmp_path / "m.onnx", device="cpu")
    assert repr(exported).startswith(type(original).__name__)
    files = sorted(photos.glob("*.png"))
    if kind == "two_maps":
        _assert_same(exported.predict(files), original.predict(files))
    else:
        assert {*exported(files[:1])} == {*original(files[0])}
    for action in (exported.deploy, exported.save_pretrained) if kind == "two_maps" else ():
        with pytest.raises(UserError, match="exported"):
            action(*([tmp_path] if action == exported.save_pretrained else []))


QUICK = {
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.LOG_PERIOD": 1,
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "TEST.EVAL_PERIOD": 0,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A COCO json with its images beside it."""
    folder = tmp_path_factory.mktemp("toy")
    return (
        prepare_toy_set(ToySpec("train", num_images=20, image_size=64), folder) / "annotations.json"
    )


@pytest.mark.slow
def test_a_trained_detector_has_the_datas_classes_and_the_runs_weights(
    weights: str, toy: Path, tmp_path: Path, photos: Path
) -> None:
    detector = qbheat_det.load(weights, device="cpu")
    before = {key: value.clone() for key, value in detector.model.state_dict().items()}
    images = str(toy.parent / "images")
    run = detector.train(toy, images=images, epochs=1, output=tmp_path / "run", overrides=QUICK)
    assert run.folder == tmp_path / "run"
    assert [record["iteration"] for record in run.metrics if "total_loss" in record]
    again = qbheat_det.load(run.path, device="cpu")
    assert detector.weights == again.weights
    assert detector.class_names == again.class_names != ["square", "disc", "cross"]
    torch.testing.assert_close(
        detector.model.state_dict(), again.model.state_dict(), rtol=0, atol=0
    )
    name = "backbone.bottom_up.fine.weight"
    assert not torch.equal(before[name], detector.model.state_dict()[name])
    detector.predict(photos / "0.png")
    with pytest.raises(UserError, match="run"):  # the folder is taken
        detector.train(toy, output=tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data": "nowhere.yaml"}, "nowhere.yaml"),
        ({"images": "elsewhere"}, "elsewhere"),
        ({"overrides": {"SOLVER.NOTHING": 1}}, "SOLVER.NOTHING"),
        ({"overrides": {"SOLVER.EPOCHS": 1, "OUTPUT_DIR": "x"}}, "OUTPUT_DIR"),
        ({"wrong_flag": 1}, "wrong_flag"),
    ],
)
def test_what_cannot_be_trained_is_named(
    arguments: dict[str, Any], named: str, detector: Detector, toy: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        detector.train(**{"data": toy, "output": tmp_path / "run", **arguments})
    assert not (tmp_path / "run").exists()


BOXES = [[10.0, 20.0, 40.0, 60.0], [0.0, 0.0, 100.0, 80.0]]


def _make(**changes: Any) -> Detections:
    instances = Instances(
        (80, 100),
        pred_boxes=Boxes(torch.tensor(BOXES)),
        scores=torch.tensor([0.75, 0.5]),
        pred_classes=torch.tensor([1, 0]),
    )
    image = np.zeros((80, 100, 3), np.uint8)
    own = {"file_name": "a b.jpg", **changes}
    return Detections(instances, ["cat", "dog"], [17, 18], image, **own)


def test_boxes_classes_and_scores_survive_every_conversion(tmp_path: Path) -> None:
    found = _make()
    assert len(found) == 2
    assert found.labels == ["dog", "cat"]
    assert repr(found) == "Detections(a b.jpg, 100x80: 1 dog, 1 cat)"
    assert found.to_coco(7) == [
        {"image_id": 7, "category_id": 18, "bbox": [10.0, 20.0, 30.0, 40.0], "score": 0.75},
        {"image_id": 7, "category_id": 17, "bbox": [0.0, 0.0, 100.0, 80.0], "score": 0.5},
    ]
    found.save(tmp_path / "new" / "drawn.png")
    with PIL.Image.open(tmp_path / "new" / "drawn.png") as drawn:
        assert drawn.width / drawn.height == pytest.approx(100 / 80, rel=0.02)
    with pytest.raises(UserError, match=r"x\.unknown"):
        found.save(tmp_path / "x.unknown")


def test_supervision_and_pandas() -> None:
    found = _make()
    pandas = pytest.importorskip("pandas")
    table = found.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table[["x1", "y1", "x2", "y2"]].to_numpy().tolist() == BOXES
    assert table["label"].tolist() == ["dog", "cat"]
    pytest.importorskip("supervision")
    converted = found.to_supervision()
    assert converted.xyxy.tolist() == BOXES
    assert converted.confidence.tolist() == [0.75, 0.5]
    assert converted.class_id.tolist() == [1, 0]
    assert converted.data["class_name"].tolist() == ["dog", "cat"]
    empty = found.instances[torch.zeros(2, dtype=torch.bool)]
    assert len(Detections(empty, ["cat"], [1], found.image).to_supervision()) == 0


def test_label_studio_gets_per_cent_and_images_without_boxes(tmp_path: Path) -> None:
    none = _make(file_name="none.jpg").instances[torch.zeros(2, dtype=torch.bool)]
    empty = Detections(none, ["cat", "dog"], [17, 18], np.zeros((80, 100, 3), np.uint8), "n.jpg")
    save_annotations([_make(), empty], tmp_path / "tasks.json", "label-studio")
    first, second = json.loads((tmp_path / "tasks.json").read_text("utf-8"))
    assert first["data"] == {"image": "/data/local-files/?d=a%20b.jpg"}
    (prediction,) = first["predictions"]
    shape = prediction["result"][0]
    assert (shape["from_name"], shape["to_name"]) == ("label", "image")
    assert (shape["original_width"], shape["original_height"]) == (100, 80)
    assert shape["value"] == {
        "x": 10.0, "y": 25.0, "width": 30.0, "height": 50.0, "rotation": 0,
        "rectanglelabels": ["dog"],
    }  # fmt: skip
    assert second["predictions"][0]["result"] == []


def test_coco_results_name_the_classes(tmp_path: Path) -> None:
    save_annotations([_make()], tmp_path / "boxes.json", "coco")
    found = json.loads((tmp_path / "boxes.json").read_text())
    assert [(box["category_id"], box["category_name"]) for box in found] == [
        (18, "dog"),
        (17, "cat"),
    ]


def test_cvat_gets_a_file_that_pycocotools_reads(tmp_path: Path) -> None:
    from pycocotools.coco import COCO

    save_annotations([_make(), _make(file_name="c.jpg")], tmp_path / "cvat.json", "cvat")
    dataset = COCO(str(tmp_path / "cvat.json"))
    assert [image["file_name"] for image in dataset.loadImgs([1, 2])] == ["a b.jpg", "c.jpg"]
    assert {c["id"]: c["name"] for c in dataset.loadCats([17, 18])} == {17: "cat", 18: "dog"}
    (dog,) = dataset.loadAnns(dataset.getAnnIds(imgIds=[2], catIds=[18]))
    assert (dog["bbox"], dog["area"], dog["iscrowd"]) == ([10.0, 20.0, 30.0, 40.0], 1200.0, 0)


@pytest.mark.parametrize("format", ["cvat", "label-studio", "yolo"])
def test_frames_and_unknown_formats_are_refused(tmp_path: Path, format: Any) -> None:
    with pytest.raises(UserError, match=format):
        save_annotations([_make(frame=3)], tmp_path / "x.json", format)
    assert not (tmp_path / "x.json").exists()
