# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The command ``qbheat``, every tool under its name; the demo."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from qbheat_det.checkpoint import find_weights, read_weights
from tests.engine.tiny_training import read_opts, words_of
from tests.tool_modules import load_tool, refuse

TOOLS = Path(__file__).resolve().parents[2] / "tools"
COMMANDS = runpy.run_path(str(TOOLS / "qbheat"))["COMMANDS"]


def _run(*arguments):
    command = [sys.executable, str(TOOLS / "qbheat"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_names_every_command_and_each_has_its_tool():
    run = _run("--help")
    assert run.returncode == 0
    assert all(f"  {name} " in run.stdout for name in COMMANDS)
    assert all((TOOLS / f"{tool}.py").is_file() for tool, _, _ in COMMANDS.values())

    run = _run("train", "--help")
    assert run.returncode == 0
    assert run.stdout.startswith("usage: qbheat train ")
    assert "--data" in run.stdout


def test_every_help_names_its_command_and_shows_its_examples_line_by_line():
    code = f"""
import runpy, sys
for name in {list(COMMANDS)}:
    sys.argv = ["qbheat", name, "--help"]
    try:
        runpy.run_path({str(TOOLS / "qbheat")!r}, run_name="__main__")
    except SystemExit:
        print(chr(0))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    helps = run.stdout.split("\0\n")[:-1]
    assert len(helps) == len(COMMANDS)
    for name, text in zip(COMMANDS, helps, strict=True):
        assert text.startswith(f"usage: qbheat {name} "), name
        _, _, examples = text.lower().partition("examples:\n")
        joined = [line for line in examples.splitlines() if re.search(r"\S {4,}--", line)]
        assert not joined, name


@pytest.mark.parametrize(
    "command",
    [
        "predict --weights nowhere.pt --images .",
        "predict --weights retinanet/nowhere --images .",
        "predict --weights distill/285M --images . --config-file nowhere.yaml",
        "embed --weights nowhere --images . --output vectors.npz",
        "train --data . --config-file custom/nowhere.yaml",
        "train --data nowhere",
        "evaluate --data . --weights nowhere",
        "inspect --data . --weights nowhere",
        "select --images . --budget 1 --output next --encoder nowhere",
        "probe --data . --val . --weights nowhere",
        "compare --data . --val nowhere --epochs 1 --output compared",
        "report label=nowhere",
        "export --shared-encoder --weights name=nowhere --output files",
        "export --weights distill/285M --int8-images nowhere --output file.onnx",
        "convert --weights nowhere --to MobileFormer --output file.safetensors",
        "serve --weights nowhere.onnx",
        "app --weights distill/285M nowhere",
    ],
)
def test_inputs_that_do_not_exist_are_named_before_torch_is_imported(
    command, tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{TOOLS.parent}")
    monkeypatch.chdir(tmp_path)
    run = _run(*command.split())
    assert run.returncode == 2
    assert "nowhere" in run.stderr
    assert "torch" not in run.stderr


TOOL_WITH_PROCESSES = """
import multiprocessing
import sys

from arguments import Parser


def double(number):
    return 2 * number


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(Parser().prog, sys.argv[1:], pool.map(double, [1, 2]))
"""


def test_processes_that_a_tool_starts_find_its_functions(tmp_path):
    folder = tmp_path / "qbheat_det" / "tools"  # as in an installed package
    folder.mkdir(parents=True)
    (tmp_path / "qbheat_det" / "__init__.py").touch()
    shutil.copy(TOOLS / "arguments.py", folder)
    (folder / "train_net.py").write_text(TOOL_WITH_PROCESSES)
    run = subprocess.run(
        [sys.executable, str(TOOLS / "qbheat"), "evaluate", "--epochs", "3"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "qbheat evaluate ['--eval-only', '--epochs', '3'] [2, 4]\n", run.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--weights w --images x --conf 0.5", "use --threshold for --conf"),
        ("--weights w --source x", "use --images for --source"),
        ("--weights w source=x", "use --images for source"),
    ],
)
def test_flags_of_other_libraries_are_answered_with_ours(words, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["qbheat predict", *words.split()])
    with pytest.raises(SystemExit):
        load_tool("predict").parse_args()
    assert named in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["qbheat predict", "--images", "source"])  # a folder
    with pytest.raises(SystemExit):
        load_tool("predict").parse_args()
    assert "use --images" not in capsys.readouterr().err


def test_no_help_waits_for_large_libraries():
    code = f"""
import runpy, sys
for name in {["--help", *COMMANDS]}:
    sys.argv = ["qbheat", *dict.fromkeys([name, "--help"])]
    try:
        runpy.run_path({str(TOOLS / "qbheat")!r}, run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
    large = {{"torch", "numpy", "detectron2", "matplotlib", "gradio"}}
    found = large & set(sys.modules)
    assert not found, (name, found)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_commands_hide_warnings_of_other_libraries_alone():
    hide = runpy.run_path(str(TOOLS / "arguments.py"))["hide_foreign_warnings"]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        hide()
        for module in ("torch.jit._script", "torch", "onnxscript.ir", "qbheat_det.data", "torchy"):
            warnings.warn_explicit(module, FutureWarning, "file.py", 1, module=module, registry={})
    assert [str(warning.message) for warning in shown] == ["qbheat_det.data", "torchy"]


SHORT = read_opts("""
SOLVER.EPOCHS 0.0 SOLVER.CHECKPOINT_EPOCHS 0.0 SOLVER.MAX_ITER 1 SOLVER.IMS_PER_BATCH 2
SOLVER.WARMUP_ITERS 0 TEST.EVAL_EPOCHS 0.0 DATALOADER.NUM_WORKERS 0 MODEL.DEVICE cpu
INPUT.FIXED_VIEWS.COUNT 1 INPUT.MIN_SIZE_TRAIN (32,) INPUT.MIN_SIZE_TEST 32
""")


@pytest.fixture
def demo():
    return load_tool("demo")


@pytest.mark.slow
def test_the_demo_ends_in_a_report_and_a_result(demo, tmp_path, capsys):
    output = tmp_path / "demo"
    cache = {"MODEL.CACHE_FEATURES.FOLDER": str(tmp_path / "cache")}
    demo.main(["--output", str(output), *words_of(SHORT | cache)])
    page = output / "detector" / "report.html"
    assert f"open  {page}\n" in capsys.readouterr().out
    assert "A detector of RBC, WBC, Platelets" in page.read_text("utf-8")
    assert set(json.loads((output / "result.json").read_text())) == {"AP", "AP50", "seconds"}
    encoder, _ = read_weights(find_weights("distill/285M"))
    trained, _ = read_weights(str(output / "detector" / "model_final.safetensors"))
    start = "backbone.bottom_up."
    kept = {k.removeprefix(start): v for k, v in trained.items() if k.startswith(start)}
    assert kept
    for key, tensor in kept.items():
        if not key.endswith("num_batches_tracked"):  # frozen norms count nothing
            shipped = encoder[f"backbone.{key}"].float()  # some are stored as float16
            torch.testing.assert_close(tensor, shipped, rtol=0, atol=0)


def test_a_folder_that_is_not_of_the_demo_is_left_alone(demo, tmp_path, capsys):
    file = tmp_path / "detector" / "model_final.pth"
    file.parent.mkdir()
    file.write_bytes(b"a week of training")
    assert "--output" in refuse(demo.main, ["--output", str(tmp_path)], capsys)
    assert file.read_bytes() == b"a week of training"
