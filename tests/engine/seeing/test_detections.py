# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detections of runs: from their last evaluation or worked out, on one set or on several.

The detector finds the left half of every image to be a disc, the surer the redder the image is.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qbheat_det.analysis import detection_charts
from qbheat_det.analysis.exhibit import Exhibit, write_exhibit
from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing import detections
from qbheat_det.engine.seeing.detections import see_detections
from qbheat_det.engine.seeing.options import SightOptions
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.sights import SIGHTS
from qbheat_det.engine.seeing.subject import Subject, open_subjects
from tests.engine.seeing.encoder_subjects import classifier_config, cut_short, make_subject
from tests.engine.seeing.run_folders import write_run
from tests.engine.tiny_detectors import make_probe_config

SQUARE, DISC = 4, 9  # category ids
REDS = (204, 102, 51)  # scores 0.8, 0.4, 0.2
LEFT, RIGHT = [0, 0, 32, 32], [32, 0, 32, 32]  # XYWH
# Of two discs one is found, with the highest score: precision is 1 at the 51 recalls up to 1/2.
AP_DISC = 100 * 51 / 101


def _write_set(folder: Path) -> Path:
    """Three images: a disc on the left, a square on the left, a disc on the right."""
    (folder / "images").mkdir(parents=True)
    for index, red in enumerate(REDS, start=1):
        pixels = np.zeros((32, 64, 3), np.uint8)
        pixels[..., 0] = red
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
    boxes = [(1, DISC, LEFT), (2, SQUARE, LEFT), (3, DISC, RIGHT)]
    content = {
        "images": [
            {"id": i, "file_name": f"{i}.png", "width": 64, "height": 32} for i in (1, 2, 3)
        ],
        "annotations": [
            {"id": i, "image_id": i, "category_id": k, "bbox": box, "area": 1024, "iscrowd": 0}
            for i, k, box in boxes
        ],
        "categories": [{"id": SQUARE, "name": "square"}, {"id": DISC, "name": "disc"}],
    }
    (folder / "boxes.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _write_detector(
    folder: Path, data: Path, *, ap: float = AP_DISC / 2, found: Sequence[Any] | None = None
) -> Path:
    cfg = make_probe_config()
    cfg.DATASETS.TEST = ("custom_val",)
    cfg.DATALOADER.NUM_WORKERS = 0
    command = ["--val-json", data / "boxes.json", "--val-images", data / "images"]
    run = write_run(folder, cfg, command=command, logged={"bbox/AP": ap})
    if found is not None:
        (run / "inference" / "custom_val").mkdir(parents=True)
        path = run / "inference" / "custom_val" / "coco_instances_results.json"
        path.write_text(json.dumps(found), encoding="utf-8")
    return run


def _found() -> list[dict[str, Any]]:
    return [
        {"image_id": i, "category_id": DISC, "bbox": LEFT, "score": red / 255}
        for i, red in enumerate(REDS, start=1)
    ]


def _see(*runs: Path, images: int = 3, **extra: Any) -> Exhibit:
    subjects = open_subjects([str(run) for run in runs], device="cpu")
    return see_detections(subjects, SightOptions(num_images=images, extra=extra))


def _forbid_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Subject) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr(Subject, "model", property(fail))


