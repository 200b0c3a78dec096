# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/visualize.py: its flags are the keyword arguments of the figures, and files are written."""

import inspect
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


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run without a checkpoint."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.json").touch()
    (tmp_path / "a" / "config.yaml").write_text("SEED: 1\n")
    return str(tmp_path / "a")


def test_flags_are_the_keyword_arguments_of_the_registered_figures(flags: ModuleType) -> None:
    for name, draw in load_figures().items():
        keywords = {
            parameter.name
            for parameter in inspect.signature(draw).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert set(flags.FLAGS.get(name, {})) == keywords, name
        assert name in flags.FIGURES


def test_a_figure_s_files_are_listed_and_none_is_exit_code_1(
    tool: ModuleType, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert tool.main(["spectrum", run, "--output", str(out)]) == 1
    assert "'a'" in capsys.readouterr().err
    assert not out.exists()
    names = ["A1", "A2", "B1", "B2", "C11", "C12", "C21", "C22"]
    state = {f"predictor.scales.corner.{name}": torch.randn(4, 4) for name in names}
    torch.save({"model": state}, tmp_path / "weights.pth")
    words = ["spectrum", str(tmp_path / "weights.pth"), "--checkpoints", "0", "--output", str(out)]
    assert tool.main(words) == 0
    written = {Path(line) for line in capsys.readouterr().out.splitlines()}
    assert written == set(out.iterdir())
    assert {path.suffix for path in written} == {".json", ".svg"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "spectrum"),
        ("aurora run", "aurora"),
        ("spectrum nowhere", "nowhere"),
        ("spectrum {run} --output {run}/metrics.json", "metrics.json"),
        ("spectrum {run} --opts MODEL.FOO 1", "MODEL.FOO"),
        ("detections run --score nan", "--score"),
        ("beyond run --distances 0", "--distances"),
        ("correlation run --map=", "--map"),
        ("heat run --heat-size -3", "--heat-size"),
        ("curves run --num-images many", "--num-images"),
        ("curves run --seed 4294967296", "--seed"),
    ],
)
def test_wrong_arguments_are_exit_code_2(
    tool: ModuleType, run: str, capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main(words.format(run=run).split())
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
