# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The main job from the command line: train, save, evaluate, resume, refuse."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qbheat_det.config import load_config
from qbheat_det.data import ToySpec, prepare_toy_set
from tests.tool_modules import load_tool

from .conftest import forget_runs

ROOT = Path(__file__).resolve().parents[2]
FAST = [
    "SOLVER.MAX_ITER", "2", "SOLVER.IMS_PER_BATCH", "2", "DATALOADER.NUM_WORKERS", "0",
    "INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64",
]  # fmt: skip
# Untrained two-stage detectors propose a thousand boxes an image and keep none.
FEW_PROPOSALS = [
    "MODEL.RPN.POST_NMS_TOPK_TRAIN", "16", "MODEL.RPN.POST_NMS_TOPK_TEST", "4",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0", "TEST.DETECTIONS_PER_IMAGE", "3",
]  # fmt: skip
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare_toy_set(
        ToySpec(name="tiny", num_images=4, image_size=64), tmp_path_factory.mktemp("cache")
    )
    return Path(folder)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, toy: Path) -> Any:
    """Runs tools/train_net.py in this process on the tiny set; returns its results."""
    module = load_tool("train_net")

    def go(config: str, *opts: str, flags: tuple[str, ...] = ()) -> Any:
        results: list[Any] = []
        monkeypatch.setattr(
            "qbheat_det.engine.run_distributed", lambda main, args: results.append(main(args))
        )
        json_file, images = str(toy / "annotations.json"), str(toy / "images")
        data = ["--train-json", json_file, "--train-images", images]
        data += ["--val-json", json_file, "--val-images", images]
        argv = ["train_net.py", "--config-file", str(ROOT / "configs" / config), *data, *flags]
        monkeypatch.setattr(sys, "argv", [*argv, *FAST, *opts])
        module.invoke_main()
        return results[0]

    yield go
    forget_runs()


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ("quick_schedules/mf_detr_211_285M_toy.yaml", "bbox"),
        ("quick_schedules/retinanet_285M_toy.yaml", "bbox"),
        ("quick_schedules/faster_rcnn_285M_toy.yaml", "bbox"),
        ("quick_schedules/mask_rcnn_285M_toy.yaml", "segm"),
    ],
)
def test_a_detector_trains_and_evaluates_by_four_flags(
    run: Run, tmp_path: Path, config: str, task: str
) -> None:
    results = run(config, "OUTPUT_DIR", str(tmp_path), *FEW_PROPOSALS)
    assert "AP" in results[task]
    assert (tmp_path / "model_final.pth").is_file()
    losses = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert any(torch.isfinite(torch.tensor(entry.get("total_loss", torch.nan))) for entry in losses)


def test_the_runs_config_holds_classes_with_the_holes_in_their_ids(
    run: Run, toy: Path, tmp_path: Path
) -> None:
    run("quick_schedules/retinanet_285M_toy.yaml", "OUTPUT_DIR", str(tmp_path))
    cfg = load_config(tmp_path / "config.yaml")
    categories = json.loads((toy / "annotations.json").read_text())["categories"]
    assert cfg.MODEL.CATEGORY_IDS == [category["id"] for category in categories]
    assert cfg.MODEL.CLASS_NAMES == [category["name"] for category in categories]
    assert cfg.MODEL.RETINANET.NUM_CLASSES == len(categories)
    assert max(cfg.MODEL.CATEGORY_IDS) > len(categories)


def test_evaluating_saved_weights_gives_the_results_of_training(run: Run, tmp_path: Path) -> None:
    config = "quick_schedules/retinanet_285M_toy.yaml"
    opts = ("OUTPUT_DIR", str(tmp_path), "MODEL.RETINANET.SCORE_THRESH_TEST", "0.0")
    trained = run(config, *opts)
    weights = ("MODEL.WEIGHTS", str(tmp_path / "model_final.pth"))
    evaluated = run(config, *opts, *weights, flags=("--eval-only",))
    assert json.dumps(evaluated) == json.dumps(trained)


def test_a_resumed_run_goes_on_where_it_stopped(run: Run, tmp_path: Path) -> None:
    config, opts = "quick_schedules/retinanet_285M_toy.yaml", ("OUTPUT_DIR", str(tmp_path))
    run(config, *opts)
    run(config, *opts, "SOLVER.MAX_ITER", "3", flags=("--resume",))
    state = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert state["iteration"] == 2


