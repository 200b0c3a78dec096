# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction: weights that fit or are refused, pixels in the right order; results and formats."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from PIL import Image
from pycocotools.coco import COCO

from qbheat_det.checkpoint import WeightsInfo, load_run_config, save_weights
from qbheat_det.config import get_cfg, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.inference.decoding import DecodingLimits
from qbheat_det.inference.files import (
    classify_images,
    name_outputs,
    open_weights,
    predict_images,
)
from qbheat_det.inference.images import find_inputs, open_frames
from qbheat_det.inference.predict import build_predictor
from qbheat_det.inference.predictor import DetectorSettings
from qbheat_det.inference.results import Detections, Predictions, save_annotations
from tests.data.pictures import make_jpeg_of_scans, save_video
from tests.engine.tiny_detectors import make_probe_config, make_retinanet_config, save_run
from tests.engine.tiny_pretraining import OPTS, RECIPE
from tests.inference.conftest import NAMES, SIZES
from tests.tool_modules import load_tool, refuse

RED = (255, 0, 0)


def _save_image(path, color=RED, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def _run(cfg, weights, inputs, output=None, score_threshold=0.0):
    cfg.MODEL.WEIGHTS = weights
    return predict_images(
        build_predictor(cfg),
        find_inputs([str(path) for path in inputs]),
        DetectorSettings.from_config(cfg),
        score_threshold=score_threshold,
        output_dir=output,
    )


def test_files_beyond_the_limits_are_skipped_with_the_reason(probe, tmp_path):
    cfg, weights = probe
    folder = tmp_path / "foreign"
    good = _save_image(folder / "z.png")
    (folder / "scans.jpg").write_bytes(make_jpeg_of_scans(51))
    (folder / "slow.jpg").write_bytes(make_jpeg_of_scans(50))
    _save_image(folder / "wide.png", size=(6000, 4000))
    save_video(folder / "video.mp4", [np.zeros((32, 48, 3), np.uint8)] * 2)
    save_video(folder / "wide.mp4", [np.zeros((1000, 1000, 3), np.uint8)])
    (folder / "broken.mp4").write_bytes(b"no video")
    cfg.MODEL.WEIGHTS = weights
    predictor, files = build_predictor(cfg), find_inputs([str(folder)])

    def predict(**limits):
        found = predict_images(
            predictor,
            files,
            DetectorSettings.from_config(cfg),
            score_threshold=0.0,
            limits=DecodingLimits(**limits),
        )
        return found, {Path(path).name: reason for path, reason in found.skipped}

    found, reasons = predict(max_pixels=23e6, seconds=0.4)
    assert [image["file_name"] for image in found.images].count("z.png") == 1
    assert "more than 50 scans" in reasons.pop("scans.jpg")
    assert "more than 0.4 s" in reasons.pop("slow.jpg")
    assert "6000 x 4000 pixels" in reasons.pop("wide.png")
    assert "not a video" in reasons.pop("broken.mp4")
    assert not reasons
    _, reasons = predict(max_pixels=0.9e6)
    assert "1000 x 1000 pixels" in reasons["wide.mp4"]

    def score(path):
        assert Path(path) == good
        return np.ones(2)

    classified = classify_images(score, files, ["a", "b"], limits=DecodingLimits(max_pixels=19e6))
    assert [entry["file_name"] for entry in classified.results] == ["z.png"]


@pytest.fixture
def probe(tmp_path):
    cfg = make_probe_config()
    return cfg, save_run(cfg, tmp_path / "run")


def test_each_frame_of_a_video_is_an_image_of_its_own(probe, tmp_path):
    frames = [np.full((32, 48, 3), RED, np.uint8)] * 2
    inputs = [_save_image(tmp_path / "a.png"), save_video(tmp_path / "v.avi", frames)]
    (tmp_path / "text.mp4").write_text("no video")
    predictions = _run(*probe, [*inputs, tmp_path / "text.mp4"], tmp_path / "out")
    frames = [(box["image_id"], box.get("frame")) for box in predictions.results]
    assert frames == [(1, None), (2, 0), (3, 1)]
    assert [name for name, _ in predictions.skipped] == [str(tmp_path / "text.mp4")]
    written = cv2.VideoCapture(str(tmp_path / "out" / "v.mp4"))
    assert [written.read()[1].shape for _ in range(2)] == [(384, 576, 3)] * 2
    assert written.get(cv2.CAP_PROP_FPS) == pytest.approx(10)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "v.mp4"]


