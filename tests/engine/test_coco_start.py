# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A detector starts from a file of Detectron2's zoo, trained on COCO, and learns other classes."""

import json
import pickle

import numpy as np
import pytest
import torch
from detectron2 import model_zoo
from detectron2.modeling import build_model

import qbheat_det
from qbheat_det.checkpoint import read_weights
from tests.engine.tiny_training import run_tool

ZOO = "COCO-Detection/retinanet_R_50_FPN_3x.yaml"


@pytest.mark.slow
def test_a_detector_of_coco_is_fine_tuned_on_other_classes(few_data, tmp_path):
    cfg = model_zoo.get_config(ZOO)
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    arrays = {name: tensor.numpy() for name, tensor in build_model(cfg).state_dict().items()}
    zoo_file = tmp_path / "model_final_5bd44e.pkl"
    content = {"model": arrays, "__author__": "Detectron2 Model Zoo"}
    zoo_file.write_bytes(pickle.dumps(content))
    truth = json.loads((few_data / "annotations.json").read_text())
    truth["categories"][1]["name"] = "dog"  # a class of COCO
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    data = ["--data", str(tmp_path / "truth.json"), "--images", str(few_data / "images")]
    run_tool(
        [
            *("--config-file", "custom/retinanet_r50_coco.yaml", *data),
            *("--weights", str(zoo_file), "--output", str(tmp_path / "run")),
            *("MODEL.DEVICE", "cpu", "SOLVER.EPOCHS", "0.0", "SOLVER.MIN_ITER", "0"),
            *("SOLVER.MAX_ITER", "2", "SOLVER.IMS_PER_BATCH", "2", "SOLVER.BASE_LR", "1e-8"),
            *("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"),
            *("DATALOADER.NUM_WORKERS", "0", "DATASETS.VAL_FRACTION", "0"),
            *("SOLVER.CHECKPOINT_EPOCHS", "0.0"),
            *("TEST.EVAL_EPOCHS", "0.0", "SOLVER.WARMUP_EPOCHS", "0.0"),
        ]
    )
    detector = qbheat_det.load(tmp_path / "run", device="cpu")
    names = [category["name"] for category in truth["categories"]]
    assert detector.class_names == names
    state, _ = read_weights(str(tmp_path / "run" / "model_final.safetensors"))
    name = "head.cls_score.weight"
    rows = state[name].unflatten(0, (9, len(names)))
    stored = torch.from_numpy(np.array(arrays[name])).unflatten(0, (9, 80))
    dog = 16  # its index among the 80 classes of COCO
    torch.testing.assert_close(rows[:, names.index("dog")], stored[:, dog], rtol=0, atol=1e-5)
    trunk = "backbone.bottom_up.res5.2.conv3.weight"
    torch.testing.assert_close(state[trunk], torch.from_numpy(arrays[trunk]), rtol=0, atol=1e-5)
