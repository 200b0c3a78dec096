# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Files of Detectron2's model zoo give the tensors and boxes that Detectron2 gets from them."""

import pickle

import numpy as np
import pytest
import torch
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES
from detectron2.engine import DefaultPredictor
from detectron2.modeling import build_backbone, build_model

import qbheat_det
from qbheat_det.api import Detector
from qbheat_det.checkpoint import (
    SafeCheckpointer,
    holds_backbone_alone,
    info_of,
    load_run_config,
    read_weights,
)
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.inference.predict import build_detector
from qbheat_det.probing.features import load_backbone

MODELS = {
    "retinanet_r50_coco": "COCO-Detection/retinanet_R_50_FPN_3x.yaml",
    "faster_rcnn_r50_coco": "COCO-Detection/faster_rcnn_R_50_FPN_3x.yaml",
}
COCO_NAMES = [category["name"] for category in COCO_CATEGORIES if category["isthing"]]


def _arrays(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def _write(path, content, protocol=3):
    path.write_bytes(pickle.dumps(content, protocol))
    return str(path)


def _read_zoo_config(recipe):
    cfg = model_zoo.get_config(MODELS[recipe])
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.01
    cfg.INPUT.MIN_SIZE_TEST = 96
    return cfg


def _spread(model):
    """Gives a random network outputs that differ, without values that grow from block to block."""
    torch.manual_seed(0)
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith("conv3.norm.weight"):
            tensor.fill_(0.1)
        elif "cls_score" in name:
            tensor.normal_(0, 0.05 if name.endswith("weight") else 1)
    state["backbone.bottom_up.stem.conv1.weight"] /= 50
    return model


@pytest.fixture(scope="module", params=MODELS)
def zoo_file(request, tmp_path_factory):
    """The recipe, Detectron2's config, and a file in the form of its zoo, with random weights."""
    cfg = _read_zoo_config(request.param)
    arrays = _arrays(_spread(build_model(cfg)))
    # Files of older versions of Detectron2 have buffers that are no longer saved.
    arrays["pixel_mean"] = np.float32([103.53, 116.28, 123.675]).reshape(3, 1, 1)
    arrays["pixel_std"] = np.ones((3, 1, 1), np.float32)
    arrays["anchor_generator.cell_anchors.0"] = np.zeros((9, 4), np.float32)
    path = tmp_path_factory.mktemp("zoo") / "model_final.pkl"
    _write(path, {"model": arrays, "__author__": "Detectron2 Model Zoo"})
    return request.param, cfg, str(path)


def test_a_zoo_file_predicts_as_in_detectron2(zoo_file):
    recipe, cfg, path = zoo_file
    cfg.MODEL.WEIGHTS = path
    image = np.random.default_rng(0).integers(0, 255, (96, 128, 3), np.uint8)  # RGB
    expected = DefaultPredictor(cfg)(image[:, :, ::-1])["instances"]
    assert len(expected) > 20
    opts = ["INPUT.MIN_SIZE_TEST", "96", "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.01"]
    for config_file in (None, f"custom/{recipe}.yaml"):
        ours = load_run_config(path, config_file, device="cpu", opts=opts)
        assert list(ours.MODEL.CLASS_NAMES) == COCO_NAMES
        assert ours.MODEL.CATEGORY_IDS[-1] == 90
        assert ours.INPUT.FORMAT == "BGR"
        found = build_detector(ours).predict_batch([image])[0]
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            found.pred_boxes.tensor, expected.pred_boxes.tensor, rtol=1e-4, atol=1e-2
        )
        assert found.pred_classes.tolist() == expected.pred_classes.tolist()
    assert isinstance(qbheat_det.load(path, device="cpu"), Detector)


def test_tensors_and_names_are_those_of_the_file(zoo_file):
    recipe, cfg, path = zoo_file
    info = info_of(path)
    assert list(info.class_names) == COCO_NAMES
    assert (info.pixel_format, info.pixel_std) == ("BGR", (1.0, 1.0, 1.0))
    assert not holds_backbone_alone(path)
    expected = build_model(cfg)
    DetectionCheckpointer(expected).load(path)
    model = build_model(load_config(f"custom/{recipe}.yaml", ["MODEL.DEVICE", "cpu"]))
    SafeCheckpointer(model).load(path)
    _assert_equal(model, expected)