def test_the_summary_names_the_threshold_of_a_detector_alone(capsys):
    tool = load_tool("predict")
    args = tool.parse_args(["--weights", "w", "--images", "i", "--threshold", "0.25"])
    tool.print_report(Predictions(results=[{}] * 2, images=[{}], num_images=1), args)
    assert "1 file: 2 boxes with a score of at least --threshold 0.25\n" in capsys.readouterr().out
    tool.print_report(Predictions(results=[{}] * 2, num_images=2), args)  # of a classifier
    assert "2 files: 2 results\n" in capsys.readouterr().out


def test_a_video_is_the_file_of_its_name_and_no_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_video(tmp_path / "other.avi", [np.full((32, 48, 3), RED, np.uint8)] * 3)
    save_video(tmp_path / "v.avi", [np.zeros((64, 64, 3), np.uint8)])
    (tmp_path / "v.avi").rename(tmp_path / "concat:other.avi")
    frames, _, _ = open_frames(Path("concat:other.avi"), "v")
    assert [frame.image.shape for frame in frames] == [(64, 64, 3)]


def test_broken_files_are_passed_over_and_named(probe, tmp_path):
    folder = tmp_path / "in"
    whole = _save_image(folder / "whole.jpg", size=(64, 64)).read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("not a picture")
    for link, target in {"dangling.jpg": "nowhere.jpg", "loop.jpg": "loop.jpg"}.items():
        (folder / link).symlink_to(target)
    _save_image(folder / "thread.png", size=(3000, 1))
    broken = ["cut.jpg", "dangling.jpg", "loop.jpg", "text.png", "thread.png"]
    predictions = _run(*probe, [folder], tmp_path / "out")
    assert [Path(path).name for path, _ in predictions.skipped] == broken
    assert all(reason for _, reason in predictions.skipped)
    assert [box["file_name"] for box in predictions.results] == ["whole.jpg"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole.jpg"]


def test_an_extremely_long_image_is_drawn(probe, tmp_path):
    cfg, weights = probe
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 800, 1333
    files = [
        _save_image(tmp_path / f"{w}x{h}.jpg", size=(w, h)) for w, h in [(8000, 40), (9, 2000)]
    ]
    predictions = _run(cfg, weights, files, tmp_path / "out")
    assert len(predictions.results) == 2
    assert not predictions.undrawn
    with Image.open(tmp_path / "out" / "8000x40.jpg") as drawn:
        assert drawn.size == (8192, 41)  # enlarged to 8192 pixels, and not to 384 rows
    with Image.open(tmp_path / "out" / "9x2000.jpg") as drawn:
        assert drawn.size == (37, 8192)


def test_an_image_that_cannot_be_drawn_costs_the_drawing_alone(probe, tmp_path, monkeypatch):
    draw = Detections.draw
    failures = {"a.png": cv2.error("too long"), "b.png": OSError("encoder error")}

    def draw_or_fail(self):
        if self.file_name in failures:
            raise failures[self.file_name]
        return draw(self)

    monkeypatch.setattr(Detections, "draw", draw_or_fail)
    files = [_save_image(tmp_path / "in" / name) for name in ("a.png", "b.png", "c.png")]
    _save_image(tmp_path / "out" / "a.png")  # of an earlier prediction
    predictions = _run(*probe, files, tmp_path / "out")
    assert [box["file_name"] for box in predictions.results] == ["a.png", "b.png", "c.png"]
    assert predictions.undrawn == [(str(files[0]), "too long"), (str(files[1]), "encoder error")]
    assert predictions.num_images == 3
    assert not predictions.skipped
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c.png"]
    # A full disk ends the run.
    failures["a.png"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match=r"out/a\.png"):
        _run(*probe, files, tmp_path / "out")


def test_folders_are_searched_empty_ones_named_and_no_two_outputs_meet(tmp_path):
    for name in (str(tmp_path / "nowhere.jpg"), str(tmp_path)):
        with pytest.raises(UserError, match=name):
            find_inputs([name])

    for name in ["in/a.png", "in/a.bmp", "in/A.PNG", "in/deep/a.png", "in/out/old.png", "b/a.png"]:
        _save_image(tmp_path / name)
    (tmp_path / "in" / "notes.txt").write_text("")
    inputs = [str(tmp_path / "in"), str(tmp_path / "in" / "a.png"), str(tmp_path / "b")]
    files = find_inputs(inputs, exclude=tmp_path / "in" / "out")
    assert [file.name for file in files] == ["A.PNG", "a.bmp", "a.png", "deep/a.png", "a.png"]
    names = [path.as_posix() for path in name_outputs(files)]
    assert names == ["A.png", "a-2.png", "a-3.png", "deep/a.png", "a-4.png"]


def _save_alone(path, cfg, config=None):
    """Writes weights that hold all that prediction needs; ``config`` replaces what they say."""
    info = WeightsInfo.from_config(cfg, iteration=1, commit="")
    info = dataclasses.replace(info, config=info.config if config is None else config)
    save_weights(str(path), build_model(cfg).state_dict(), info)
    return str(path)


def test_safetensors_alone_are_enough_to_predict_and_unknown_ids_count_from_one(tmp_path):
    trained = make_probe_config()
    trained.OUTPUT_DIR = "a folder of whoever trained them"
    weights = _save_alone(tmp_path / "w.safetensors", trained)
    (tmp_path / "config.yaml").write_text("of other weights: true")
    cfg = load_run_config(weights, device="cpu", opts=["INPUT.MIN_SIZE_TEST", "48"])
    assert cfg.MODEL.CLASS_NAMES == ["square", "disc"]
    assert cfg.INPUT.MIN_SIZE_TEST == 48
    assert cfg.OUTPUT_DIR == get_cfg().OUTPUT_DIR
    red = np.full((100, 200, 3), (0, 0, 255), np.uint8)  # BGR, where the model wants RGB
    instances = build_predictor(cfg)(red)["instances"]
    assert instances.scores.item() == pytest.approx(1)
    for ids, expected in ((cfg.MODEL.CATEGORY_IDS, 9), ([], 2)):
        (box,) = Detections(instances, ["square", "disc"], ids, red).to_coco()
        assert box["category_id"] == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("MODEL: {DEVICE: [", ""),
        ("MODEL: {CLASS_NAME: [a]}", "MODEL.CLASS_NAMES"),
        ("a: !!python/object/apply:os.system [touch ran]", ""),
        ("_BASE_: /etc/hostname", ""),
        (r'"\x5fBASE_": /etc/hostname', "refers to other files"),
        ("[" * 1000, ""),
        ("MODEL: {LOAD_PROPOSALS: true}", "MODEL.LOAD_PROPOSALS"),
        ("DATASETS: {PROPOSAL_FILES_TEST: ['http://a/p.pkl']}", "DATASETS.PROPOSAL_FILES_TEST"),
    ],
)
def test_a_strangers_config_inside_weights_is_read_with_care(tmp_path, config, named):
    weights = _save_alone(tmp_path / "w.safetensors", make_probe_config(), config)
    with pytest.raises(UserError, match=f"{weights}.*{named}"):
        load_run_config(weights)