def test_a_frozen_backbone_is_bit_equal_after_real_training(run: Run, tmp_path: Path) -> None:
    config = "quick_schedules/mf_detr_211_285M_toy.yaml"
    run(config, "OUTPUT_DIR", str(tmp_path / "start"), "SOLVER.MAX_ITER", "1")
    start = tmp_path / "start" / "model_final.pth"
    run(
        config, "OUTPUT_DIR", str(tmp_path / "probe"), "MODEL.BACKBONE.FREEZE_AT", "5",
        "MODEL.WEIGHTS", str(start),
    )  # fmt: skip
    before = torch.load(start, weights_only=True)["model"]
    after = torch.load(tmp_path / "probe" / "model_final.pth", weights_only=True)["model"]
    backbone = [key for key in after if key.startswith("backbone.")]
    assert backbone
    for key in backbone:
        assert torch.equal(after[key], before[key]), key
    assert any(not torch.equal(after[key], before[key]) for key in after if "decoder" in key)


def test_flags_and_overrides_may_stand_in_any_order() -> None:
    words = ["SOLVER.BASE_LR", "-0.5", "--resume", "OUTPUT_DIR", "x", "--config-file", "c.yaml"]
    args = load_tool("train_net").parse_args(words)
    assert (args.resume, args.config_file) == (True, "c.yaml")
    assert args.opts == ["SOLVER.BASE_LR", "-0.5", "OUTPUT_DIR", "x"]


@pytest.mark.parametrize(
    ("opts", "flags", "sentence"),
    [
        (("SOLVER.MAXITER", "3"), (), "SOLVER.MAX_ITER"),
        (("INPUT.DATASET_MAPPER_NAME", "dter"), (), "detr"),
        ((), ("--eval-only",), "MODEL.WEIGHTS"),
        (("MODEL.WEIGHTS", "/nowhere/w.pth"), (), "does not exist"),
        (("MODEL.WEIGHTS", __file__ + ".pkl"), (), ".pkl"),
        (("OUTPUT_DIR", "/proc/nowhere"), (), "OUTPUT_DIR"),
        (("SOLVER.OPTIMIZER", "LION"), (), "ADAMW"),
        (("MODEL.BACKBONE.FREEZE_AT", "9"), (), "FREEZE_AT"),
        (("MODEL.META_ARCHITECTURE", "Bogus"), (), "Bogus"),
        (("MODEL.MOBILE_FORMER.DROP_PATH", "1.5"), (), "DROP_PATH"),
        ((), ("--eval-only", "--resume"), "no checkpoint"),
    ],
)
def test_bad_input_ends_with_a_sentence_and_a_status(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    opts: tuple[str, ...],
    flags: tuple[str, ...],
    sentence: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(
            "quick_schedules/retinanet_285M_toy.yaml",
            *("OUTPUT_DIR", str(tmp_path)),
            *opts,
            flags=flags,
        )
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.splitlines()[-1].startswith("error: ")
    assert sentence in message


def test_a_dataset_that_is_not_there_is_named_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "coco" / "retinanet_285M_probe.yaml")
    monkeypatch.setattr(sys, "argv", ["train_net.py", "--config-file", config])
    with pytest.raises(SystemExit) as stopped:
        load_tool("train_net").invoke_main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "coco_2017_train" in message
    assert "--train-json" in message


@pytest.mark.skipif(torch.cuda.device_count() >= 64, reason="the GPUs are there")
def test_more_gpus_than_there_are_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_net.py", "--num-gpus", "64"])
    with pytest.raises(SystemExit):
        load_tool("train_net").invoke_main()
    assert "--num-gpus 64" in capsys.readouterr().err


def test_evaluating_keeps_the_config_beside_the_weights_and_minds_the_classes(
    run: Run, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, opts = "quick_schedules/retinanet_285M_toy.yaml", ("OUTPUT_DIR", str(tmp_path))
    run(config, *opts)
    kept = (tmp_path / "config.yaml").read_bytes()
    weights = ("MODEL.WEIGHTS", str(tmp_path / "model_final.pth"))
    run(config, *opts, *weights, "TEST.DETECTIONS_PER_IMAGE", "7", flags=("--eval-only",))
    assert (tmp_path / "config.yaml").read_bytes() == kept

    content = json.loads((toy / "annotations.json").read_text())
    content["categories"][0]["name"] = "other"
    renamed = tmp_path / "renamed.json"
    renamed.write_text(json.dumps(content))
    forget_runs()
    both = ("--eval-only", "--val-json", str(renamed), "--train-json", str(renamed))
    with pytest.raises(SystemExit):
        run(config, *opts, *weights, flags=both)
    assert "was trained on the classes" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_image_of_another_size_than_annotated_is_named(
    run: Run, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    content = json.loads((toy / "annotations.json").read_text())
    for image in content["images"]:
        image["width"] = 65
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(content))
    flags = ("--train-json", str(wrong), "--val-json", str(wrong))
    with pytest.raises(SystemExit) as stopped:
        run(
            "quick_schedules/retinanet_285M_toy.yaml",
            *("OUTPUT_DIR", str(tmp_path), "DATALOADER.NUM_WORKERS", workers),
            flags=flags,
        )
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: image '")
