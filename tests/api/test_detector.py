# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``Detector``: the same boxes for every kind of image and batch; evaluation, training, exports."""

import dataclasses
import inspect
import itertools
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from detectron2.structures import Instances

import qbheat_det
from qbheat_det.api import predict_files
from qbheat_det.core.errors import UserError
from qbheat_det.core.other_names import ATTRIBUTES, KEYWORDS
from qbheat_det.inference.images import read_rgb
from tests.data.pictures import draw, save
from tests.export.tiny_models import save as save_tiny
from tests.toy_set import draw_toy_set


def _pixels(path):
    return np.asarray(PIL.Image.open(path).convert("RGB"))


SINGLE = {
    "file": lambda path: path,
    "text": str,
    "pillow": PIL.Image.open,
    "array": _pixels,
    "tensor": lambda path: torch.from_numpy(_pixels(path).copy()).permute(2, 0, 1),
    "floats": lambda path: torch.from_numpy(_pixels(path).copy()).permute(2, 0, 1) / 255,
}


def _predict_by_the_tool(weights, path, **options):
    found = predict_files(weights, [str(path)], device="cpu", **options).results
    return [{key: value for key, value in box.items() if key != "file_name"} for box in found]


@pytest.fixture(scope="module")
def expected(weights, photos):
    """Boxes of the tool on the first photo."""
    return _predict_by_the_tool(weights, photos / "0.png")


@pytest.mark.parametrize("kind", SINGLE)
def test_boxes_are_those_of_the_tool_for_every_kind_of_image(kind, detector, photos, expected):
    path = photos / "0.png"
    found = detector(SINGLE[kind](path))
    assert expected
    assert found.to_coco() == expected
    np.testing.assert_array_equal(found.image, _pixels(path))


def test_tiles_are_those_of_the_tool(detector, weights, photos):
    path = photos / "0.png"
    found = detector.predict(path, threshold=0, tile=64).to_coco()
    assert found == _predict_by_the_tool(weights, path, tile=64, score_threshold=0.0)
    assert found != detector.predict(path, threshold=0).to_coco()


def _assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.boxes, other.boxes, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-4, atol=1e-5)
        assert one.labels == other.labels


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batches_give_what_single_images_give(batch_size, detector, photos):
    files = sorted(photos.glob("*.png"))
    expected = [detector.predict(path, threshold=0) for path in files]
    sizes = []
    hook = detector.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    sources = files, photos, str(photos / "*.png")
    for source in sources:
        found = detector.predict(source, threshold=0, batch_size=batch_size)
        _assert_same(found, expected)
        assert [Path(one.file_name).name for one in found] == [path.name for path in files]
    hook.remove()
    # Images 0 and 2 have one size; a batch of 8 holds all.
    assert sizes == {1: [1] * 4, 3: [2, 1, 1], 8: [2, 1, 1]}[batch_size] * len(sources)


def test_a_generator_is_read_in_order_and_only_as_far_as_needed(detector, encoder, photos):
    path = photos / "0.png"
    opened = []

    def open_forever():
        for index in itertools.count():
            opened.append(index)
            yield np.roll(_pixels(path), index, axis=1)

    stream = detector.stream(open_forever(), threshold=0, batch_size=3)
    first = list(itertools.islice(stream, 4))
    assert opened == [0, 1, 2, 3, 4, 5]  # the batches of the four results
    assert [one.file_name for one in first] == [f"image {index}" for index in range(4)]
    rolled = [np.roll(_pixels(path), index, axis=1) for index in range(4)]
    _assert_same(first, [detector.predict(image, threshold=0) for image in rolled])
    _assert_same(detector.predict(iter(rolled), threshold=0), first)
    vectors = encoder.embed(image for image in rolled)
    torch.testing.assert_close(vectors, encoder.embed(rolled), rtol=0, atol=0)


@pytest.mark.parametrize(
    "bad", ["broken.jpg", np.zeros((1, 9999, 3), np.uint8)], ids=["file", "long"]
)
def test_images_before_a_bad_one_are_predicted(bad, detector, photos):
    good = photos / "0.png"
    (photos / "broken.jpg").write_bytes(b"no image")
    pictures = [good] * 5 + [photos / bad if isinstance(bad, str) else bad, good]
    stream = detector.stream(iter(pictures), threshold=0, batch_size=4)
    found = []
    with pytest.raises(UserError, match=r"broken.jpg|image 5"):
        found.extend(stream)
    _assert_same(found, [detector.predict(good, threshold=0)] * 5)


