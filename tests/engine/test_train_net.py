# Copyright (c) qbheat_det contributors. Apache-2.0.
"""tools/train_net.py: train, save, average, evaluate, refuse; what a whole run leaves behind."""

import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from detectron2.engine import default_argument_parser
from detectron2.modeling import build_model

from qbheat_det.checkpoint import info_of, read_weights
from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine import RunFlags, read_config
from qbheat_det.engine.evaluation import Evaluation
from tests.tool_modules import load_tool

from . import tiny_training
from .tiny_training import TINY_ENCODER, losses, read_opts, run_tool, state, words_of

RETINANET = "quick_schedules/retinanet_285M_cells.yaml"
FAST = [
    *words_of(TINY_ENCODER),
    "SOLVER.MAX_ITER", "2", "SOLVER.IMS_PER_BATCH", "2", "DATALOADER.NUM_WORKERS", "0",
    "INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64",
    "MODEL.RETINANET.SCORE_THRESH_TEST", "0.0",
    "MODEL.FPN.OUT_CHANNELS", "64", "MODEL.ROI_BOX_HEAD.FC_DIM", "16",
    "MODEL.ROI_MASK_HEAD.CONV_DIM", "8", "MODEL.ROI_MASK_HEAD.NUM_CONV", "1",
    # Untrained two-stage detectors propose a thousand boxes an image and keep none.
    "MODEL.RPN.POST_NMS_TOPK_TRAIN", "16", "MODEL.RPN.POST_NMS_TOPK_TEST", "4",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0", "TEST.DETECTIONS_PER_IMAGE", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(few_data):
    """Runs the tool in this process on the tiny set; returns its results."""

    def go(config, *opts, flags=()):
        json_file, images = str(few_data / "annotations.json"), str(few_data / "images")
        data = ["--data", json_file, "--val", json_file, "--images", images]
        config_file = ["--config-file", get_config_path(config)]
        return run_tool([*config_file, *data, *flags, *FAST, *opts])

    return go


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """Folder and results of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(RETINANET, "OUTPUT_DIR", str(folder))


@pytest.mark.parametrize(
    ("config", "task"),
    [("coco/mask_rcnn_285M.yaml", "segm"), ("coco/fcos_285M.yaml", "bbox")],
)
def test_a_detector_trains_and_evaluates_by_four_flags(run, tmp_path, config, task):
    masks = ("INPUT.MASK_FORMAT", "bitmask")  # the masks of the drawn set are RLE
    results = run(config, "OUTPUT_DIR", str(tmp_path), "SOLVER.EPOCHS", "0.0", *masks)
    assert "AP" in results[task]
    assert (tmp_path / "model_final.pth").is_file()
    assert all(math.isfinite(loss) for loss in losses(tmp_path).values())


def test_a_run_leaves_classes_record_and_curves_and_is_evaluated_with_the_same_results(
    trained, few_data, run
):
    folder, expected = trained
    cfg = load_config(folder / "config.yaml")
    content = json.loads((few_data / "annotations.json").read_text())
    categories = content["categories"]
    assert cfg.MODEL.CATEGORY_IDS == [category["id"] for category in categories]
    assert cfg.MODEL.CLASS_NAMES == [category["name"] for category in categories]
    assert cfg.MODEL.RETINANET.NUM_CLASSES == len(categories) < max(cfg.MODEL.CATEGORY_IDS)
    (start,) = json.loads((folder / "run.json").read_text())
    source = {
        "format": "coco",
        "path": str(few_data / "annotations.json"),
        "image_root": str(few_data / "images"),
    }
    assert start["data"] == dict.fromkeys(("custom_train", "custom_val"), source)
    assert start["account"]["images"]["used"] == len(content["images"])
    assert start["account"]["boxes"]["used"] == len(content["annotations"])
    assert "training images" in "".join(start["shared_images"])
    report = json.loads((folder / "report" / "detections.json").read_text())
    shown = report["data"]["runs"][folder.name]
    for key in ("AP", "AP50"):
        assert shown[key] == pytest.approx(expected["bbox"][key])

    config = (folder / "config.yaml").read_bytes()
    opts = ("OUTPUT_DIR", str(folder), "MODEL.WEIGHTS", str(folder / "model_final.pth"))
    evaluated = run(RETINANET, *opts, flags=("--eval-only",))
    assert json.dumps(evaluated) == json.dumps(expected)
    assert (folder / "config.yaml").read_bytes() == config


def test_an_evaluation_writes_only_into_a_folder_that_is_named(trained, run, tmp_path, monkeypatch):
    folder, expected = trained
    monkeypatch.chdir(tmp_path)
    weights = ("--weights", str(folder), "--eval-only")
    assert run(RETINANET, flags=weights)["bbox"]["AP"] == expected["bbox"]["AP"]
    assert not list(tmp_path.iterdir())
    run(RETINANET, flags=(*weights, "--output", "results"))
    assert list(tmp_path.glob("results/inference/*/coco_instances_results.json"))


def test_an_evaluation_names_no_file_that_is_removed_at_its_end(
    trained, few_data, tmp_path, monkeypatch, capsys
):
    """Neither the list of what is left out, nor the split that the weights were trained with."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(few_data, "set")
    shutil.copy(next(Path("set/images").iterdir()), "set/images/unused.jpg")
    shutil.copytree(trained[0], "run")
    data = ["--data", "set/annotations.json", "--images", "set/images"]
    names = [image["file_name"] for image in json.loads(Path(data[1]).read_text())["images"]]
    split = {"data": str(tmp_path / data[1]), "train": names[1:], "val": names[:1]}
    Path("run/split.json").write_text(json.dumps(split))
    evaluate = ["--eval-only", "--weights", "run", *data, *FAST]
    run_tool(evaluate)
    shown = capsys.readouterr().err
    assert "left out: 1 image without labels (--output FOLDER keeps the list" in shown
    assert "split.json" not in shown.replace("run/split.json", "")
    assert tempfile.gettempdir() not in shown.replace(str(tmp_path), "")
    run_tool([*evaluate, "--output", "results"])
    assert "(see 'results/left_out.txt')" in capsys.readouterr().err
    assert "unused.jpg" in Path("results/left_out.txt").read_text()


def test_a_frozen_backbone_is_bit_equal_after_real_training(run, tmp_path):
    config, start = "quick_schedules/mf_detr_211_285M_cells.yaml", tmp_path / "start.pth"
    small = ("MODEL.MF_DETR.HIDDEN_DIM", "16", "MODEL.MF_DETR.NHEADS", "2")
    opts = [
        *words_of(TINY_ENCODER),
        *small,
        "MODEL.DEVICE",
        "cpu",
        "MODEL.MF_DETR.NUM_CLASSES",
        "6",
    ]
    before = build_model(load_config(get_config_path(config), opts)).state_dict()
    torch.save({"model": before}, start)
    frozen = ("MODEL.BACKBONE.FREEZE_AT", "5", "MODEL.WEIGHTS", str(start))
    results = run(config, "OUTPUT_DIR", str(tmp_path / "probe"), *frozen, *small)
    assert "AP" in results["bbox"]
    after = torch.load(tmp_path / "probe" / "model_final.pth", weights_only=True)["model"]
    backbone = [key for key in after if key.startswith("backbone.")]
    assert backbone
    for key in backbone:
        assert torch.equal(after[key], before[key]), key
    assert any(not torch.equal(after[key], before[key]) for key in after if "decoder" in key)


def test_flags_are_those_of_detectron2_in_any_order():
    words = ["SOLVER.BASE_LR", "-0.5", "--resume", "OUTPUT_DIR", "x", "--config-file", "c.yaml"]
    args = load_tool("train_net").parse_args(words)
    assert (args.resume, args.config_file) == (True, "c.yaml")
    assert args.opts == ["SOLVER.BASE_LR", "-0.5", "OUTPUT_DIR", "x"]
    own = load_tool("train_net").parse_args([])
    for name, default in vars(default_argument_parser().parse_args([])).items():
        assert getattr(own, name) == default, name


@pytest.mark.parametrize(
    ("opts", "flags", "named"),
    [
        (("SOLVER.MAXITER", "3"), (), "SOLVER.MAX_ITER"),
        ((), ("--eval-only",), "--weights"),
        (("MODEL.WEIGHTS", __file__ + ".pkl"), (), ".pkl"),
        (("OUTPUT_DIR", "/proc/nowhere"), (), "OUTPUT_DIR"),
        (("MODEL.META_ARCHITECTURE", "Bogus"), (), "Bogus"),
        ((), ("--eval-only", "--dry-run"), "--dry-run"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(run, tmp_path, capsys, opts, flags, named):
    with pytest.raises(SystemExit) as stopped:
        run(RETINANET, "OUTPUT_DIR", str(tmp_path / "new"), *opts, flags=flags)
    assert stopped.value.code == 2
    assert not (tmp_path / "new").exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert named in last


@pytest.fixture(scope="module")
def averaged(tiny_data, tmp_path_factory):
    """A run in epochs that averages its weights, with evaluated weights in ``evaluated.pt``."""
    folder = tmp_path_factory.mktemp("averaged")
    opts = read_opts("""
SOLVER.EPOCHS 0.6
SOLVER.REFERENCE_BATCH_SIZE 8 SOLVER.LR_SCALING linear SOLVER.EMA.ENABLED True SOLVER.EMA.DECAY 0.5
SOLVER.CHECKPOINT_PERIOD 1 SOLVER.CHECKPOINTS_KEPT 0
""")
    whole = Evaluation.__call__

    def note(self, model):
        torch.save(model.state_dict(), folder / "evaluated.pt")
        return whole(self, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "__call__", note)
        tiny_training.train(folder, tiny_data, opts)
    return folder


def test_the_average_is_that_of_all_weights_and_buffers(averaged):
    average, raw = state(averaged)["ema"], state(averaged)["model"]
    evaluated = torch.load(averaged / "evaluated.pt", weights_only=True)
    exported, info = read_weights(str(averaged / "model_final.safetensors"))
    assert info.iteration == 3
    for weights in (evaluated, exported):
        torch.testing.assert_close(dict(weights), average, rtol=0, atol=0)
    for key in ("running_var", "weight"):
        assert any(not torch.equal(average[name], raw[name]) for name in raw if key in name)


def test_the_average_forgets_faster_in_the_first_steps(averaged):
    names = ("model_0000000", "model_0000001", "model_0000002", "model_final")
    steps = [state(averaged, name)["model"] for name in names]
    average, expected = state(averaged)["ema"], dict(steps[0])
    for decay, raw in zip((1 - 2 ** (-2 / 3), 0.5, 0.5), steps[1:], strict=True):
        expected = {name: torch.lerp(raw[name], expected[name], decay)
                    for name in raw if raw[name].is_floating_point()}  # fmt: skip
    found = {name: average[name] for name in expected}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_the_average_starts_at_the_weights_of_a_file(averaged, tiny_data, tmp_path):
    file = str(averaged / "model_final.safetensors")
    opts = {"MODEL.WEIGHTS": file, "SOLVER.EMA.ENABLED": "True"}
    run = tiny_training.start_run(tiny_training.parse(tmp_path, tiny_data, opts))
    weights = dict(run.bare_model.state_dict())
    torch.testing.assert_close(dict(run.evaluated_model.state_dict()), weights, rtol=0, atol=0)
    # The images of both runs count.
    run.iter = 2
    run.export("both")
    batch_size = run.cfg.SOLVER.IMS_PER_BATCH
    images_seen = info_of(file).images_seen + 3 * batch_size
    assert info_of(str(tmp_path / "both.safetensors")).images_seen == images_seen


def test_the_config_in_the_folder_and_in_the_weights_makes_the_same_run(averaged):
    cfg = load_config(averaged / "config.yaml")
    assert cfg.SOLVER.MAX_ITER == 4
    assert cfg.SOLVER.BASE_LR == pytest.approx(0.002 * 2 / 8)
    weights, info = read_weights(str(averaged / "model_final.safetensors"))
    assert yaml.safe_load(info.config) == yaml.safe_load((averaged / "config.yaml").read_text())
    assert info.class_names == tuple(cfg.MODEL.CLASS_NAMES)
    (averaged / "alone.yaml").write_text(info.config)
    model = build_model(load_config(averaged / "alone.yaml"))
    assert not any(model.load_state_dict(weights))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.DEVICE", "gpu"),
        ("INPUT.MIN_SIZE_TRAIN", "()"),
        ("INPUT.FORMAT", "XYZ"),
        ("INPUT.TILE", "31"),
        ("SOLVER.WEIGHT_DECAY", "-0.1"),
        ("TEST.PRECISE_BN.ENABLED", "True"),
        ("SOLVER.AMP.PRECISION", "half"),
        ("SOLVER.EMA.DECAY", "1.0"),
        ("SOLVER.ACCUMULATE", "3"),
        ("SOLVER.LOG_PERIOD", "0"),
        ("SOLVER.IMS_PER_BATCH", "0"),
        ("MODEL.RETINANET.NUM_CLASSES", "9"),
        ("DATASETS.TRAIN", "('cells_sample_train',)"),
    ],
)
def test_values_out_of_range_are_refused_by_their_key(train_afresh, tmp_path, key, value):
    enabled = {"SOLVER.AMP.ENABLED": "True", "SOLVER.EMA.ENABLED": "True"}
    section = key.rpartition(".")[0] + ".ENABLED"
    opts = {section: enabled[section]} if section in enabled else {}
    named = key.removesuffix(".ENABLED").replace(".", r"\.")
    with pytest.raises(UserError, match=named):
        train_afresh(tmp_path, {**opts, key: value})
    assert not list(tmp_path.glob("*.pth"))


def test_flags_of_config_keys_and_the_image_size():
    recipe = "custom/retinanet_285M_scratch.yaml"
    words = "--epochs 3 --batch 2 --image-size 128 --freeze --device cpu --config-file"
    args = load_tool("train_net").parse_args([*words.split(), recipe])
    cfg = read_config(RunFlags.from_args(args))
    plain = read_config(RunFlags(config_file=recipe))
    assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.DEVICE) == (3.0, 2, "cpu")
    assert (cfg.MODEL.BACKBONE.FREEZE_AT, cfg.INPUT.MIN_SIZE_TRAIN) == (9, (100, 114, 128))
    ratio = plain.INPUT.MAX_SIZE_TEST / plain.INPUT.MIN_SIZE_TEST
    assert pytest.approx(128 * ratio, abs=1) == cfg.INPUT.MAX_SIZE_TEST
    assert cfg.INPUT.DETR_CROP_RESIZE == [114, 142]  # of 256 and 320 for 288
    default = "custom/retinanet_lite0_finetune.yaml"  # tests at 480, trains up to 384
    for eval_only, expected in ((False, (576, 720)), (True, (461, 576))):
        flags = RunFlags(config_file=default, image_size=576, eval_only=eval_only)
        sizes = read_config(flags)
        largest = max(sizes.INPUT.MIN_SIZE_TRAIN)
        assert sorted((largest, sizes.INPUT.MIN_SIZE_TEST)) == sorted(expected)
    for field, key in (("epochs", "SOLVER.EPOCHS"), ("image_size", "INPUT.MIN_SIZE_TEST")):
        flags = {field: 64, "opts": [key, "64"]}
        with pytest.raises(UserError, match=key):
            read_config(RunFlags(config_file=recipe, **flags))
    with pytest.raises(UserError, match="image-size"):
        read_config(RunFlags(config_file=recipe, image_size=8))
    for name in ("epochs", "minutes", "batch"):
        with pytest.raises(UserError, match=f"--{name}"):
            RunFlags(**{name: 0})
