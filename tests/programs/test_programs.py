# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Programs as users of Detectron2 and timm write them, each run in its own process."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qbheat_det.checkpoint import read_weights
from qbheat_det.model_zoo import get_checkpoint

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
CELLS = ROOT / "qbheat_det" / "data" / "datasets" / "cells"
QBHEAT = ROOT / "tools" / "qbheat"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder for $DETECTRON2_DATASETS with eight and four of the images of cells."""
    folder = tmp_path_factory.mktemp("datasets")
    for part, count in (("train", 8), ("val", 4)):
        content = json.loads((CELLS / f"{part}.json").read_text(encoding="utf-8"))
        content["images"] = content["images"][:count]
        ids = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in ids]
        (folder / "cells" / part).mkdir(parents=True)
        (folder / "cells" / f"{part}.json").write_text(json.dumps(content), encoding="utf-8")
        for image in content["images"]:
            shutil.copy(CELLS / image["file_name"], folder / "cells" / image["file_name"])
    return folder


@pytest.fixture
def run(data, tmp_path):
    """Returns a function that runs a program in ``tmp_path`` and returns what it prints."""
    env = dict(os.environ, DETECTRON2_DATASETS=str(data), OMP_NUM_THREADS="1")
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def run_program(program, *arguments):
        command = [sys.executable, str(program), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output[-4000:]
        return output

    return run_program


def read_encoder():
    """The tensors of qbheat://distill/285M under the names of a MobileFormer."""
    weights, _ = read_weights(get_checkpoint("distill/285M"))
    return {name.removeprefix("backbone."): tensor for name, tensor in weights.items()}


def losses(output, prefix=""):
    """The losses in lines "step 3: loss 0.1234"."""
    return [float(x) for x in re.findall(prefix + r"step \d+: loss ([\d.]+)", output)]


