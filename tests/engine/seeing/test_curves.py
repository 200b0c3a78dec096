# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Curves of several runs: which share a chart, which are joined, and what is said of the others."""

from pathlib import Path
from typing import Any

import pytest

from qbheat_det.config import get_cfg
from qbheat_det.engine.seeing import curves
from qbheat_det.engine.seeing.curves import see_curves
from qbheat_det.engine.seeing.options import SightOptions
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.subject import open_subjects

LOG = """{"iteration": 9, "epoch": 1, "total_loss": 40.0, "lr": 0.1, "bbox/AP": 0.00028}
{"iteration": %d, "epoch": %d, "total_loss": 2.0, "lr": 0.1, "bbox/AP": 5.276}
"""


def make_run(folder: Path, *opts: Any, model: str = "RetinaNet", epochs: int = 2) -> str:
    folder.mkdir()
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = model
    cfg.OUTPUT_DIR = str(folder)
    cfg.SOLVER.EPOCHS = float(epochs)
    cfg.merge_from_list(list(opts))
    (folder / "config.yaml").write_text(cfg.dump())
    (folder / "metrics.json").write_text(LOG % (10 * epochs - 1, epochs))
    return str(folder)


def test_losses_of_two_kinds_of_models_have_a_chart_each_and_scores_share_one(
    tmp_path: Path,
) -> None:
    runs = [make_run(tmp_path / name, model=model) for name, model in
            {"a": "QBHeat", "b": "MFDETR", "c": "QBHeat"}.items()]  # fmt: skip
    exhibit = see_curves(open_subjects(runs, device="cpu"), SightOptions())
    assert list(exhibit.pictures) == ["total-loss_0", "total-loss_1", "bbox-AP", "learning-rate"]
    assert "a ends at 2; c ends at 2" in exhibit.pictures["total-loss_0"].alt
    assert exhibit.pictures["bbox-AP"].caption.startswith("a ends at 5.28; ")
    assert exhibit.pictures["total-loss_0"].alt.startswith("Total loss, QBHeat, loss")
    assert exhibit.pictures["total-loss_1"].alt.startswith("Total loss, MFDETR, loss")
    assert exhibit.table is not None
    # The log has no durations.
    row = dict(zip(exhibit.table.header, exhibit.table.rows[0], strict=True))
    assert (row["minutes of training"], row["bbox/AP"], row["total_loss"]) == ("n/a", "5.28", "2")


@pytest.mark.parametrize(
    ("opts", "is_joined"),
    [
        (("SEED", 7, "SOLVER.MAX_ITER", 50), True),
        (("SOLVER.BASE_LR", 0.5), False),
        (("DATASETS.TRAIN", ("others",)), False),
        (("MODEL.WEIGHTS", "pretrained.safetensors"), False),
    ],
)
def test_only_runs_that_differ_in_schedule_alone_are_joined(
    tmp_path: Path, opts: tuple[Any, ...], is_joined: bool
) -> None:
    runs = [make_run(tmp_path / "short"), make_run(tmp_path / "long", *opts, epochs=8)]
    short, long = open_subjects(runs, device="cpu")
    assert (curves._read_recipe(short) == curves._read_recipe(long) != "") == is_joined


def test_schedules_say_whether_runs_are_joined_and_where_they_ended(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "short"), make_run(tmp_path / "long", epochs=8)]
    read = [curves.Run(subject.label, subject.metrics, 1, recipe=curves._read_recipe(subject))
            for subject in open_subjects(runs, device="cpu")]  # fmt: skip
    scores = curves._last_scores(read, "epochs")
    picture = curves._draw_schedules(scores, read, "epochs")
    assert "A line joins" in picture.caption
    assert "bbox/AP of long after 8: 5.276" in picture.alt
    apart = [curves.replace(run, recipe=run.label) for run in read]
    assert "No line" in curves._draw_schedules(scores, apart, "epochs").caption


def test_runs_on_other_data_and_runs_that_tell_nothing_are_not_joined(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, epochs=epochs) for name, epochs in {"a": 2, "b": 4}.items()]
    record = '[{"command": ["tools/train_net.py", "--train-json", "%s", "--train-images", "i"]}]'
    for name in ("a", "b"):
        (tmp_path / name / "run.json").write_text(record % f"{name}.json")
    recipes = [curves._read_recipe(subject) for subject in open_subjects(runs, device="cpu")]
    assert all(recipes)
    assert recipes[0] != recipes[1]
    for text in ("MODEL: 3\n", "- 1\n", "a: [\n", "\xff"):
        (tmp_path / "a" / "config.yaml").write_text(text, encoding="latin-1")
        assert curves._read_recipe(open_subjects(runs[:1])[0]) == ""


def test_an_empty_log_is_told_from_a_missing_one(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "empty"), make_run(tmp_path / "none")]
    (tmp_path / "empty" / "metrics.json").write_text("")
    (tmp_path / "none" / "metrics.json").unlink()
    with pytest.raises(NothingToSee) as caught:
        see_curves(open_subjects(runs), SightOptions())
    assert "'empty' has a metrics.json without a record; 'none' has no metrics.json" in str(
        caught.value
    )
