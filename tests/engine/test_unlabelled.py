# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training with images without labels, by ``--unlabelled``."""

import itertools
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.data.unlabelled import add_noise, build_strong_colours
from qbheat_det.engine import Trainer
from qbheat_det.engine.mean_teacher import SemiSupervisedEvalHook
from qbheat_det.modeling.contracts import STRONG, UNLABELLED
from tests.toy_set import draw_toy_set

from . import tiny_training
from .test_resume import assert_same_bits, break_at, comparable
from .tiny_training import MF_DETR, build_config, losses, read_opts, state

SEMI = read_opts("SOLVER.MAX_ITER 5 MODEL.SEMI.BURN_IN 0.2 MODEL.SEMI.RATIO 2 TEST.EVAL_PERIOD 4")
FROZEN = read_opts("""
MODEL.BACKBONE.FREEZE_AT 5 INPUT.FIXED_VIEWS.COUNT 2 MODEL.CACHE_FEATURES.ENABLED True
MODEL.CACHE_FEATURES.DTYPE float32
""")


@pytest.fixture(scope="module")
def photos(tiny_data, tmp_path_factory):
    """Five new images, one of them twice, two labelled ones under other names, a broken file, an
    image of 16 bits, an elongated one."""
    folder = tmp_path_factory.mktemp("photos")
    drawn = draw_toy_set(tmp_path_factory.mktemp("drawn"), 5, name="more", seed=9) / "images"
    new = sorted(drawn.iterdir())
    for path in new:
        shutil.copy(path, folder / f"new_{path.name}")
    Image.open(new[0]).save(folder / "again.png")
    for index, path in enumerate(sorted((tiny_data / "images").iterdir())[:2]):
        Image.open(path).save(folder / f"labelled_{index}.png")
    (folder / "broken.jpg").write_bytes(new[0].read_bytes()[:100])
    Image.new("I;16", (64, 64), 999).save(folder / "deep.png")
    Image.new("RGB", (3000, 2)).save(folder / "thin.png")
    return folder


