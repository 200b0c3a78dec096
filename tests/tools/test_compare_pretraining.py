# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/compare_pretraining.py: the plan, and what is refused before anything runs."""

from pathlib import Path

import pytest

from tests.data.pictures import draw, save
from tests.tool_modules import load_tool

main = load_tool("compare_pretraining").main


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    flags = ["--epochs", "2", "--output-dir", str(tmp_path / "out")]
    for split in ("train", "val"):
        for i, name in enumerate("ab"):
            (tmp_path / split / name).mkdir(parents=True)
            save(tmp_path / split / name / "0.png", draw(64, 72, seed=i))
        flags += [f"--{split}-folder", str(tmp_path / split)]
    return flags


def test_the_plan_lists_the_commands_and_runs_none(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--objectives", "random", "qb_heat", "--seeds", "1", "5", "--plan"]
    assert main([*words, *flags, "SOLVER.BASE_LR", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{name} seed {seed} {stage}" for seed in (1, 5)
        for name, stage in (("random", "probes"), ("qb_heat", "pretraining"), ("qb_heat", "probes"))
    ]  # fmt: skip
    assert lines[1].endswith("SOLVER.EPOCHS 2.0 SOLVER.BASE_LR 0.5")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--objectives", "simclr"], "simclr"),
        (["--probes", "svm"], "svm"),
        (["--epochs", "0"], "--epochs"),
        (["--seeds", "1", "1"], "--seeds"),
        (["SEED", "3"], "SEED"),
        (["SOLVER.BASE_LR"], "partner"),
        (["SOLVER.BASE_RATE", "1"], "SOLVER.BASE_RATE"),
        (["--val-folder", "NONE"], "NONE"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    flags: list[str],
    named: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--objectives", "random", "--jobs", "1", *flags])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