def _assert_equal(model, expected):
    state = model.state_dict()
    state.pop("loss_normalizer", None)  # of our RetinaNet
    torch.testing.assert_close(dict(state), dict(expected.state_dict()), rtol=0, atol=0)


def test_classes_of_coco_keep_their_rows(zoo_file):
    recipe, _, path = zoo_file
    classes = ["cell", "dog", "person"]
    opts = ["MODEL.DEVICE", "cpu", "MODEL.RETINANET.NUM_CLASSES", "3"]
    cfg = load_config(f"custom/{recipe}.yaml", [*opts, "MODEL.ROI_HEADS.NUM_CLASSES", "3"])
    model = build_model(cfg)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    SafeCheckpointer(model, class_names=classes).load(path)
    state, (stored, _) = model.state_dict(), read_weights(path)
    if recipe.startswith("retinanet"):
        name = "head.cls_score.weight"
        new, first, old = (x[name].unflatten(0, (9, -1)) for x in (state, fresh, stored))
    else:
        name = "roi_heads.box_predictor.cls_score.weight"
        new, first, old = (x[name][None] for x in (state, fresh, stored))
        assert torch.equal(new[0, -1], old[0, -1])  # background
    assert torch.equal(new[:, 0], first[:, 0])
    assert torch.equal(new[:, 1], old[:, COCO_NAMES.index("dog")])
    assert torch.equal(new[:, 2], old[:, 0])


def test_addresses_of_the_zoo_are_found_where_detectron2_keeps_its_downloads(
    zoo_file, tmp_path, monkeypatch
):
    recipe, _, path = zoo_file
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    address = model_zoo.get_checkpoint_url(MODELS[recipe])
    cached = tmp_path / address.partition("fbaipublicfiles.com/")[2]
    cached.parent.mkdir(parents=True)
    cached.symlink_to(path)
    name = load_config(f"custom/{recipe}.yaml").MODEL.WEIGHTS
    assert name.startswith("detectron2://")
    for weights in (address, name):
        assert info_of(weights) == info_of(path)
        assert load_run_config(weights, device="cpu").MODEL.WEIGHTS == weights


def _write_caffe2_name(name, norm):
    """Returns the name that Caffe2 has for a tensor of Detectron2, as its zoo writes it."""
    ends = {"weight": norm[0], "bias": norm[1], "running_mean": "rm", "running_var": "riv"}
    *_, module, end = name.split(".")
    head = {
        "objectness_logits": "rpn_cls_logits_fpn2",
        "anchor_deltas": "rpn_bbox_pred_fpn2",
        "fc1": "fc6",
        "fc2": "fc7",
        "cls_score": "cls_score",
        "bbox_pred": "bbox_pred",
    }
    if "rpn_head.conv." in name:
        return f"conv_rpn_fpn2_{end[0]}"
    if module in head:
        return f"{head[module]}_{end[0]}"
    if "fpn_" in name:
        stage = int(name.split("fpn_")[1].split(".")[0][-1])
        sum_name = f"res{stage}_{(2, 3, 5, 2)[stage - 2]}_sum"
        return f"fpn_{'inner_' if 'lateral' in name else ''}{sum_name}" + (
            f"_lateral_{end[0]}" if "lateral" in name else f"_{end[0]}"
        )
    name = name.removeprefix("backbone.bottom_up.")
    if name.startswith("stem"):
        return f"res_conv1_bn_{ends[end]}" if "norm" in name else "conv1_w"
    stage, block, layer = name.split(".")[:3]
    branch = {"shortcut": "1", "conv1": "2a", "conv2": "2b", "conv3": "2c"}[layer]
    return f"{stage}_{block}_branch{branch}_" + (f"bn_{ends[end]}" if "norm" in name else "w")