def test_a_video_is_read_frame_by_frame(detector, photos):
    found = detector.predict(photos / "v.avi", batch_size=1)
    read = []
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
        (iter([]), "empty"),
        ({"image": "0.png"}, "dict"),
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
def test_what_is_no_image_is_refused(source, named, detector, photos):
    if isinstance(source, str | list):
        inside = [str(photos / name) for name in ([source] if isinstance(source, str) else source)]
        source = inside if isinstance(source, list) else inside[0]
    with pytest.raises(UserError, match=named):
        detector.predict(source)


def test_arguments_that_make_no_sense_are_refused(detector, photos):
    wrong = [{"threshold": 50}, {"batch_size": 0}, {"tile": 8}]
    wrong += [{"threshold": "0.3"}, {"threshold": None}, {"batch_size": "8"}, {"batch_size": 2.5}]
    for arguments in wrong:
        with pytest.raises(UserError, match=next(iter(arguments))):
            detector.predict(photos / "0.png", **arguments)


def test_a_turned_photo_is_upright_however_it_is_given(tmp_path):
    save(tmp_path / "t.jpg", draw(30, 10), orientation=6)
    assert read_rgb(tmp_path / "t.jpg").shape == (30, 10, 3)
    assert read_rgb(PIL.Image.open(tmp_path / "t.jpg")).shape == (30, 10, 3)


def test_the_deployed_form_finds_the_same(detector, photos):
    deployed = detector.deploy()
    assert "deployed" in repr(deployed)
    assert "deployed" not in repr(detector)
    files = sorted(photos.glob("*.png"))
    _assert_same(deployed.predict(files, threshold=0.4), detector.predict(files, threshold=0.4))
    for action in (deployed.deploy, lambda: deployed.train("data.yaml")):
        with pytest.raises(UserError, match="deployed"):
            action()


def test_evaluation_counts_the_best_box_of_each_image(detector, photos, tmp_path):
    content = {"images": [], "annotations": []}
    for number, path in enumerate(sorted(photos.glob("*.png")), start=1):
        one = detector(path, threshold=0.0)
        (height, width), best = one.instances.image_size, one.to_coco(number)[0]
        image = {"id": number, "file_name": path.name, "width": width, "height": height}
        content["images"].append(image)
        content["annotations"].append({**best, "id": number, "iscrowd": 0})
    ids = sorted({one["category_id"] for one in content["annotations"]})
    names = dict(zip(detector.cfg.MODEL.CATEGORY_IDS, detector.class_names, strict=True))
    content["categories"] = [{"id": id_, "name": name} for id_, name in names.items()]
    (tmp_path / "truth.json").write_text(json.dumps(content))
    metrics = detector.evaluate(tmp_path / "truth.json", images=photos)
    assert all(metrics[f"AP-{names[id_]}"] > 0 for id_ in ids)
    with pytest.raises(UserError, match="nowhere"):
        detector.evaluate("nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two_maps", "qb_heat"])
def test_an_exported_file_gives_the_same(kind, tmp_path, photos):
    pytest.importorskip("onnxscript")
    original = qbheat_det.load(save_tiny(tmp_path / "run", kind), device="cpu")
    original.export(tmp_path / "m.onnx", images=[photos / "0.png", photos / "1.png"])
    exported = qbheat_det.load(tmp_path / "m.onnx", device="cpu")
    assert repr(exported).startswith(type(original).__name__)
    files = sorted(photos.glob("*.png"))
    if kind == "two_maps":
        _assert_same(exported.predict(files), original.predict(files))
    else:
        assert {*exported(files[:1])} == {*original(files[0])}
    with pytest.raises(UserError, match="exported"):
        exported.export(tmp_path / "again.onnx")


