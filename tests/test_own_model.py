# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tutorial's blocks are run as they stand: the model, its recipe, its commands, its count."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.modeling import META_ARCH_REGISTRY, build_model

from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from qbheat_det.core.environment import import_own_modules
from qbheat_det.modeling.pretrain import QBHeat

from .engine.conftest import forget_runs
from .engine.tiny_pretraining import TINY_ENCODER
from .engine.tiny_training import make_data
from .modeling.tiny_pretraining import make_tiny_config
from .tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "your_own_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
MODEL, COUNT = (text for kind, text in BLOCKS if kind == "python")
(RECIPE,) = (text for kind, text in BLOCKS if kind == "yaml")
COMMANDS = [
    shlex.split(line)
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.replace("\\\n", " ").splitlines()
]
FAST = {
    **TINY_ENCODER,
    "SOLVER.EPOCHS": "0.0",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.IMS_PER_BATCH": "2",
    "DATALOADER.NUM_WORKERS": "0",
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "INPUT.MIN_SIZE_TEST": "64",
    "TEST.EVAL_EPOCHS": "0.0",
    "MODEL.DEVICE": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's reader works: their two files, the configs, and pre-trained weights."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "mine").mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "mine" / "centres.py").write_text(MODEL, encoding="utf-8")
    (folder / "mine" / "centres.yaml").write_text(RECIPE, encoding="utf-8")
    cfg = make_tiny_config()
    cfg.merge_from_list([word for pair in TINY_ENCODER.items() for word in pair])
    state, info = (
        build_model(cfg).state_dict(),
        WeightsInfo(pretrain_only_modules=QBHeat.pretrain_only_modules),
    )
    (folder / "output" / "pretraining").mkdir(parents=True)
    save_weights(str(folder / "output/pretraining/model_final.safetensors"), state, info)
    return folder


@pytest.fixture
def _in_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder is the current one, and the model registered as every tool does it."""
    variables = dict(word.split("=") for word in COMMANDS[0][1:])
    assert COMMANDS[0][0] == "export"
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder / variables["PYTHONPATH"]))
    monkeypatch.setenv("QBHEAT_IMPORT", variables["QBHEAT_IMPORT"])
    import_own_modules()
    yield
    forget_runs()
    sys.modules.pop("centres")
    META_ARCH_REGISTRY._obj_map.pop("CentrePoints")


def _run(command: list[str], data: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert command[:2] == ["qbheat", "train"]
    forget_runs()
    tool = load_tool("train_net")
    results: list[Any] = []
    run = lambda main, args: results.append(main(args))  # noqa: E731
    monkeypatch.setattr("qbheat_det.engine.run_distributed", run)
    files = str(data / "annotations.json"), str(data / "images")
    flags = ["--data", files[0], "--val", files[0], "--images", files[1]]
    fast = [word for pair in FAST.items() for word in pair]
    monkeypatch.setattr(sys, "argv", [*command[1:], *fast, *flags])
    tool.invoke_main()
    return results[0]


@pytest.mark.slow
@pytest.mark.usefixtures("_in_place")
def test_the_page_trains_evaluates_tunes_probes_and_counts(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = make_data(tmp_path)
    train, evaluate, tune, probe = COMMANDS[1:]
    trained = _run(train, data, monkeypatch)
    assert json.dumps(_run(evaluate, data, monkeypatch)) == json.dumps(trained)
    assert "AP" in trained["bbox"]
    _run(tune, data, monkeypatch)
    _run(probe, data, monkeypatch)
    before, _ = read_weights("output/pretraining/model_final.safetensors")
    after, _ = read_weights("output/probe/model_final.safetensors")
    backbone = [key for key in after if key.startswith("backbone.")]
    assert backbone
    for key in backbone:  # taken whole, and frozen
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=0)
    records = json.loads((data / "annotations.json").read_text())["images"]
    name = str(data / "images" / records[0]["file_name"])
    monkeypatch.setattr(DatasetCatalog, "get", lambda _: [{"file_name": name}])
    capsys.readouterr()
    exec(compile(COUNT, "your_own_model.md", "exec"), {})
    assert re.search(r"^objects: \d+\n$", capsys.readouterr().out, flags=re.MULTILINE)


def test_a_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBHEAT_IMPORT", "json, nowhere_to_be_found")
    with pytest.raises(ImportError, match="PYTHONPATH"):
        import_own_modules()
