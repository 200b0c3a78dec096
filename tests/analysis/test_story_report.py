# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What the report of pre-training and two probes says, from figures known in advance."""

import json
import math
from pathlib import Path

import pytest
from detectron2.config import CfgNode

from qbheat_det.analysis.html_report import Report, Section
from qbheat_det.analysis.story_report import (
    HOW_TO_READ,
    PRETRAINED,
    RANDOM,
    Probe,
    Story,
    describe_story,
    format_duration,
)
from qbheat_det.config import get_cfg


def _cfg(output: Path, train: str, val: str) -> CfgNode:
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(output)
    output.mkdir(parents=True, exist_ok=True)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (train,), (val,)
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH = 1500, 16
    return cfg


def _story(root: Path, trained: dict[str, float], random: dict[str, float]) -> Story:
    probes = {
        name: Probe(_cfg(root / name, "some_train", "some_val"), metrics)
        for name, metrics in ((PRETRAINED, trained), (RANDOM, random))
    }
    return Story(
        pretraining=_cfg(root / "pretraining", "some_images", "other_images"),
        probes=probes,
        config_files=("configs/first.yaml", "configs/second.yaml"),
        seconds=372,
        num_unlabelled=5000,
        num_train=2400,
        num_val=400,
        score_threshold=0.4,
    )


def _log(folder: Path, **values: list[float]) -> None:
    lines = [
        json.dumps({"iteration": i, **{key.replace("__", "/"): v[i] for key, v in values.items()}})
        for i in range(len(next(iter(values.values()))))
    ]
    (folder / "metrics.json").write_text("\n".join(lines))


def _sections(report: Report) -> dict[str, Section]:
    return {section.title: section for section in report.sections}


def test_both_backbones_stand_side_by_side_with_a_word_on_noise(tmp_path: Path) -> None:
    story = _story(tmp_path, {"AP": 41.26, "AP50": 70.0}, {"AP": 39.0, "AP50": math.nan})
    report = describe_story(story, [])
    figures = {figure.label: figure.value for figure in report.figures}
    assert figures == {
        "AP50, QB-Heat": "70.0",
        "AP50, random": "n/a",
        "Steps of pre-training": "1,500",
        "Wall time": "6.2 min",
    }
    first = report.sections[0]
    assert first.paragraphs == [HOW_TO_READ]
    assert first.table is not None
    assert first.table.rows == [
        ("QB-Heat", "41.3", "70.0", "n/a"),
        ("random", "39.0", "n/a", "n/a"),
    ]
    for count in ("5,000 pictures without", "2,400 pictures with", "400 pictures that neither"):
        assert count in report.lead


def test_curves_and_looks_appear_where_the_runs_left_them(tmp_path: Path) -> None:
    story = _story(tmp_path, {"AP-disc": 3.0, "APs": 1.0}, {"AP-disc": 2.0})
    assert "Spectrum of the linear maps" not in _sections(describe_story(story, []))
    for name in (PRETRAINED, RANDOM):
        _log(tmp_path / name, bbox__AP=[1.0, 2.0], bbox__AP50=[3.0, 4.0])
    _log(
        tmp_path / "pretraining",
        reconstruction__loss=[1.0, 0.8],
        reconstruction__loss_corner=[1.0, 0.9],
        reconstruction__loss_centre=[1.0, 0.7],
    )
    looks = tmp_path / "pretraining" / "looks"
    looks.mkdir()
    for steps in (0, 20):
        (looks / f"spectrum_{steps:07d}.svg").write_bytes(b"<svg/>")
        (looks / f"reconstructions_{steps:07d}.png").write_bytes(b"png")
    report = describe_story(story, [])
    sections = _sections(report)
    assert {f.label: f.value for f in report.figures}["Held-out loss"] == "0.800"
    assert len(report.sections[0].pictures) == 2
    assert [p.caption for p in sections["Spectrum of the linear maps"].pictures] == [
        "After 20 steps."
    ]
    assert len(sections["What it makes of a quarter of a picture"].pictures) == 2
    table = sections["AP by class and size"].table
    assert table is not None
    assert table.rows[:2] == [("disc", "3.0", "2.0"), ("small (below 32² pixels)", "1.0", "n/a")]


def test_runs_evaluated_at_other_steps_are_not_drawn_as_one(tmp_path: Path) -> None:
    story = _story(tmp_path, {}, {})
    _log(tmp_path / PRETRAINED, bbox__AP=[1.0, 2.0], bbox__AP50=[3.0, 4.0])
    _log(tmp_path / RANDOM, bbox__AP=[1.0, 2.0, 3.0], bbox__AP50=[3.0, 4.0, 5.0])
    assert describe_story(story, []).sections[0].pictures == []


def test_commands_name_the_files_of_the_runs(tmp_path: Path) -> None:
    (commands,) = [
        s.commands for s in describe_story(_story(tmp_path, {}, {}), []).sections if s.commands
    ]
    assert commands[0].endswith("--config-file configs/first.yaml")
    assert f"MODEL.WEIGHTS {tmp_path}/pretraining/model_final.safetensors" in commands[1]
    assert f"--weights {tmp_path}/{PRETRAINED}/model_final.pth" in commands[2]


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.4, "12 s"), (60, "1 min 0 s"), (372, "6 min 12 s")]
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