def test_caffe2s_detectors_are_loaded_as_detectron2_loads_them(tmp_path):
    cfg = _read_zoo_config("faster_rcnn_r50_coco")
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 32
    arrays = _arrays(_spread(build_model(cfg)))
    blobs = {}
    for name, array in arrays.items():
        if "running" not in name:  # they have affine layers
            blobs[_write_caffe2_name(name, "sb")] = array
    for name in ("cls_score_w", "cls_score_b", "fc6_w_momentum"):
        blobs[name] = np.flip(blobs[name.removesuffix("_momentum")], 0).copy()
    for name in ("bbox_pred_w", "bbox_pred_b"):  # Caffe2 has four rows for the background
        blobs[name] = np.concatenate([blobs[name][:4], blobs[name]])
    path = _write(tmp_path / "w.pkl", {"blobs": blobs, "cfg": "MODEL: {}\n"}, 2)
    expected, model = build_model(cfg), build_model(cfg)
    DetectionCheckpointer(expected).load(path)
    assert not torch.equal(*(m.roi_heads.box_head.fc1.weight for m in (model, expected)))
    SafeCheckpointer(model).load(path)
    _assert_equal(model, expected)


def _name_imagenet(source, state):
    """The names and extra tensors of ImageNet weights as Detectron2's zoo or script has them."""
    arrays = {}
    for name, tensor in state.items():
        if source == "torchvision":
            arrays[name] = tensor.numpy()
        else:
            arrays[_write_caffe2_name(f"backbone.bottom_up.{name}", ("gamma", "beta"))] = (
                tensor.numpy()
            )
    fc = np.zeros((1000, 2048), np.float32)
    if source == "torchvision":
        arrays["stem.fc.weight"] = fc
        arrays["stem.conv1.norm.num_batches_tracked"] = np.array(3)
        return {"model": arrays, "__author__": "torchvision", "matching_heuristics": True}
    return {**arrays, "conv1_b": np.zeros(64, np.float32), "fc1000_w": fc, "fc1000_b": fc[:, 0]}


@pytest.mark.parametrize("source", ["Caffe2", "torchvision"])
def test_imagenet_weights_fill_the_backbone(tmp_path, source):
    cfg = _read_zoo_config("retinanet_r50_coco")
    network = build_model(cfg).backbone.bottom_up
    for tensor in network.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape))
    path = _write(tmp_path / "R-50.pkl", _name_imagenet(source, network.state_dict()))
    expected, model = build_model(cfg), build_model(cfg)
    DetectionCheckpointer(expected).load(path)
    SafeCheckpointer(model).load(path)
    _assert_equal(model.backbone.bottom_up, expected.backbone.bottom_up)
    _assert_equal(model.backbone.bottom_up, network)
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    backbone = build_backbone(cfg)
    info = load_backbone(backbone, path)
    _assert_equal(backbone, network)
    assert info is None if source == "torchvision" else info.pixel_format == "BGR"
    assert holds_backbone_alone(path)
    cfg.MODEL.RESNETS.DEPTH = 101
    with pytest.raises(UserError, match=r"R-50\.pkl"):
        load_backbone(build_backbone(cfg), path)


@pytest.mark.parametrize("source", ["Caffe2", "torchvision"])
def test_imagenet_weights_fill_the_last_stage_of_c4_models_too(tmp_path, source):
    cfg = model_zoo.get_config("COCO-Detection/faster_rcnn_R_50_C4_1x.yaml")
    cfg.MODEL.DEVICE = "cpu"
    expected, model = build_model(cfg), build_model(cfg)
    for module in (expected, model):  # what the file lacks
        for tensor in module.state_dict().values():
            tensor.fill_(0)
    network = build_model(_read_zoo_config("retinanet_r50_coco")).backbone.bottom_up
    for tensor in network.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape))
    path = _write(tmp_path / "R-50.pkl", _name_imagenet(source, network.state_dict()))
    DetectionCheckpointer(expected).load(path)
    checkpointer = SafeCheckpointer(model)
    checkpointer.load(path)
    _assert_equal(model, expected)
    assert model.roi_heads.res5[2].conv3.weight.any()
    assert "roi_heads: new" in str(checkpointer.report)


def test_what_is_no_detectron2_file_is_refused(tmp_path):
    array = np.ones(2)
    for content in ([array], {}, {"model": [array]}, {"model": {"a": 3}}, {"blobs": {3: array}},
                    {"a": np.ones(2, np.uint64)}, {"fpn_res_w": array}):  # fmt: skip
        path = _write(tmp_path / "w.pkl", content)
        with pytest.raises(UserError, match=r"w\.pkl"):
            SafeCheckpointer(torch.nn.Linear(2, 2)).load(path)