QUICK = {
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.LOG_PERIOD": 1,
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "TEST.EVAL_PERIOD": 0,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A COCO json with its images beside it."""
    return draw_toy_set(tmp_path_factory.mktemp("toy"), 20) / "annotations.json"


@pytest.mark.slow
def test_a_trained_detector_has_the_datas_classes_and_the_runs_weights(
    weights, toy, tmp_path, photos
):
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


@pytest.mark.slow
def test_train_opens_the_detector_that_the_command_would_train(weights, toy, tmp_path):
    options = {"images": str(toy.parent / "images"), "device": "cpu", "overrides": QUICK}
    detector = qbheat_det.train(toy, weights=weights, epochs=1, output=tmp_path / "run", **options)
    assert isinstance(detector, qbheat_det.Detector)
    assert Path(detector.weights).parent == tmp_path / "run"
    assert detector.class_names == qbheat_det.load(tmp_path / "run").class_names
    with pytest.raises(UserError, match="has a run"):
        qbheat_det.train(toy, output=tmp_path / "run", **options)
    with pytest.raises(UserError, match="epochs"):  # of which minutes choose the number
        detector.train(
            toy, minutes=1, epochs=2, output=tmp_path / "other", images=options["images"]
        )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data": "nowhere.yaml"}, "nowhere.yaml"),
        ({"images": "elsewhere"}, "elsewhere"),
        ({"overrides": {"SOLVER.NOTHING": 1}}, "SOLVER.NOTHING"),
        ({"overrides": {"SOLVER.EPOCHS": 1, "OUTPUT_DIR": "x"}}, "OUTPUT_DIR"),
        ({"wrong_flag": 1}, "wrong_flag"),
        ({"keep_clases": True}, "do you mean keep_classes"),
        ({"weights": "other.pth"}, "leave out weights"),
        ({"overrides": ["SOLVER.EPOCHS", 1]}, "overrides must be a dict"),
        ({"output": 5}, "output"),
        ({"data": 5}, "--data"),
        ({"images": [5]}, "--images"),
        ({"batch": 2.5}, "--batch"),
        ({"image_size": "320"}, "--image-size"),
        ({"freeze": "no"}, "--freeze"),
        ({"device": 5}, "--device"),
    ],
)
def test_what_cannot_be_trained_is_named(arguments, named, detector, toy, tmp_path):
    with pytest.raises(UserError, match=named):
        detector.train(**{"data": toy, "output": tmp_path / "run", **arguments})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (lambda detector: detector("a.jpg", conf=0.5), "threshold"),
        (lambda detector: detector.predict(source="a.jpg"), "images"),
        (lambda detector: detector.export("a.onnx", format="onnx"), "suffix"),
        (lambda detector: detector.export(5), "output must be"),
        (lambda detector: detector.export("a.onnx", images="a.jpg"), "images must be a list"),
        (lambda detector: detector.export("a.onnx", image_size=320), "image_size must be"),
        (lambda detector: detector.train("data.yaml", opts=["SEED", 1]), "overrides"),
        (lambda detector: detector.train("data.yaml", imgsz=640), "image_size"),
        (lambda detector: qbheat_det.train("data.yaml", time=1), "minutes"),
        (lambda detector: detector.evaluate(source="data.yaml"), "data"),
        (lambda detector: detector.embed("a.jpg"), "not an encoder"),
    ],
)
def test_keywords_and_methods_of_others_name_the_right_one(detector, call, right):
    with pytest.raises((TypeError, UserError), match=right):
        call(detector)


@pytest.mark.parametrize(
    ("read", "right"),
    [
        (lambda detector, result: detector.names, "class_names"),
        (lambda detector, result: detector.val(), "evaluate"),
        (lambda detector, result: result.plot(), "draw"),
        (lambda detector, result: result.conf, "scores"),
        (lambda detector, result: result[0].boxes, r"without \[0\]"),
        (lambda detector, result: qbheat_det.YOLO, "load"),
    ],
)
def test_attributes_of_others_name_the_right_one(read, right, detector, photos):
    result = detector.predict(photos / "0.png", threshold=0)
    with pytest.raises(AttributeError, match=f"use .*{right}"):
        read(detector, result)


def test_names_of_other_libraries_are_none_of_ours(detector, photos):
    result = detector.predict(photos / "0.png", threshold=0)
    owners = {"qbheat_det": qbheat_det, "Detector": detector, "Detections": result}
    owners["DetectedBox"] = result[0]
    assert owners.keys() == ATTRIBUTES.keys()
    for owner, right in ATTRIBUTES.items():
        assert not {*right} & {*dir(owners[owner])}
    for name, right in KEYWORDS.items():
        owner = (
            qbheat_det if name == "train" else qbheat_det.Encoder if name == "embed" else detector
        )
        assert not {*right} & {*inspect.signature(getattr(owner, name)).parameters}


def test_a_result_is_a_sequence_of_boxes(detector, photos):
    result = detector.predict(photos / "0.png", threshold=0)
    assert [result[index] for index in range(len(result))] == list(result)
    assert result[0].score == max(box.score for box in result)
    assert isinstance(result[0], tuple)
    with pytest.raises(IndexError, match=f"has no box {len(result)}"):
        result[len(result)]
    assert not hasattr(result, "nothing_known")
    without_boxes = dataclasses.replace(result, prediction=Instances((9, 9)))
    with pytest.raises(AttributeError, match="pred_boxes"):  # the error of the property itself
        _ = without_boxes.boxes