def test_repeated_and_broken_images_are_left_out_and_batches_resume_anywhere(
    tmp_path, tiny_data, photos, caplog
):
    args = tiny_training.parse(tmp_path, tiny_data, SEMI, "--unlabelled", str(photos))
    with caplog.at_level(logging.INFO):
        stream = Trainer(build_config(args)).data_loader
    assert stream.unlabelled.num_images == 5
    assert stream.num_images == 12 + 5
    line = next(m for m in caplog.messages if "unlabelled images are used" in m)
    # The tiny set is both training and validation set.
    assert all(part in line for part in ("5 of 11", "2 validation", "1 are duplicates", "3 cannot"))
    assert any(all(f"{n}." in m for n in ("broken", "deep", "thin")) for m in caplog.messages)

    def names(entries):
        return [entry["file_name"] for entry in entries]

    def take(start):
        stream.start = start
        few = itertools.islice(stream, 4 - start)
        return [(names(batch), [names(one.get(UNLABELLED, ())) for one in batch]) for batch in few]

    whole = take(0)
    assert whole[0][1] == [[], []]  # burn-in
    assert all(len(part) == 2 for _, parts in whole[1:] for part in parts)
    for start in (1, 3):
        assert take(start) == whole[start:]


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_broken_run_ends_with_the_bits_of_an_unbroken_one(
    is_cached, photos, train_afresh, tmp_path, monkeypatch
):
    opts = {**SEMI, **(FROZEN if is_cached else {"SOLVER.ACCUMULATE": "2"})}
    opts["MODEL.CACHE_FEATURES.FOLDER"] = str(tmp_path / "cache")
    flags = "--unlabelled", str(photos), "--resume"
    results = train_afresh(tmp_path / "whole", opts, *flags)
    assert results["bbox"].keys() == results["student"]["bbox"].keys()
    break_at(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_afresh(tmp_path / "broken", opts, *flags)
    train_afresh(tmp_path / "broken", opts, *flags)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert_same_bits(comparable(state(tmp_path / "broken")), comparable(state(tmp_path / "whole")))
    lines = map(json.loads, (tmp_path / "whole" / "metrics.json").read_text().splitlines())
    seen = {line["iteration"]: line for line in lines if "total_loss" in line}
    assert [i for i, line in seen.items() if "loss_pseudo_cls" in line] == [1, 2, 3, 4]
    assert [i for i, line in seen.items() if "pseudo_boxes" in line] == [1, 2, 3, 4]
    # The burn-in is one step, the period four.
    assert [i for i, line in seen.items() if "student/bbox/AP50" in line] == [0, 3, 4]


def train_with_teacher(args):
    """Trains as one of several processes, on two images and two unlabelled ones a step.

    Returns:
        The weights of teacher and student, and the unlabelled images that this process uses in six
        steps.
    """
    folder = Path(args.folder) / "taught"
    folder.mkdir(exist_ok=True)
    opts = {**SEMI, "MODEL.SEMI.RATIO": "1", "SOLVER.MAX_ITER": "3", "MODEL.DEVICE": "cpu"}
    flags = "--unlabelled", args.photos
    trainer = Trainer(build_config(tiny_training.parse(folder, Path(args.data), opts, *flags)))
    trainer.resume_or_load(resume=False)
    trainer.train()
    stream = trainer.data_loader
    stream.start = stream.burn_in
    batches = itertools.islice(stream, 6)
    return {
        "teacher": {k: v.clone() for k, v in trainer._average.module.state_dict().items()},
        "student": {k: v.clone() for k, v in trainer.bare_model.state_dict().items()},
        "used": [u["file_name"] for batch in batches for e in batch for u in e[UNLABELLED]],
    }


def test_the_teacher_sees_the_weak_view_and_noise_leaves_the_rest(tmp_path, tiny_data, photos):
    args = tiny_training.parse(
        tmp_path, tiny_data, {**SEMI, "MODEL.SEMI.BURN_IN": "0"}, "--unlabelled", str(photos)
    )
    entry = next(iter(Trainer(build_config(args)).data_loader))[0][UNLABELLED][0]
    assert entry[STRONG].shape == entry["image"].shape
    assert entry[STRONG].dtype == torch.uint8
    assert not torch.equal(entry[STRONG], entry["image"])
    torch.manual_seed(0)
    maps = {"s8": torch.ones(400, 20, 20), "tokens": torch.ones(6, 8)}
    noisy = add_noise(maps)
    assert torch.equal(noisy["tokens"], maps["tokens"])
    kept = noisy["s8"].amax(dim=(1, 2)) > 0
    assert abs(float(kept.float().mean()) - 0.8) < 0.1
    torch.testing.assert_close(noisy["s8"][kept].unique(), torch.tensor([0.0, 1 / 0.8]))
    assert abs(float((noisy["s8"][kept][0] == 0).float().mean()) - 0.2) < 0.05
    assert float(maps["s8"].min()) == 1
    image = torch.randint(256, (3, 16, 16), dtype=torch.uint8)
    changed = []
    for pixel_format, order in (("RGB", [0, 1, 2]), ("BGR", [2, 1, 0])):
        torch.manual_seed(1)
        changed.append(build_strong_colours(pixel_format)(image[order])[order])
    assert torch.equal(*changed)


@pytest.mark.parametrize(
    ("opts", "named"),
    [
        (MF_DETR, "MFDETR"),
        ({"SOLVER.EMA.ENABLED": "False"}, "SOLVER.EMA.ENABLED"),
        ({"MODEL.SEMI.BURN_IN": "1.0"}, "MODEL.SEMI.BURN_IN"),
        ({"MODEL.SEMI.RATIO": "0"}, "MODEL.SEMI.RATIO"),
        ({"DATASETS.UNLABELLED": "('elsewhere',)"}, "--unlabelled"),
    ],
)
def test_bad_values_are_refused_by_their_key(opts, named, tmp_path, tiny_data, photos):
    args = tiny_training.parse(tmp_path, tiny_data, opts, "--unlabelled", str(photos))
    with pytest.raises(UserError, match=named):
        Trainer(build_config(args))


def test_images_that_all_have_labels_are_refused(tmp_path, tiny_data):
    flags = "--unlabelled", str(tiny_data / "images")
    with pytest.raises(UserError, match="none of the 12 images is left"):
        Trainer(build_config(tiny_training.parse(tmp_path, tiny_data, SEMI, *flags)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        build_config(
            tiny_training.parse(tmp_path, tiny_data, SEMI, "--unlabelled", f"{tmp_path}/empty")
        )


def test_a_result_below_that_of_the_burn_in_is_warned_of_after_a_resume_too(caplog, monkeypatch):
    class Run:
        iter = 0

    results = iter([30.0, 31.0, 29.0])
    hook = SemiSupervisedEvalHook(burn_in=10, period=0, best_metric="bbox/AP")
    monkeypatch.setattr(
        "qbheat_det.engine.hooks.EvalHook._evaluate",
        lambda self: setattr(self, "value", next(results)),
    )
    for iteration in (9, 14, 19):
        again = SemiSupervisedEvalHook(burn_in=10, period=0, best_metric="bbox/AP")
        again.load_state_dict(hook.state_dict())
        again.trainer = Run()
        again.trainer.iter = iteration
        again._evaluate()
        hook = again
    (warning,) = [m for m in caplog.messages if "worse" in m]
    assert all(value in warning for value in ("29", "30"))
