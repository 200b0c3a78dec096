# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training on a teacher's features: targets, losses, resuming, forecasts."""

import functools
import json

import pytest
import timm
import torch
from detectron2.data import DatasetCatalog
from safetensors.torch import load_file

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.data import FixedViews, build_mapper
from qbheat_det.engine import Trainer, evaluate
from qbheat_det.engine.dry_run import dry_run
from qbheat_det.feature_cache import DistillationTargets
from qbheat_det.modeling.contracts import get_views
from qbheat_det.modeling.pretrain.distillation import feature_loss
from tests.engine.tiny_pretraining import OPTS, make_folder
from tests.engine.tiny_training import build_config, parse_run, start_run, state

RECIPE = "configs/custom/distill_285M_cpu.yaml"
TEACHER = "mobilenetv3_small_050"
MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images to train on, held-out ones, and the weights of a teacher."""
    folder = tmp_path_factory.mktemp("teacher")
    make_folder(folder / "images", 5)
    make_folder(folder / "val", 3, first=5)
    (folder / "val" / "x.jpg").write_text("no image")
    torch.manual_seed(0)
    weights = timm.create_model(TEACHER).state_dict()
    info = WeightsInfo(pixel_mean=MEAN, pixel_std=STD)  # not the config's
    save_weights(str(folder / "teacher.safetensors"), weights, info)
    return folder


def configure(folder, output_dir, *flags, **changes):
    """Returns the arguments of a run with held-out images; flags of "train_net.py" can follow."""
    opts = {
        **OPTS,
        "MODEL.TEACHER.NAME": TEACHER,
        "MODEL.TEACHER.WEIGHTS": str(folder / "teacher.safetensors"),
        "MODEL.TEACHER.IMAGE_SIZE": "128",
        "MODEL.CACHE_FEATURES.FOLDER": str(folder / "cache"),
        "MODEL.CACHE_FEATURES.DTYPE": "float32",
        "SOLVER.MAX_ITER": "2",
        "SOLVER.CHECKPOINT_PERIOD": "1",
        "TEST.EVAL_EPOCHS": "1",
        "OUTPUT_DIR": str(output_dir),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    sets = ["--val-images", str(folder / "val")]
    if "--eval-only" not in flags:
        sets += ["--images", str(folder / "images")]
    return parse_run(RECIPE, opts, *flags, *sets)


def build(folder, output_dir, *flags, **changes):
    return start_run(configure(folder, output_dir, *flags, **changes))


@functools.cache
def load_teacher(folder):
    net = timm.create_model(TEACHER).eval()
    net.load_state_dict(load_file(folder / "teacher.safetensors"))
    return net


def encode(folder, image):
    """Returns the teacher's maps of an image (3, 128, 128), by name."""
    net = load_teacher(folder)
    with torch.no_grad():
        mean, std = torch.tensor([MEAN, STD])[..., None, None]
        maps = net.forward_intermediates((image[None] - mean) / std, intermediates_only=True)
    return {f"s{128 // single.shape[-1]}": single[0] for single in maps}


def build_views(trainer):
    """Returns the training views of a run, as the student and as the teacher sees them."""
    cfg = trainer.cfg.clone()
    cfg.defrost()
    small = FixedViews(build_mapper(cfg, is_train=True), count=2)
    cfg.INPUT.PRETRAIN.SIZE, cfg.INPUT.FORMAT = 128, "RGB"  # whatever the student's is
    return small, FixedViews(build_mapper(cfg, is_train=True), count=2)


def check_targets(trainer, folder):
    """Checks each view that the stream may give against the teacher on the same view, larger."""
    small, large = build_views(trainer)
    for record in trainer.data_loader.dataset:
        allowed = []
        for number in range(2):
            large_view, small_view = large.view(record, number), small.view(record, number)
            pair = small_view["image"], encode(folder, large_view["image"])["s32"]
            allowed += [pair, tuple(x.flip(-1) for x in pair)]
        for _ in range(6):
            entry = trainer.data_loader.mapper(record)
            assert any(
                torch.equal(entry["image"], image)
                and torch.allclose(entry["targets"]["s32"], target, atol=1e-4)
                for image, target in allowed
            )


def check_held_out_loss(trainer, folder, found):
    """Compares a run's last evaluation with the mean over single images and views."""
    model, cfg = trainer.bare_model.eval(), trainer.cfg.clone()
    small = build_mapper(cfg, is_train=False)
    cfg.defrost()
    cfg.INPUT.PRETRAIN.SIZE, cfg.INPUT.FORMAT = 128, "RGB"  # whatever the student's is
    large = build_mapper(cfg, is_train=False)
    means = {}
    for i, record in enumerate(DatasetCatalog.get("custom_val_images")[:3]):
        seen, entry = large(record), small(record)
        targets = encode(folder, seen["image"])
        for view, places in get_views(cfg).items():
            place = {"place": places[i % len(places)]} if places else {}
            with torch.no_grad():
                (output,) = model([{**entry, **place, "targets": targets}])
            assert output.get("place") == place.get("place")
            means.setdefault(view, []).append(float(output["loss_feature"]))
    expected = sum(map(sum, means.values())) / sum(map(len, means.values()))
    assert found["feature/loss"] == pytest.approx(expected, rel=1e-4)
    assert ("feature/loss_corner" in found) == ("corner" in means)


