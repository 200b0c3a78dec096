# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/predict.py from its command line: files written, exit codes, sentences."""

import contextlib
import io
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from qbheat_det.config import load_config
from tests.engine.tiny_detectors import make_probe_config, make_retinanet_config, save_run
from tests.engine.tiny_pretraining import OPTS, RECIPE
from tests.tool_modules import load_tool


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    return load_tool("predict")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(3):
        noise = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((80, 60)).save(folder / f"{index}.png")
    return folder


def test_a_folder_becomes_pictures_and_results_that_pycocotools_reads(
    predict: ModuleType, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_run(make_retinanet_config(), tmp_path / "run")
    boxes = tmp_path / "boxes.json"
    annotations = tmp_path / "ann.json"
    images = [{"id": 70 + i, "file_name": f"{i}.png", "width": 80, "height": 60} for i in range(3)]
    annotations.write_text(json.dumps({"images": images}))
    arguments = ["--weights", weights, "--input", str(photos), "--output", str(tmp_path / "out")]
    arguments += ["--json", str(boxes), "--score-threshold", "0", "--device", "cpu"]
    arguments += ["--image-ids-from", str(annotations)]
    assert predict.main([*arguments, "INPUT.MIN_SIZE_TEST", "48"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["0.png", "1.png", "2.png"]
    assert Image.open(tmp_path / "out" / "0.png").size == (512, 384)  # enlarged for the labels
    results = json.loads(boxes.read_text())
    assert {r["image_id"] for r in results} == {70, 71, 72}
    assert {r["category_id"] for r in results} <= {1, 2, 3}
    assert "MODEL.CATEGORY_IDS" in capsys.readouterr().out
    # Taken as the truth, the predictions must be found again, each of them.
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": images,
            "categories": [{"id": i} for i in (1, 2, 3)],
            "annotations": [
                {**r, "id": i, "iscrowd": 0, "area": r["bbox"][2] * r["bbox"][3]}
                for i, r in enumerate(results, start=1)
            ],
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(str(boxes)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert evaluation.stats[0] == pytest.approx(1)


def test_a_broken_file_is_named_and_the_exit_code_says_so(
    predict: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_run(make_probe_config(), tmp_path / "run")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "broken.jpg").write_text("not a picture")
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "in" / "red.png")
    arguments = ["--weights", weights, "--input", str(tmp_path / "in")]
    assert predict.main([*arguments, "--json", str(tmp_path / "r.json")]) == 1
    captured = capsys.readouterr()
    assert "broken.jpg" in captured.err
    assert "1 boxes" in captured.out
    (box,) = json.loads((tmp_path / "r.json").read_text())
    assert box["category_id"] == 9


def test_bad_arguments_are_named_with_exit_code_2(
    predict: ModuleType, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_run(make_probe_config(), tmp_path / "run")
    pretrained = save_run(load_config(RECIPE, [w for p in OPTS.items() for w in p]), tmp_path / "p")
    out = f"--output {tmp_path / 'out'}"
    for words, named in (
        (f"--weights none.pth --input {photos} {out}", "'none.pth'"),
        (f"--weights {weights} --input nowhere {out}", "'nowhere'"),
        (f"--weights {weights} --input {photos}", "--json"),
        (f"--weights {weights} --input {photos} {out} A.B 1", "A.B"),
        (f"--weights {tmp_path}/m.onnx --input x --json y --fast", "--fast"),
        (f"--weights {pretrained} --input {photos} {out}", "QBHeat"),
    ):
        with pytest.raises(SystemExit) as caught:
            predict.main([*words.split()[:4], "--device", "cpu", *words.split()[4:]])
        assert caught.value.code == 2
        assert named in capsys.readouterr().err


def test_the_fast_form_finds_the_same_boxes_and_says_what_it_did(
    predict: ModuleType, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_run(make_retinanet_config(), tmp_path / "run")
    found = []
    for flags in ([], ["--fast"]):
        path = tmp_path / f"{len(flags)}.json"
        arguments = ["--weights", weights, "--input", str(photos), "--json", str(path)]
        arguments += ["--score-threshold", "0", "--device", "cpu", *flags]
        assert predict.main([*arguments, "MODEL.DEPLOY.COMPILE", "off"]) == 0
        found.append(json.loads(path.read_text()))
    said = capsys.readouterr().err
    assert "fold" in said
    assert len(found[0]) == len(found[1]) > 0
    for plain, fast in zip(*found, strict=True):
        assert plain["category_id"] == fast["category_id"]
        assert plain["score"] == pytest.approx(fast["score"], abs=1e-4)
        assert plain["bbox"] == pytest.approx(fast["bbox"], abs=0.05)