def metrics(path):
    """The lines of a metrics.json that have a loss."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "total_loss" in line]


def results(output):
    """The numbers of each table of results that Detectron2 prints for copying."""
    return re.findall(r"copypaste: (-?[\d.]+(?:,(?:-?[\d.]+|nan))+)", output)


def test_default_trainer(run, tmp_path):
    output = run(FOLDER / "retinanet_default_trainer.py")
    assert "trained with the pixels" not in output
    assert "The checkpoint state_dict contains keys" in output  # the layers after the last output
    trained = torch.load(tmp_path / "output" / "model_final.pth", weights_only=False)["model"]
    encoder = read_encoder()
    prefix = "backbone.bottom_up."
    frozen = [name for name in encoder if name.startswith(("stem.", "stages.0."))]
    frozen = [name for name in frozen if not name.endswith("num_batches_tracked")]
    assert frozen
    for name in frozen:  # FREEZE_AT is 2 in Detectron2's config
        assert torch.equal(trained[prefix + name], encoder[name].float()), name
    name = "stages.3.0.mobile.reduce.weight"
    change = (trained[prefix + name] - encoder[name].float()).abs().max()
    assert 0 < change < 0.1 * encoder[name].abs().max()
    assert all(line["total_loss"] < 10 for line in metrics(tmp_path / "output" / "metrics.json"))
    assert len(results(output)) == 1
    assert re.search(r"[1-9]\d* boxes in an image of \(256, 341\)", output)


def test_build_model(run, tmp_path):
    output = run(FOLDER / "faster_rcnn_build_model.py")
    assert "levels: {'p2': 4, 'p3': 8, 'p4': 16, 'p5': 32, 'p6': 64}" in output
    assert "without a gradient: []" in output
    history = losses(output)
    assert len(history) == 8
    assert history[-1] < 0.7 * history[0]
    assert re.search(r"[1-9]\d* boxes in an image of \(200, 256\)", output)
    state = torch.load(tmp_path / "faster_rcnn.pth")
    encoder = read_encoder()
    # FREEZE_AT is 2, as in Detectron2's config.
    assert torch.equal(state["backbone.bottom_up.stem.weight"], encoder["stem.weight"].float())


def test_lazy_config(run, tmp_path):
    script = FOLDER / "lazyconfig_train_net.py"
    config = ["--config-file", FOLDER / "lazy_retinanet.py"]
    trained = run(script, *config)
    lines = metrics(tmp_path / "output" / "metrics.json")
    assert [line["iteration"] for line in lines] == list(range(6))
    assert all(line["total_loss"] < 10 for line in lines)
    evaluated = run(script, *config, "--eval-only", "train.init_checkpoint=output/model_final.pth")
    assert len(results(trained)) == 1
    assert results(evaluated) == results(trained)


def test_detectron2_pkl(run, data, tmp_path):
    image = sorted((data / "cells" / "val").iterdir())[0]
    output = run(FOLDER / "detectron2_pkl.py", image)
    for name in ("faster_rcnn.pkl", "retinanet.pkl"):
        assert f"{name}: DetectionCheckpointer loads all tensors: True" in output
        assert f"{name}: qbheat_det.load loads all tensors: True" in output
        assert f"{name}: classes person … toothbrush" in output
    command = ["predict", "--weights", "retinanet.pkl", "--images", image, "--json", "boxes.json"]
    overrides = ["INPUT.MIN_SIZE_TEST", "128", "MODEL.RETINANET.SCORE_THRESH_TEST", "0.0"]
    run(QBHEAT, *command, "--threshold", "0", *overrides)
    expected = torch.load(tmp_path / "retinanet.pkl.boxes.pth")
    found = json.loads((tmp_path / "boxes.json").read_text(encoding="utf-8"))
    rows = []
    for box in found:
        x, y, width, height = box["bbox"]
        rows.append([x, y, x + width, y + height, box["score"]])
    assert len(rows) == len(expected) > 0
    torch.testing.assert_close(torch.tensor(rows), expected, atol=1e-3, rtol=1e-4)

    command = ["train", "--weights", "retinanet.pkl", "--data", data / "cells" / "train.json"]
    command += ["--val", data / "cells" / "val.json", "--output", "trained", "--batch", "2"]
    output = run(QBHEAT, *command, "--image-size", "128", "--epochs", "0.5")
    assert "265/265 backbone tensors" in output
    weights, info = read_weights(str(tmp_path / "trained" / "model_final.safetensors"))
    assert list(info.class_names) == ["RBC", "WBC", "Platelets"]
    assert weights["head.cls_score.weight"].shape[0] == 9 * 3


def test_timm(run):
    output = run(FOLDER / "timm_training.py")
    assert "['mobile_former_285m.distill']" in output
    assert "channels [16, 28, 48, 120] strides [2, 4, 8, 16]" in output
    for part in ("segmentation ", "classifier "):
        history = losses(output, part)
        assert len(history) == 8
        assert history[-1] < 0.8 * history[0]
    assert "input (3, 256, 256) mean (0.485, 0.456, 0.406) Compose" in output
    assert "features (4, 912, 8, 8) head of features is forward: True" in output
    assert "layers 15 scales 0.017818 1.0" in output
    assert "classifier Linear(in_features=912, out_features=10, bias=True)" in output
    assert "vectors (4, 912) classifier Identity()" in output
    assert "logits (4, 5) num_classes 5" in output


def test_project_trains_resumes_and_evaluates(run, tmp_path):
    program = [FOLDER / "cell_spot" / "train_net.py"]
    program += ["--config-file", FOLDER / "cell_spot" / "spot_rcnn_mobile_former.yaml"]
    run(*program)
    resumed = run(*program, "--resume", "SOLVER.MAX_ITER", "6")
    assert "Starting training from iteration 4" in resumed
    evaluated = run(*program, "--eval-only", "MODEL.WEIGHTS", "output/model_final.pth")
    assert len(results(resumed)) == 1
    assert results(evaluated) == results(resumed)
    # Two processes with one image each.
    distributed = run(*program, "--num-cpus", "2", "OUTPUT_DIR", "two")
    assert len(results(distributed)) == 1
    lines = metrics(tmp_path / "two" / "metrics.json")
    assert lines
    assert all(line["total_loss"] < 20 for line in lines)
    final = torch.load(tmp_path / "two" / "model_final.pth", weights_only=False)
    assert final["iteration"] == 3
