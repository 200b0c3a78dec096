# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One command from class folders to a table, which goes on where it was."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.config import get_config_path
from tests.data.pictures import draw, save
from tests.tool_modules import load_tool

main = load_tool("compare_pretraining").main
_TINY = f"""
_BASE_: {get_config_path("objectives/qb_heat.yaml")}
MODEL:
  QB_HEAT:
    FEATURE_DIM: 16
    DECODER_DEPTH: 1
    DECODER_DIM: 16
"""
_OPTS = ["INPUT.PRETRAIN.SIZE", "64", "SOLVER.IMS_PER_BATCH", "4", "SOLVER.WARMUP_EPOCHS", "0.0"]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Flags that name two folders of two classes each."""
    flags = []
    for split, first in (("train", 0), ("val", 100)):
        for i, name in enumerate("ab"):
            (tmp_path / split / name).mkdir(parents=True)
            for j in range(4):
                save(tmp_path / split / name / f"{j}.png", draw(64, 72, seed=first + 10 * i + j))
        flags += [f"--{split}-folder", str(tmp_path / split)]
    return flags


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_plan_lists_stages_and_runs_nothing(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ["--objectives", "random", "qb_heat", "--epochs", "2", "--seeds", "1", "5"]
    main([*data, *words, "--output-dir", str(output), "--plan", *_OPTS])
    text = capsys.readouterr().out
    rows = re.findall(r"\| \d+ +\| (\w+) +\| (\d) +\| (\w+) +\| *[\d,]* *\| to do", text)
    assert rows[:4] == [
        ("random", "1", "backbone"),
        ("random", "1", "probes"),
        ("random", "1", "probes_as_stored"),
        ("qb_heat", "1", "pretraining"),
    ]
    assert len(rows) == 14
    # Two epochs of 8 images are 4 steps of 4, whose time is measured.
    assert re.search(r"qb_heat +\| 5 +\| pretraining +\| 4 +\| to do +\| about \d+", text)
    assert "2 epochs of 8 images; probes learn from 8 images of 2 classes, judged on 8." in text
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--objectives", "simclr"], "no objective 'simclr'"),
        (["--probes", "svm"], "svm"),
        (["--epochs", "0"], "--epochs must be above 0"),
        (["--jobs", "0"], "--jobs and --recalibrate-bn at least 1"),
        (["--seeds", "1", "1"], "--seeds must be different"),
        (["--detectors", "retinanet"], "--detectors and --train-json.* go together"),
        (["--val-json", "x.json"], "--detectors and --train-json.* go together"),
        (["SEED", "3"], "SEED is for --seeds to say"),
        (["SOLVER.MAX_ITER", "3"], "SOLVER.MAX_ITER is for --epochs to say"),
        (["SOLVER.BASE_LR"], "one has no partner"),
        (["SOLVER.BASE_RATE", "1"], "unknown config key"),
        (["--val-folder", "NONE"], "NONE"),
    ],
)
def test_what_cannot_be_compared_ends_in_a_sentence_before_anything_runs(
    words: list[str],
    expected: str,
    data: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    known = ["--epochs", "1", "--objectives", "random", "--output-dir", str(output)]
    with pytest.raises(SystemExit) as stopped:
        main([*data, *known, *words])
    assert stopped.value.code == 2
    assert re.search(expected, capsys.readouterr().err)
    assert not output.exists()


@pytest.mark.slow
def test_a_comparison_is_made_once_and_told_at_any_time(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = tmp_path / "tiny.yaml", tmp_path / "out"
    config.write_text(_TINY)
    words = [*data, "--objectives", "random", str(config), "--epochs", "1", "--seeds", "1"]
    words += ["--probes", "knn", "--probes-as-stored", "--output-dir", str(output), *_OPTS]
    main([*words, "--jobs", "2"])
    first = capsys.readouterr()
    found: dict[str, Any] = json.loads((output / "comparison.json").read_text())
    assert "5 of 5 stages done" in first.out
    assert first.out.strip() == (output / "comparison.md").read_text().strip()
    figures = found["summary"]["tiny"]
    assert figures["pretraining/images_seen"]["values"] == {"1": 8.0}
    assert figures["probes/knn"]["mean"] in [12.5 * hits for hits in range(9)]
    assert figures["probes/knn"] == {**figures["probes/knn"], "deviation": None}
    backbone = next(one for one in found["results"] if one["stage"] == "backbone")
    assert backbone["figures"]["recalibrated_images"] == 8
    assert (output / "comparison.svg").is_file()

    results = [path for path in times(output) if path.endswith("seed1/probes.json")]
    before = {path: (output / path).stat().st_mtime_ns for path in results}
    main(words)
    assert {path: (output / path).stat().st_mtime_ns for path in results} == before
    main([*words, "--plan"])
    assert "5 of 5 stages are done" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "SOLVER.BASE_LR", "0.5"])
    assert "SOLVER.BASE_LR 0.0015 -> 0.5" in capsys.readouterr().err