@pytest.fixture(autouse=True)
def _charts_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of charts take seconds, and have tests of their own."""
    monkeypatch.setattr(detection_charts, "encode", lambda *args: b"<svg/>")


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ap_of_sizes", "ap_of_classes", "precision_recall", "class_precision_recall"):
        monkeypatch.setattr(detections, f"plot_{name}", lambda *args, **kwargs: b"<svg/>")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_set(tmp_path_factory.mktemp("boxes"))


def test_figures_of_inference_are_those_of_the_hand(data: Path, tmp_path: Path) -> None:
    exhibit = _see(_write_detector(tmp_path / "run", data), score=0.1)
    (one,) = exhibit.figures["sets"]
    run = one["runs"]["run"]
    assert run["detections_from"] == "inference"
    assert run["AP50"] == pytest.approx(AP_DISC / 2)
    assert run["class_ap"] == pytest.approx({"square": 0, "disc": AP_DISC})
    assert one["boxes"] == {"square": 1, "disc": 2}
    assert run["errors"] == {
        "right": 1, "class": 1, "background": 1, "missed": 1,
        "localisation": 0, "duplicate": 0, "class and localisation": 0,
    }  # fmt: skip
    # Nothing is right on the square or on the disc on the right; both fill half of their images.
    assert [(miss["image_id"], miss["class"]) for miss in run["worst_misses"]] == [
        (2, "square"), (3, "disc"),
    ]  # fmt: skip
    (alarm,) = run["false_alarms"]
    assert alarm["image_id"] == 3
    assert alarm["score"] == pytest.approx(0.2)
    table = exhibit.table
    assert table is not None
    assert table.header == ("", "run")
    assert ["AP (%)", f"{AP_DISC / 2:.2f}"] in [list(row) for row in table.rows]
    assert list(exhibit.pictures) == [
        "sizes", "classes", "precision_recall", "class_precision_recall",
        "predictions_1", "predictions_2", "predictions_3", "misses", "false_alarms",
    ]  # fmt: skip
    for path in write_exhibit(exhibit, tmp_path / "seen"):
        assert path.stat().st_size > 0


@pytest.mark.usefixtures("no_charts")
def test_without_a_score_errors_count_from_the_best_f1(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forbid_models(monkeypatch)
    exhibit = _see(_write_detector(tmp_path / "run", data, found=_found()), images=1)
    run = exhibit.figures["sets"][0]["runs"]["run"]
    assert run["errors_from_score"] == pytest.approx(0.8)
    assert (run["errors"]["right"], run["errors"]["missed"]) == (1, 2)
    assert run["detections_from"] == "the run's last evaluation"
    assert "0.8" in exhibit.explanation[0]


@pytest.mark.usefixtures("no_charts")
def test_a_detector_that_is_right_nowhere_shows_what_it_takes_for_things(
    data: Path, tmp_path: Path
) -> None:
    wrong = [{**one, "bbox": [8, 24, 8, 8], "score": one["score"] / 100} for one in _found()]
    run = _write_detector(tmp_path / "lost", data, found=wrong, ap=0.0)
    exhibit = _see(run, images=1)
    found = exhibit.figures["sets"][0]["runs"]["lost"]
    assert found["nothing_is_right"]
    assert found["errors_from_score_because"].startswith("nothing is right at any score")
    assert (found["num_false_alarms"], found["errors"]["missed"]) == (3, 3)
    assert "false_alarms" in exhibit.pictures
    assert "Of lost no detection is right at any score" in exhibit.explanation[1]
    assert "lost, scores from 0.002: 1" in exhibit.pictures["predictions_1"].alt


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    "found",
    [
        pytest.param(_found()[1:], id="cut short"),
        pytest.param([{**one, "image_id": 77} for one in _found()], id="of another set"),
        pytest.param([{"image_id": 1}], id="without boxes"),
        pytest.param({"a": 1}, id="of another kind"),
    ],
)
def test_a_file_of_another_evaluation_is_not_believed(
    data: Path, tmp_path: Path, found: Any
) -> None:
    exhibit = _see(_write_detector(tmp_path / "run", data, found=found), images=1)
    run = exhibit.figures["sets"][0]["runs"]["run"]
    assert run["detections_from"] == "inference"
    assert run["AP"] == pytest.approx(AP_DISC / 2)


@pytest.mark.usefixtures("no_charts")
def test_runs_on_one_set_share_charts_and_pictures(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forbid_models(monkeypatch)
    better = copy.deepcopy(_found())
    better[2]["bbox"] = RIGHT
    # Right, wrong, right: 1 up to recall 1/2, then 2/3.
    ap = 100 * (51 + 50 * 2 / 3) / 101 / 2
    runs = [
        _write_detector(tmp_path / "one", data, found=_found()),
        _write_detector(tmp_path / "two", data, found=better, ap=ap),
    ]
    exhibit = _see(*runs, images=1)
    (one,) = exhibit.figures["sets"]
    assert list(one["runs"]) == ["one", "two"]
    assert one["runs"]["two"]["AP"] == pytest.approx(ap)
    assert "misses_1" in exhibit.pictures
    assert "misses_2" in exhibit.pictures
    # All three detections count from the score of the best F1 on; only class 4 is wrong.
    assert "false_alarms_2" not in exhibit.pictures
    alt = exhibit.pictures["predictions_1"].alt
    assert "one, scores from 0.8: 1" in alt
    assert "two" in alt
    assert exhibit.table is not None
    assert exhibit.table.header == ("", "one", "two")


@pytest.mark.usefixtures("no_charts")
def test_runs_on_different_sets_have_charts_of_their_own(data: Path, tmp_path: Path) -> None:
    other = _write_set(tmp_path / "other")
    runs = [
        _write_detector(tmp_path / "one", data, found=_found()),
        _write_detector(tmp_path / "two", other, found=_found()),
    ]
    exhibit = _see(*runs, images=1)
    assert {"sizes_set1", "sizes_set2"} <= set(exhibit.pictures)
    assert [list(one["runs"]) for one in exhibit.figures["sets"]] == [["one"], ["two"]]
    assert any("do not compare" in text for text in exhibit.explanation)
    # A set that is given judges both.
    flags = {"json": str(data / "boxes.json"), "images_root": str(data / "images")}
    (one,) = _see(*runs, images=1, **flags).figures["sets"]
    assert list(one["runs"]) == ["one", "two"]


@pytest.mark.usefixtures("no_charts")
def test_broken_images_are_passed_over_in_pictures(tmp_path: Path) -> None:
    data = _write_set(tmp_path / "data")
    (data / "images" / "2.png").write_bytes(b"no image")
    exhibit = _see(_write_detector(tmp_path / "run", data, found=_found()))
    assert [name for name in exhibit.pictures if name.startswith("predictions")] == [
        "predictions_1", "predictions_2",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_charts")
def test_what_cannot_be_judged_is_named_with_its_reason(data: Path, tmp_path: Path) -> None:
    cfg = make_probe_config()
    cfg.DATASETS.TEST = ("custom_val",)
    write_run(tmp_path / "lost", cfg)
    run = _write_detector(tmp_path / "run", data, found=_found())
    other = make_subject(tmp_path, classifier_config(), "names")
    lost = Subject.open(str(tmp_path / "lost"), device="cpu")
    said = r"no detections: 'names' \(classification\) is no detector; .*test set"
    with pytest.raises(NothingToSee, match=said):
        see_detections([other, lost], SightOptions())
    sound = Subject.open(str(run), device="cpu")
    cut = cut_short(sound, tmp_path)
    exhibit = see_detections([lost, cut, sound], SightOptions(num_images=1))
    assert exhibit.figures["left_out"][0] in exhibit.explanation[-1]
    assert exhibit.figures["left_out"][1].startswith("'cut': ")
    cfg.MODEL.CLASS_NAMES = ["disc", "square"]
    flags = {"json": str(data / "boxes.json"), "images_root": str(data / "images")}
    write_run(tmp_path / "swapped", cfg)
    with pytest.raises(NothingToSee, match=r"classes of 'swapped' .2: disc, square. are not those"):
        _see(tmp_path / "swapped", **flags)


def test_the_flags_of_a_set_go_together(data: Path, tmp_path: Path) -> None:
    run = _write_detector(tmp_path / "run", data, found=_found())
    with pytest.raises(UserError, match="--json and --images-root go together"):
        _see(run, json=str(data / "boxes.json"))
    assert SIGHTS["detections"].default_flags() == {
        "json": None, "images_root": None, "score": None,
    }  # fmt: skip
