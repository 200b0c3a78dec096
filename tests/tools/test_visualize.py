# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/see.py: what can be seen is said, and what is seen is written."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from qbheat_det.engine.seeing.sights import SIGHTS

from ..tool_modules import load_tool


@pytest.fixture(scope="module")
def see() -> ModuleType:
    return load_tool("see")


def make_run(folder: Path, *, slope: float = 1.0) -> Path:
    """Writes a log of 40 steps, as of a run that was interrupted before its first checkpoint."""
    folder.mkdir(parents=True)
    records = [
        {"iteration": i, "time": 0.5, "epoch": (i + 1) / 10, "total_loss": slope / (i + 1),
         "lr": 0.1, **({"bbox/AP": slope * i} if i in (19, 39) else {})}
        for i in range(9, 40, 10)
    ]  # fmt: skip
    (folder / "metrics.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_list_has_every_sight_with_a_summary(
    see: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert see.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SIGHTS)
    assert all(SIGHTS[line.split()[0]].summary in line for line in lines)


def test_curves_of_two_runs_are_pictures_with_their_numbers_beside_them(
    see: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", slope=2.0)]
    words = ["curves", str(runs[0]), f"other={runs[1]}", "--axis", "minutes"]
    assert see.main([*words, "--output", str(tmp_path / "out")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(path.name for path in written) == sorted(
        path.name for path in (tmp_path / "out").iterdir()
    )
    assert "curves_total-loss.svg" in {path.name for path in written}
    content = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert content["figures"]["runs"]["other"]["bbox/AP"] == {
        "minutes": [pytest.approx(20 * 0.5 / 60), pytest.approx(40 * 0.5 / 60)],
        "values": [38.0, 78.0],
    }
    assert [row[0] for row in content["table"]["rows"]] == ["a", "other"]


def test_an_axis_that_no_log_tells_is_a_sentence_and_exit_code_1(
    see: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a")
    # How many images a step takes is in the config, and there is none.
    words = ["curves", str(run), "--axis", "images", "--output", str(tmp_path / "out")]
    assert see.main(words) == 1
    error = capsys.readouterr().err
    assert "nothing to see: no curves: the log of 'a' does not tell images seen" in error
    assert not (tmp_path / "out").exists()


def test_mistakes_end_with_exit_code_2(see: ModuleType, tmp_path: Path) -> None:
    run = str(make_run(tmp_path / "a"))
    for words in (
        [],
        ["aurora", "run"],
        ["curves"],
        ["curves", str(tmp_path / "none")],
        ["curves", run, "--seed", str(2**70)],
        ["curves", run, "--seed", "-1"],
        ["curves", run, "--output", str(tmp_path / "a" / "metrics.json")],
    ):
        with pytest.raises(SystemExit) as ended:
            see.main(words)
        assert ended.value.code == 2


@pytest.mark.parametrize(
    ("sight", "words", "said"),
    [
        ("detections", "--score nan", "--score: a number from 0 to 1, not 'nan'"),
        ("detections", "--score 2", "a number from 0 to 1, not '2'"),
        ("detections", "--score -1", "a number from 0 to 1, not '-1'"),
        ("beyond", "--distances 1 nan", "a number above 0 and at most 4, not 'nan'"),
        ("beyond", "--distances 0", "a number above 0 and at most 4, not '0'"),
        ("correlation", "--size 0", "--size: a whole number of at least 1, not '0'"),
        ("correlation", "--map=", "--map: a name, not ''"),
        ("attention", "--attention-size 0", "a whole number of at least 1, not '0'"),
        ("attention", "--attention-images -1", "a whole number of at least 1, not '-1'"),
        ("queries", "--query-boxes 0", "a whole number of at least 1, not '0'"),
        ("heat", "--heat-images -3", "a whole number of at least 1, not '-3'"),
        ("spectrum", "--checkpoints -1", "a whole number of at least 0, not '-1'"),
        ("curves", "--num-images many", "--num-images: a whole number of at least 1, not 'many'"),
        ("curves", "--seed 4294967296", "a whole number from 0 to 4294967295, not '4294967296'"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_a_sentence(
    see: ModuleType, capsys: pytest.CaptureFixture[str], sight: str, words: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        see.parse_args([sight, "run", *words.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_misspelt_key_is_refused_also_by_sights_that_need_no_config(
    see: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, bare = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (run / "config.yaml").write_text("SEED: 1\n")
    out = ["--output", str(tmp_path / "out")]
    for opts in (["MODEL.FOO", "1"], ["MODEL.DEVICE"]):
        with pytest.raises(SystemExit) as ended:
            see.main(["curves", str(run), *out, "--opts", *opts])
        assert ended.value.code == 2
        assert opts[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # A run that has no config costs the others nothing.
    assert see.main(["curves", str(run), str(bare), *out, "--opts", "SEED", "2"]) == 0


def test_help_begins_with_a_capital_and_keeps_the_others(
    see: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        see.main(["detections", "--help"])
    assert "\nAP by size and class, " in capsys.readouterr().out