def test_a_config_beside_weights_makes_nothing_unpickled_unless_it_is_asked_for(tmp_path):
    torch.save({"model": {}}, tmp_path / "w.pth")
    (tmp_path / "config.yaml").write_text("DATASETS: {PROPOSAL_FILES_TRAIN: [p.pkl]}")
    weights = f"{tmp_path}/w.pth"
    with pytest.raises(UserError, match=r"config\.yaml.*PROPOSAL_FILES"):
        load_run_config(weights)
    named = load_run_config(weights, f"{tmp_path}/config.yaml")
    assert named.DATASETS.PROPOSAL_FILES_TRAIN == ("p.pkl",)
    cfg = load_run_config(weights, opts=["DATASETS.PROPOSAL_FILES_TRAIN", "()"])
    assert cfg.DATASETS.PROPOSAL_FILES_TRAIN == ()


def test_weights_of_other_classes_than_the_configs_do_not_predict(tmp_path):
    weights = _save_alone(tmp_path / "w.safetensors", make_retinanet_config())
    cfg = load_run_config(weights, device="cpu")
    build_predictor(cfg)
    named = make_retinanet_config()
    named.MODEL.CLASS_NAMES = ["a", "b", "c"]
    cfg.MODEL.WEIGHTS = _save_alone(tmp_path / "named.safetensors", named)
    cfg.MODEL.CLASS_NAMES = ["a", "c", "b"]
    with pytest.raises(UserError, match=r"\['a', 'b', 'c'\]"):
        build_predictor(cfg)


PREDICT = load_tool("predict")


def _predict(words, json_file):
    """Runs the tool on the CPU; returns its exit code and what it wrote."""
    opts = ["INPUT.MIN_SIZE_TEST", "48"]
    code = PREDICT.main([*words.split(), "--json", str(json_file), "--device", "cpu", *opts])
    return code, json.loads(json_file.read_text())


