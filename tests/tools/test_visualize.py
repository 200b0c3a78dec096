# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/visualize.py: its flags are the keyword arguments of the figures, and files are written."""

import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from qbheat_det.analysis import load_figures

from ..tool_modules import load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("visualize")


@pytest.fixture(scope="module")
def flags() -> ModuleType:
    return load_tool("figure_flags")


def make_run(folder: Path) -> str:
    """Writes a log of 40 steps, as of a run that was interrupted before its first checkpoint."""
    folder.mkdir(parents=True)
    records = [
        {"iteration": i, "time": 0.5, "epoch": (i + 1) / 10, "total_loss": 1 / (i + 1), "lr": 0.1}
        for i in range(9, 40, 10)
    ]
    (folder / "metrics.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def test_flags_are_the_keyword_arguments_of_the_registered_figures(flags: ModuleType) -> None:
    for name, draw in load_figures().items():
        keywords = {
            parameter.name
            for parameter in inspect.signature(draw).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert set(flags.FLAGS.get(name, {})) == keywords, name
        assert name in flags.FIGURES


def test_a_figure_that_does_not_exist_for_a_run_is_exit_code_1(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a")
    assert tool.main(["spectrum", run, "--output", str(tmp_path / "out")]) == 1
    assert "'a'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_figure_s_files_are_listed(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["A1", "A2", "B1", "B2", "C11", "C12", "C21", "C22"]
    state = {f"predictor.scales.corner.{name}": torch.randn(4, 4) for name in names}
    torch.save({"model": state}, tmp_path / "weights.pth")
    out = tmp_path / "out"
    words = ["spectrum", str(tmp_path / "weights.pth"), "--checkpoints", "0", "--output", str(out)]
    assert tool.main(words) == 0
    written = {Path(line) for line in capsys.readouterr().out.splitlines()}
    assert written == set(out.iterdir())
    assert {path.suffix for path in written} == {".json", ".svg"}


@pytest.mark.parametrize(
    "words",
    [
        "",
        "aurora run",
        "spectrum",
        "spectrum nowhere",
        "spectrum {run} --output {run}/metrics.json",
        "spectrum {run} --opts MODEL.FOO 1",
    ],
)
def test_wrong_arguments_are_exit_code_2(tool: ModuleType, tmp_path: Path, words: str) -> None:
    run = make_run(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").write_text("SEED: 1\n")
    with pytest.raises(SystemExit) as ended:
        tool.main(words.format(run=run).split())
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ("detections", "--score nan"),
        ("beyond", "--distances 0"),
        ("correlation", "--map="),
        ("heat", "--heat-size -3"),
        ("spectrum", "--checkpoints -1"),
        ("curves", "--num-images many"),
        ("curves", "--seed 4294967296"),
    ],
)
def test_values_out_of_range_are_refused_with_the_flag(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], figure: str, words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.parse_args([figure, "run", *words.split()])
    assert ended.value.code == 2
    assert words.split()[0].rstrip("=") in capsys.readouterr().err