def read_metrics(run):
    """Returns the losses and results of each line, which neither times nor dates are part of."""
    lines = map(json.loads, (run / "metrics.json").read_text().splitlines())
    kept = ("iteration", "total_loss", "loss", "feature", "cosine")
    return [{k: v for k, v in line.items() if k.startswith(kept)} for line in lines]


@pytest.mark.parametrize(
    ("visible", "changes"),
    [("whole", {"INPUT__FORMAT": "BGR"}), ("both", {})],
    ids=["whole", "quarters"],
)
def test_a_run_learns_the_teachers_features_of_its_views_and_resumes(
    visible, changes, folder, tmp_path
):
    changes = {**changes, "MODEL__QB_HEAT__VISIBLE": visible}
    trainer = build(folder, tmp_path, **changes)
    trainer.train()
    whole, expected = state(tmp_path)["model"], read_metrics(tmp_path)
    check_targets(trainer, folder)
    check_held_out_loss(trainer, folder, expected[-1])

    (tmp_path / "model_final.pth").unlink()
    (tmp_path / "last_checkpoint").write_text("model_0000000.pth")
    build(folder, tmp_path, "--resume", **changes).train()
    assert read_metrics(tmp_path) == expected
    torch.testing.assert_close(state(tmp_path)["model"], whole, rtol=0, atol=0)

    changes |= {"MODEL__WEIGHTS": str(tmp_path / "model_final.safetensors")}
    found = evaluate(build_config(configure(folder, tmp_path, "--eval-only", **changes)))["feature"]
    assert found["loss"] == expected[-1]["feature/loss"]


def test_a_dry_run_encodes_a_few_views_and_forecasts_the_rest(folder, tmp_path):
    cache = tmp_path / "cache"
    changes = {
        "MODEL__CACHE_FEATURES__FOLDER": str(cache),
        "MODEL__CACHE_FEATURES__DTYPE": "float16",
    }
    cfg = build_config(configure(folder, tmp_path / "run", **changes))
    report = dry_run(cfg, Trainer, num_steps=1)
    assert not cache.exists()
    (name,) = (name for name in report.costs if name.startswith("Encoding"))
    assert name == "Encoding of 14 views"  # two of five images, one of four
    Trainer(cfg).train()
    files = [path.stat().st_size for path in cache.rglob("*.safetensors")]
    # The fewer views there are in a file, the more weighs what it has besides.
    assert report.disks["Cache"][0] == pytest.approx(sum(files), rel=0.3)
    assert dry_run(cfg, Trainer, num_steps=1).disks["Cache"][0] == 0


def test_a_teacher_without_weights_is_the_same_in_every_run(folder, tmp_path):
    cfg = build_config(configure(folder, tmp_path, MODEL__TEACHER__WEIGHTS=""))
    torch.manual_seed(5)
    first, drawn = DistillationTargets(cfg)._teacher.state_dict(), torch.rand(1)
    torch.manual_seed(6)
    torch.testing.assert_close(
        DistillationTargets(cfg)._teacher.state_dict(), first, rtol=0, atol=0
    )
    torch.manual_seed(5)
    assert drawn == torch.rand(1)


def test_the_loss_is_that_of_normalised_vectors_by_hand():
    predicted, target = torch.randn(2, 3, 3, 5), torch.randn(2, 3, 3, 5) * 3 + 1
    total = 0.0
    for image in range(2):
        for row in range(3):
            for column in range(3):
                vector = target[image, row, column].double()
                wanted = (vector - vector.mean()) / (vector.var(unbiased=False) + 1e-5).sqrt()
                for error in (predicted[image, row, column] - wanted).abs().tolist():
                    total += error**2 / 4 if error < 2 else error - 1
    assert feature_loss(predicted, target).mean().item() == pytest.approx(total / 90, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"MODEL__TEACHER__IMAGE_SIZE": "96"}, "MODEL.TEACHER.IMAGE_SIZE"),
        ({"INPUT__FIXED_VIEWS__COUNT": "0"}, "INPUT.FIXED_VIEWS.COUNT"),
        ({"MODEL__CACHE_FEATURES__DTYPE": "half"}, "MODEL.CACHE_FEATURES.DTYPE"),
        ({"MODEL__QB_HEAT__VISIBLE": "quarter"}, "MODEL.QB_HEAT.VISIBLE.*whole"),
        ({"MODEL__QB_HEAT__FEATURE_DIM": "0"}, "MODEL.QB_HEAT.FEATURE_DIM"),
        ({"MODEL__TEACHER__NAME": "resnet"}, "MODEL.TEACHER.NAME"),
        ({"MODEL__TEACHER__NAME": "mobilenetv3_small_075"}, "timm://mobilenetv3_small_075"),
    ],
)
def test_a_wrong_key_is_named(changes, key, folder, tmp_path):
    with pytest.raises(UserError, match=key):
        build(folder, tmp_path, **changes).train()