def test_a_folder_becomes_images_and_results_that_pycocotools_reads_fast_or_not(
    photos, detector, tmp_path, capsys
):
    words = f"--weights {detector} --images {photos} --threshold 0"
    code, results = _predict(f"{words} --output {tmp_path / 'out'}", tmp_path / "boxes.json")
    assert code == 1  # one is no image
    drawn = tmp_path / "out"
    assert {p.relative_to(drawn).as_posix() for p in drawn.rglob("*.*")} == {*SIZES}
    assert Image.open(drawn / "a.png").size == (512, 384)  # enlarged for the labels
    assert {result["image_id"] for result in results} == {1, 2, 3, 4}
    assert "MODEL.CATEGORY_IDS" in capsys.readouterr().out
    truth = COCO()
    ids = [{"id": i} for i in (1, 2, 3, 4)]
    truth.dataset = {"info": {}, "images": ids, "categories": ids}
    truth.createIndex()
    assert len(truth.loadRes(results).anns) == len(results) > 0

    _, fast = _predict(f"{words} --fast", tmp_path / "fast.json")
    assert "fold" in capsys.readouterr().err
    for one, other in zip(results, fast, strict=True):
        assert one["category_id"] == other["category_id"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
        assert one["bbox"] == pytest.approx(other["bbox"], abs=0.05)


def test_without_boxes_the_output_says_what_the_detector_knows(photos, tmp_path, capsys):
    words = f"--weights retinanet/285M_bccd --images {photos / 'a.png'} --threshold 1"
    code, results = _predict(words, tmp_path / "boxes.json")
    assert (code, results) == (0, [])
    said = capsys.readouterr().out
    for hint in ("--threshold 1", "RBC, WBC, Platelets", "qbheat train"):
        assert hint in said


def test_an_override_that_the_detector_does_not_read_is_named(detector, caplog):
    open_weights(str(detector), device="cpu", opts=["MODEL.RETINANET.TOPK_CANDIDATES_TEST", "9"])
    assert "without effect" not in caplog.text
    open_weights(str(detector), device="cpu", opts=["MODEL.FCOS.TOPK_CANDIDATES_TEST", "9"])
    assert "do you mean MODEL.RETINANET.TOPK_CANDIDATES_TEST?" in caplog.text


def test_each_image_gets_its_five_likeliest_classes_and_the_rest_is_named(
    classifier, tmp_path, capsys
):
    root, cfg, weights = classifier
    code, results = _predict(f"--weights {weights} --images {root}", tmp_path / "classes.json")
    assert (code, len(results)) == (1, 6)
    said = capsys.readouterr().err
    assert "x.jpg" in said
    torch.manual_seed(4)
    model, mapper = build_model(cfg).eval(), build_mapper(cfg, is_train=False)
    for entry in results:
        record = {"file_name": f"{root}/{entry['file_name']}", "image_id": 0}
        with torch.no_grad():
            scores = model([mapper(record)])[0]["scores"]
        order = sorted(range(6), key=lambda k: -float(scores[k]))[:5]
        assert [row["name"] for row in entry["classes"]] == [NAMES[k] for k in order]
        class_scores = torch.tensor([row["score"] for row in entry["classes"]])
        torch.testing.assert_close(class_scores, scores[order], rtol=1e-4, atol=1e-6)


def test_bad_arguments_are_named_with_exit_code_2(photos, detector, classifier, tmp_path, capsys):
    probe = save_run(make_probe_config(), tmp_path / "run")
    pretrained = save_run(load_config(RECIPE, [w for p in OPTS.items() for w in p]), tmp_path / "p")
    out = f"--output {tmp_path / 'out'}"
    (tmp_path / "m.onnx").touch()
    for words, named in (
        (f"--weights none.pth --images {photos} {out}", "'none.pth'"),
        (f"--weights {probe} --images nowhere {out}", "'nowhere'"),
        (f"--weights {probe} --images {photos} --output a.jpg", "'a.jpg'"),
        (f"--weights {probe} --images {photos} --json {tmp_path}", str(tmp_path)),
        (f"--weights {probe} --images {photos} {out} --threshold 2", "--threshold"),
        (f"--weights {probe} --images {photos} {out} A.B 1", "A.B"),
        (f"--weights {tmp_path}/m.onnx --images {photos} --json y --fast", "--fast"),
        (f"--weights {pretrained} --images {photos} {out}", "QBHeat"),
        (f"--weights {classifier[2]} --images {photos} {out}", "--output"),
        (f"--weights {classifier[2]} --images {photos} --json y --tile 64", "--tile"),
    ):
        arguments = [*words.split()[:4], "--device", "cpu", *words.split()[4:]]
        assert named in refuse(PREDICT.main, arguments, capsys)


BOXES = [[10.0, 20.0, 40.0, 60.0], [0.0, 0.0, 100.0, 80.0]]


def _make(ids=(17, 18), **changes):
    instances = Instances(
        (80, 100),
        pred_boxes=Boxes(torch.tensor(BOXES)),
        scores=torch.tensor([0.75, 0.5]),
        pred_classes=torch.tensor([1, 0]),
    )
    image = np.zeros((80, 100, 3), np.uint8)
    return Detections(instances, ["cat", "dog"], ids, image, **{"file_name": "a b.jpg", **changes})


def test_boxes_classes_and_scores_survive_every_conversion(tmp_path):
    detections = _make()
    assert repr(detections) == "Detections(a b.jpg, 100x80: 1 dog, 1 cat)"
    assert [box.xyxy for box in detections] == [tuple(box) for box in BOXES]
    assert [(box.class_name, box.class_id, box.score) for box in detections] == [
        ("dog", 1, 0.75),
        ("cat", 0, 0.5),
    ]
    assert detections.to_coco(7) == [
        {"image_id": 7, "category_id": 18, "bbox": [10.0, 20.0, 30.0, 40.0], "score": 0.75},
        {"image_id": 7, "category_id": 17, "bbox": [0.0, 0.0, 100.0, 80.0], "score": 0.5},
    ]
    assert [box["category_id"] for box in _make(ids=()).to_coco()] == [2, 1]
    assert detections.select(0.6).labels == ["dog"]
    assert detections.select(0.5, ["cat"]).labels == ["cat"]
    detections.save(tmp_path / "new" / "drawn.png")
    with Image.open(tmp_path / "new" / "drawn.png") as drawn:
        assert drawn.width / drawn.height == pytest.approx(100 / 80, rel=0.02)
    with pytest.raises(UserError, match=r"x\.unknown"):
        detections.save(tmp_path / "x.unknown")


def test_label_studio_gets_per_cent_and_images_without_boxes(tmp_path):
    empty = _make(file_name=os.fsdecode(b"k\xfche.jpg")).select(1)  # Latin-1
    of_file = dataclasses.replace(empty, source=tmp_path / "b.jpg")
    save_annotations([_make(), empty, of_file], tmp_path / "tasks.json", "label-studio")
    first, second, third = json.loads((tmp_path / "tasks.json").read_text("utf-8"))
    assert first["data"] == {"image": "/data/local-files/?d=a%20b.jpg"}
    shape = first["predictions"][0]["result"][0]
    assert (shape["from_name"], shape["to_name"]) == ("label", "image")
    assert (shape["original_width"], shape["original_height"]) == (100, 80)
    assert shape["value"] == {
        "x": 10.0,
        "y": 25.0,
        "width": 30.0,
        "height": 50.0,
        "rotation": 0,
        "rectanglelabels": ["dog"],
    }
    assert second == {"data": {"image": "/data/local-files/?d=k%FChe.jpg"}}
    assert third == {"data": {"image": f"/data/local-files/?d={tmp_path}/b.jpg"}}


def test_results_name_the_classes_and_cvat_gets_a_file_that_pycocotools_reads(tmp_path):
    save_annotations([_make()], tmp_path / "boxes.json", "coco")
    results = json.loads((tmp_path / "boxes.json").read_text())
    assert [box["category_name"] for box in results] == ["dog", "cat"]
    save_annotations([_make(), _make(file_name="c.jpg")], tmp_path / "cvat.json", "cvat")
    dataset = COCO(str(tmp_path / "cvat.json"))
    assert [image["file_name"] for image in dataset.loadImgs([1, 2])] == ["a b.jpg", "c.jpg"]
    assert {c["id"]: c["name"] for c in dataset.loadCats([17, 18])} == {17: "cat", 18: "dog"}
    (dog,) = dataset.loadAnns(dataset.getAnnIds(imgIds=[2], catIds=[18]))
    assert (dog["bbox"], dog["area"], dog["iscrowd"]) == ([10.0, 20.0, 30.0, 40.0], 1200.0, 0)


@pytest.mark.parametrize("format", ["cvat", "label-studio", "yolo"])
def test_frames_and_unknown_formats_are_refused(tmp_path, format):
    with pytest.raises(UserError, match=format):
        save_annotations([_make(frame=3)], tmp_path / "x.json", format)
    assert not (tmp_path / "x.json").exists()
