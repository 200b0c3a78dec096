# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The command ``qbheat``, every tool under its name; the demo; predictions from files to files."""

import json
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image
from pycocotools.coco import COCO

from qbheat_det.checkpoint import read_weights
from qbheat_det.config import load_config
from qbheat_det.data import build_mapper
from tests.engine.classifier_cases import configure, make_classes
from tests.engine.tiny_detectors import make_probe_config, make_retinanet_config, save_run
from tests.engine.tiny_pretraining import OPTS, RECIPE
from tests.engine.tiny_training import read_opts
from tests.tool_modules import load_tool, refuse

TOOLS = Path(__file__).resolve().parents[2] / "tools"
COMMANDS = runpy.run_path(str(TOOLS / "qbheat"))["COMMANDS"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "qbheat"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_names_every_command_and_each_has_its_tool() -> None:
    run = _run("--help")
    assert run.returncode == 0
    assert all(f"  {name} " in run.stdout for name in COMMANDS)
    assert all((TOOLS / f"{tool}.py").is_file() for tool, _, _ in COMMANDS.values())

    run = _run("train", "--help")
    assert run.returncode == 0
    assert run.stdout.startswith("usage: qbheat train ")
    assert "--data" in run.stdout


def test_no_help_waits_for_large_libraries() -> None:
    code = f"""
import runpy, sys
for name in {["--help", *COMMANDS]}:
    sys.argv = ["qbheat", *dict.fromkeys([name, "--help"])]
    try:
        runpy.run_path({str(TOOLS / "qbheat")!r}, run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
    large = {{"torch", "numpy", "detectron2", "matplotlib", "gradio", "ray", "pyarrow"}}
    found = large & set(sys.modules)
    assert not found, (name, found)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_commands_hide_warnings_of_other_libraries_alone() -> None:
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
def demo() -> ModuleType:
    return load_tool("demo")


def test_a_step_of_each_ends_in_a_report_and_a_result(
    demo: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "FIGURES", ("curves",))
    monkeypatch.setattr(demo, "NUM_RECALIBRATED", 2)
    output = tmp_path / "demo"
    cache = {"MODEL.CACHE_FEATURES.FOLDER": str(tmp_path / "cache")}
    words = [word for pair in (SHORT | cache).items() for word in pair]
    demo.main(["--output", str(output), *words])
    assert capsys.readouterr().out.strip().endswith(f"open  {output / 'report.html'}")
    result = json.loads((output / "result.json").read_text())
    assert set(result) == {"pretrained", "random", "seconds"}
    encoders = []
    for name in ("pretrained", "random"):
        assert set(result[name]) == {"AP", "AP50"}
        encoder, _ = read_weights(str(output / f"encoder_{name}.safetensors"))
        trained, _ = read_weights(str(output / name / "model_final.safetensors"))
        start = "backbone.bottom_up."
        kept = {k.removeprefix(start): v for k, v in trained.items() if k.startswith(start)}
        assert kept
        for key, tensor in kept.items():
            if not key.endswith("num_batches_tracked"):  # frozen norms count nothing
                torch.testing.assert_close(tensor, encoder[key], rtol=0, atol=0)
        encoders.append(encoder)
    assert any((encoders[0][key] != value).any() for key, value in encoders[1].items())


def test_a_folder_that_is_not_of_the_demo_is_left_alone(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "pretrained" / "model_final.pth"
    weights.parent.mkdir()
    weights.write_bytes(b"a week of training")
    assert "--output" in refuse(demo.main, ["--output", str(tmp_path)], capsys)
    assert weights.read_bytes() == b"a week of training"


predict = load_tool("predict")
NAMES = ["ape", "bee", "cat", "dog", "emu", "fox"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(3):
        noise = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((80, 60)).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of a RetinaNet."""
    return save_run(make_retinanet_config(), tmp_path_factory.mktemp("detector"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, str]:
    """Folder of six classes, with a file that is no image; config; weights."""
    root = Path(make_classes(tmp_path_factory.mktemp("train"), dict.fromkeys(NAMES, 1)))
    cfg, _ = configure({"DATASETS.VAL_FRACTION": "0"}, "--data", str(root))
    (root / "bee" / "x.jpg").write_text("no image")
    return str(root), cfg, save_run(cfg, tmp_path_factory.mktemp("classifier"), seed=4)


def run(words: str, json_file: Path) -> Any:
    """Runs the tool on the CPU; returns its exit code and what it wrote."""
    opts = ["INPUT.MIN_SIZE_TEST", "48", "MODEL.DEPLOY.COMPILE", "off"]
    code = predict.main([*words.split(), "--json", str(json_file), "--device", "cpu", *opts])
    return code, json.loads(json_file.read_text())


def test_a_folder_becomes_images_and_results_that_pycocotools_reads_fast_or_not(
    photos: Path, detector: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--weights {detector} --images {photos} --threshold 0"
    code, results = run(f"{words} --output {tmp_path / 'out'}", tmp_path / "boxes.json")
    assert code == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["0.png", "1.png", "2.png"]
    assert Image.open(tmp_path / "out" / "0.png").size == (512, 384)  # enlarged for the labels
    assert {result["image_id"] for result in results} == {1, 2, 3}
    assert "MODEL.CATEGORY_IDS" in capsys.readouterr().out
    truth = COCO()
    ids = [{"id": i} for i in (1, 2, 3)]
    truth.dataset = {"info": {}, "images": ids, "categories": ids}
    truth.createIndex()
    assert len(truth.loadRes(results).anns) == len(results) > 0

    _, fast = run(f"{words} --fast", tmp_path / "fast.json")
    assert "fold" in capsys.readouterr().err
    for one, other in zip(results, fast, strict=True):
        assert one["category_id"] == other["category_id"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
        assert one["bbox"] == pytest.approx(other["bbox"], abs=0.05)


def test_each_image_gets_its_five_likeliest_classes_and_the_rest_is_named(
    classifier: tuple[str, Any, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, cfg, weights = classifier
    code, results = run(f"--weights {weights} --images {root}", tmp_path / "classes.json")
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
        assert [found["name"] for found in entry["classes"]] == [NAMES[k] for k in order]
        found = torch.tensor([found["score"] for found in entry["classes"]])
        torch.testing.assert_close(found, scores[order], rtol=1e-4, atol=1e-6)


def test_bad_arguments_are_named_with_exit_code_2(
    photos: Path,
    detector: str,
    classifier: tuple[str, Any, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    ):
        arguments = [*words.split()[:4], "--device", "cpu", *words.split()[4:]]
        assert named in refuse(predict.main, arguments, capsys)
