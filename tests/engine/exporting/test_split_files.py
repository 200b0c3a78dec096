# Copyright (c) qbheat_det contributors. Apache-2.0.
"""An encoder and heads as ONNX files: one pass, the answers of PyTorch, with and without it."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qbheat_det.checkpoint import load_run_config
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.engine.classify import is_classifier
from qbheat_det.engine.exporting import ExportedModel, split_export
from qbheat_det.engine.exporting.agreement import build_reference
from qbheat_det.engine.exporting.export_info import SPLIT_KEY
from qbheat_det.engine.exporting.split_model import SplitModel
from qbheat_det.engine.predict import build_predictor
from tests.engine.exporting.split_cases import save
from tests.tool_modules import TOOLS, load_tool

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


def _write_parts(folder: Path, names: list[str], identity: str) -> None:
    """Writes files that say that they are parts of a split export, and hold nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        model = onnx.ModelProto()
        onnx.helper.set_model_props(model, {SPLIT_KEY: json.dumps({"encoder": identity})})
        onnx.save(model, folder / f"{name}.onnx")


@pytest.fixture(scope="module")
def export() -> ModuleType:
    return load_tool("export")


# Detectors' graphs are much larger, and take their time to be written.
@pytest.fixture(
    scope="module",
    params=[
        ("classifier", "two_labels"),
        pytest.param(("two_maps", "two_classes"), marks=pytest.mark.slow),
    ],
    ids=["classifiers", "detectors"],
)
def exported(
    request: pytest.FixtureRequest, export: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder: the runs ``one`` and ``two``, ``photos``, and ``split``, which the tool wrote.

    An older split stood there before, beside somebody's own file.
    """
    root = tmp_path_factory.mktemp("exported")
    _write_parts(root / "split", ["encoder", "head_older", "head_one"], "older")
    (root / "split" / "own.onnx").write_bytes(b"own")
    arguments = ["--split", "--images", str(root / "photos"), "--output", str(root / "split")]
    arguments += ["--overwrite"]
    for seed, (name, kind) in enumerate(zip(("one", "two"), request.param, strict=True)):
        arguments += ["--weights", save(root / name, kind, head_seed=seed)]
    (root / "photos").mkdir()
    rng = np.random.default_rng(0)
    for index, (width, height) in enumerate([(90, 75), (61, 100)]):
        noise = rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height)).save(root / "photos" / f"{index}.png")
    export.main(arguments)
    return root


def _read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _pixels(exported: Path, index: int = 0) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(exported / "photos" / f"{index}.png"))[None]


def _scores(found: Any) -> Any:
    """Of one image, whatever the head."""
    return found[0].scores.numpy() if isinstance(found, list) else found[0]


def _in_pytorch(weights: Path, image: np.ndarray[Any, Any]) -> Any:
    cfg = load_run_config(str(weights), device="cpu")
    predictor = build_predictor(cfg)
    if not is_classifier(cfg):
        scores = predictor(image[:, :, ::-1])["instances"].scores
        return scores.sort(descending=True).values.numpy()
    task = build_reference(predictor, cfg, "classification")
    return task(image)["scores"][0]


def test_the_encoder_runs_once_and_every_head_finds_what_its_model_does(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(path.name for path in (exported / "split").iterdir())
    assert names == ["encoder.onnx", "head_one.onnx", "head_two.onnx", "own.onnx"]
    assert (exported / "split" / "own.onnx").read_bytes() == b"own"
    model = SplitModel.open(exported / "split", device="cpu")
    passes = 0
    encode = SplitModel.encode

    def counted(self: SplitModel, images: Any) -> Any:
        nonlocal passes
        passes += 1
        return encode(self, images)

    monkeypatch.setattr(SplitModel, "encode", counted)
    image = _pixels(exported)
    found = model(image)
    assert passes == 1
    assert [len(model.infos[name].class_names) for name in ("one", "two")] == [3, 2]
    for name, result in found.items():
        wanted = _in_pytorch(exported / name / "model_final.safetensors", image[0])
        np.testing.assert_allclose(_scores(result), wanted, atol=1e-4)


def test_an_encoder_and_one_head_are_an_exported_model(exported: Path) -> None:
    model = SplitModel.open(exported / "split", device="cpu")
    together = model(np.concatenate([_pixels(exported, 1)] * 3))["one"]
    alone = model.head("one")(_pixels(exported, 1))
    assert len(together) == 3
    for index in range(3):
        np.testing.assert_allclose(
            _scores(together[index : index + 1]), _scores(alone), rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match=r"are \(N, H, W, 3\) and uint8, not \(75, 90, 3\)"):
        model(_pixels(exported)[0])


def test_files_of_a_split_say_what_they_are_and_stay_together(
    exported: Path, export: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = exported / "split"
    with pytest.raises(UserError, match="one part of an encoder and heads"):
        ExportedModel.open(split / "head_one.onnx")
    with pytest.raises(UserError, match=r"has no encoder\.onnx"):
        SplitModel.open(exported)
    (tmp_path / "encoder.onnx").write_bytes((split / "encoder.onnx").read_bytes())
    with pytest.raises(UserError, match=r"has no head_NAME\.onnx"):
        SplitModel.open(tmp_path)
    head = (split / "head_one.onnx").read_bytes()
    identity = head.split(b'{"encoder": "')[1][:16]
    (tmp_path / "head_one.onnx").write_bytes(head.replace(identity, b"0123456789abcdef"))
    with pytest.raises(UserError, match="was exported with another encoder"):
        SplitModel.open(tmp_path)
    arguments = ["--split", "--weights", str(exported / "one" / "model_final.safetensors")]
    with pytest.raises(SystemExit, match="2"):
        export.main([*arguments, "--output", str(split)])
    assert "holds encoder.onnx: name another folder" in capsys.readouterr().err


def test_files_that_are_called_as_parts_and_are_none_stay(
    exported: Path, export: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_parts(tmp_path, ["encoder", "head_one"], "older")
    (tmp_path / "head_mine.onnx").write_bytes(b"mine")
    before = _read(tmp_path)
    arguments = ["--split", "--weights", str(exported / "one" / "model_final.safetensors")]
    with pytest.raises(SystemExit, match="2"):
        export.main([*arguments, "--output", str(tmp_path), "--overwrite"])
    assert "holds head_mine.onnx, which is no whole part" in capsys.readouterr().err
    assert _read(tmp_path) == before


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_split_replaces_another_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    _write_parts(tmp_path / "split", ["encoder", "head_one", "head_two"], "older")
    _write_parts(tmp_path / "new", ["encoder", "head_one", "head_three"], "newer")
    before, new = _read(tmp_path / "split"), _read(tmp_path / "new")
    calls = 0

    def interrupted(path: Path, write: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        write_atomically(path, write)

    monkeypatch.setattr(split_export, "write_atomically", interrupted)
    with pytest.raises(KeyboardInterrupt):
        split_export.install_split(tmp_path / "new", tmp_path / "split")
    assert _read(tmp_path / "split") == before
    split_export.install_split(tmp_path / "new", tmp_path / "split")
    assert _read(tmp_path / "split") == new


def test_numpy_and_onnxruntime_are_enough_to_run_it(exported: Path) -> None:
    # As on a machine that has neither: importing any of these fails.
    program = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'torchvision', 'detectron2', 'qbheat_det']))\n"
        f"runpy.run_path({str(TOOLS / 'run_onnx.py')!r}, run_name='__main__')\n"
    )
    arguments = [str(exported / "split"), str(exported / "photos" / "0.png")]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--score-threshold", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    found = json.loads(line)["found"]
    model = SplitModel.open(exported / "split", device="cpu")
    for name, result in model(_pixels(exported)).items():
        scores = _scores(result)
        assert [one["score"] for one in found[name]] == pytest.approx(sorted(scores)[::-1])
        classes = model.infos[name].class_names
        if isinstance(result, list):
            boxes = [one["box"] for one in found[name]]
            np.testing.assert_allclose(boxes, result[0].pred_boxes.tensor, rtol=1e-6)
            labels = result[0].pred_classes.tolist()
        else:
            labels = np.argsort(-scores).tolist()
        assert [one["name"] for one in found[name]] == [classes[label] for label in labels]


def test_predict_runs_one_head_with_its_encoder(exported: Path, tmp_path: Path) -> None:
    head = exported / "split" / "head_two.onnx"
    arguments = ["--weights", str(head), "--input", str(exported / "photos" / "0.png")]
    arguments += ["--json", str(tmp_path / "r.json"), "--device", "cpu"]
    assert load_tool("predict").main([*arguments, "--score-threshold", "0"]) == 0
    first, *_ = json.loads((tmp_path / "r.json").read_text())
    wanted = _scores(SplitModel.open(head.parent).head("two")(_pixels(exported))).max()
    score = first["score"] if "score" in first else first["classes"][0]["score"]
    assert score == pytest.approx(wanted)
