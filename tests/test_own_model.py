# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tutorial's blocks are run as they stand: the model, its recipe, its commands, its count."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.modeling import META_ARCH_REGISTRY, build_model

from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from qbheat_det.core.environment import import_own_modules
from qbheat_det.modeling.pretrain import QBHeat

from .engine.tiny_pretraining import TINY_ENCODER
from .engine.tiny_training import forget_runs, read_opts, run_tool, words_of
from .modeling.tiny_pretraining import make_tiny_config
from .toy_set import draw_toy_set

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
    **read_opts("""
SOLVER.EPOCHS 0.0 SOLVER.MAX_ITER 2 SOLVER.IMS_PER_BATCH 2 DATALOADER.NUM_WORKERS 0
INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64 TEST.EVAL_EPOCHS 0.0 MODEL.DEVICE cpu
"""),
}


@pytest.fixture
def _reader(tmp_path, monkeypatch):
    """The page's reader at work: their two files, registered as every tool does, and weights."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "mine" / "centres.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "mine" / "centres.yaml").write_text(RECIPE, encoding="utf-8")
    cfg = make_tiny_config()
    cfg.merge_from_list(words_of(TINY_ENCODER))
    info = WeightsInfo(pretrain_only_modules=QBHeat.pretrain_only_modules)
    (tmp_path / "output" / "pretraining").mkdir(parents=True)
    weights = str(tmp_path / "output/pretraining/model_final.safetensors")
    save_weights(weights, build_model(cfg).state_dict(), info)
    variables = dict(word.split("=") for word in COMMANDS[0][1:])
    assert COMMANDS[0][0] == "export"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / variables["PYTHONPATH"]))
    monkeypatch.setenv("QBHEAT_IMPORT", variables["QBHEAT_IMPORT"])
    import_own_modules()
    yield
    forget_runs()
    sys.modules.pop("centres")
    META_ARCH_REGISTRY._obj_map.pop("CentrePoints")


@pytest.mark.slow
@pytest.mark.usefixtures("_reader")
def test_the_page_trains_evaluates_tunes_probes_and_counts(tmp_path, monkeypatch, capsys):
    data, results = draw_toy_set(tmp_path, 12), []
    files = str(data / "annotations.json"), str(data / "images")
    flags = ["--data", files[0], "--val", files[0], "--images", files[1]]
    for command in COMMANDS[1:]:  # train, evaluate, tune, probe
        assert command[:2] == ["qbheat", "train"]
        results.append(run_tool([*command[2:], *words_of(FAST), *flags]))
    assert json.dumps(results[0]) == json.dumps(results[1])
    assert "AP" in results[0]["bbox"]
    before, _ = read_weights("output/pretraining/model_final.safetensors")
    after, _ = read_weights("output/probe/model_final.safetensors")
    backbone = {key: value for key, value in after.items() if key.startswith("backbone.")}
    assert backbone  # taken whole, and frozen
    expected = {key: before[key] for key in backbone}
    torch.testing.assert_close(backbone, expected, rtol=0, atol=0)
    records = json.loads((data / "annotations.json").read_text())["images"]
    name = str(data / "images" / records[0]["file_name"])
    monkeypatch.setattr(DatasetCatalog, "get", lambda _: [{"file_name": name}])
    capsys.readouterr()
    exec(compile(COUNT, "your_own_model.md", "exec"), {})
    assert re.search(r"^objects: \d+\n$", capsys.readouterr().out, flags=re.MULTILINE)


def test_a_module_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("QBHEAT_IMPORT", "json, nowhere_to_be_found")
    with pytest.raises(ImportError, match="PYTHONPATH"):
        import_own_modules()
