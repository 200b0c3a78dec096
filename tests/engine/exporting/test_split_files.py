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

from qbheat_det.engine.exporting import ExportedModel
from qbheat_det.engine.exporting.split_model import SplitModel
from qbheat_det.engine.prediction import build_predictor, load_run_config
from qbheat_det.errors import UserError
from tests.engine.exporting.split_cases import save
from tests.tool_modules import TOOLS, load_tool

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def export() -> ModuleType:
    return load_tool("export")


@pytest.fixture(scope="module")
def exported(export: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, ``photos`` and ``split``, which the tool wrote."""
    root = tmp_path_factory.mktemp("exported")
    weights = [
        save(root / "shapes", "two_maps", head_seed=1),
        save(root / "animals", "two_classes", head_seed=2),
    ]
    (root / "photos").mkdir()
    rng = np.random.default_rng(0)
    for index, (width, height) in enumerate([(90, 75), (61, 100)]):
        noise = rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height)).save(root / "photos" / f"{index}.png")
    arguments = ["--split", "--weights", weights[0], "--weights", weights[1]]
    arguments += ["--images", str(root / "photos"), "--output", str(root / "split")]
    export.main(arguments)
    return root


def _pixels(exported: Path, index: int = 0) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(exported / "photos" / f"{index}.png"))[None]


def _detect_in_pytorch(weights: Path, image: np.ndarray[Any, Any]) -> Any:
    cfg = load_run_config(str(weights), device="cpu")
    found = build_predictor(cfg)(image[:, :, ::-1])["instances"]
    return found[found.scores.argsort(descending=True)]


def test_the_encoder_runs_once_and_every_head_finds_what_its_model_does(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(path.name for path in (exported / "split").iterdir())
    assert names == ["encoder.onnx", "head_animals.onnx", "head_shapes.onnx"]
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
    assert {name: model.infos[name].class_names for name in found} == {
        "animals": ("cat", "dog"),
        "shapes": ("square", "disc", "cross"),
    }
    for name, (instances,) in found.items():
        wanted = _detect_in_pytorch(exported / name / "model_final.safetensors", image[0])
        assert len(instances) == len(wanted) > 5
        np.testing.assert_allclose(instances.scores, wanted.scores, atol=1e-4)
        assert instances.image_size == (75, 90)


def test_an_encoder_and_one_head_are_an_exported_model(exported: Path) -> None:
    model = SplitModel.open(exported / "split", device="cpu")
    together = model(np.concatenate([_pixels(exported, 1)] * 3))["shapes"]
    (alone,) = model.head("shapes")(_pixels(exported, 1))
    for instances in together:
        np.testing.assert_allclose(
            instances.pred_boxes.tensor, alone.pred_boxes.tensor, rtol=1e-4, atol=1e-3
        )
    with pytest.raises(ValueError, match=r"are \(N, H, W, 3\) and uint8, not \(75, 90, 3\)"):
        model(_pixels(exported)[0])


def test_files_of_a_split_say_what_they_are_and_stay_together(
    exported: Path, export: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = exported / "split"
    with pytest.raises(UserError, match="one part of an encoder and heads"):
        ExportedModel.open(split / "head_shapes.onnx")
    with pytest.raises(UserError, match=r"has no encoder\.onnx"):
        SplitModel.open(exported)
    (tmp_path / "encoder.onnx").write_bytes((split / "encoder.onnx").read_bytes())
    with pytest.raises(UserError, match=r"has no head_NAME\.onnx"):
        SplitModel.open(tmp_path)
    head = (split / "head_shapes.onnx").read_bytes()
    identity = head.split(b'{"encoder": "')[1][:16]
    (tmp_path / "head_shapes.onnx").write_bytes(head.replace(identity, b"0123456789abcdef"))
    with pytest.raises(UserError, match="was exported with another encoder"):
        SplitModel.open(tmp_path)
    arguments = ["--split", "--weights", str(exported / "shapes" / "model_final.safetensors")]
    with pytest.raises(SystemExit, match="2"):
        export.main([*arguments, "--output", str(split)])
    assert "holds encoder.onnx: name another folder" in capsys.readouterr().err


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
    for name, (instances,) in model(_pixels(exported)).items():
        assert [box["score"] for box in found[name]] == pytest.approx(instances.scores.tolist())
        boxes = [box["box"] for box in found[name]]
        np.testing.assert_allclose(boxes, instances.pred_boxes.tensor, rtol=1e-6)
        names = model.infos[name].class_names
        assert [box["name"] for box in found[name]] == [
            names[label] for label in instances.pred_classes.tolist()
        ]
