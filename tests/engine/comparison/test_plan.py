# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which commands a comparison is made of, in which order, and what it refuses."""

import sys
from pathlib import Path
from typing import Any

import pytest

from qbheat_det.config import get_config_path, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine.comparison.objectives import list_objectives, load_objectives
from qbheat_det.engine.comparison.plan import Comparison, ImageSets, count_images, plan_stages
from qbheat_det.engine.comparison.stage import Stage, flat_config
from tests.data.pictures import draw, save

SETS = ImageSets(pretraining=40, train=40, val=10, classes=2)
QB_HEAT = get_config_path("objectives/qb_heat.yaml")
BOXES = ("t.json", "t", "v.json", "v")


def plan(tmp_path: Path, *names: str, sets: ImageSets = SETS, **asked: Any) -> dict[Any, Stage]:
    """Returns the stages by key, in order."""
    settings: dict[str, Any] = {
        "objectives": load_objectives(names, asked.get("opts", ())),
        "seeds": [1],
        "epochs": 6.0,
        "train_folder": "train",
        "val_folder": "val",
        "output_dir": tmp_path,
        "tools": Path("tools"),
        "probes": ["knn", "tran-1"],
        "probes_as_stored": ["knn"],
    }
    return {stage.key: stage for stage in plan_stages(Comparison(**(settings | asked)), sets)}


def test_the_random_encoder_is_first_and_every_config_of_the_folder_is_an_objective() -> None:
    folder = Path(QB_HEAT).parent
    configs = {path.stem for path in folder.glob("*.yaml")} - {"Base-Objective"}
    names = list_objectives()
    assert names[0] == "random"
    assert set(names) == {"random", *configs}


def test_all_shipped_objectives_have_one_encoder_and_one_size_of_images() -> None:
    objectives = load_objectives([])
    assert [objective.name for objective in objectives] == list_objectives()
    assert [objective.name for objective in objectives if objective.labelled] == ["supervised"]
    assert [objective.name for objective in objectives if not objective.trained] == ["random"]


def test_stages_of_the_first_seed_come_first_and_each_after_what_it_needs(tmp_path: Path) -> None:
    stages = plan(
        tmp_path, "random", "qb_heat", seeds=[3, 1], detectors=["retinanet"], annotations=BOXES
    )
    common = ["backbone", "probes", "probes_as_stored", "retinanet"]
    assert list(stages) == [
        (objective, seed, name)
        for seed in (3, 1)
        for objective, names in (("random", common), ("qb_heat", ["pretraining", *common]))
        for name in names
    ]
    seen: set[Any] = set()
    for key, stage in stages.items():
        assert {(*key[:2], name) for name in stage.needs} <= seen
        seen.add(key)
    assert stages["random", 1, "backbone"].needs == ()


def test_pretraining_is_the_command_that_a_person_would_type(tmp_path: Path) -> None:
    opts = ["SOLVER.IMS_PER_BATCH", "8"]
    stage = plan(tmp_path, "qb_heat", opts=opts)["qb_heat", 1, "pretraining"]
    assert stage.command() == [
        *(sys.executable, "tools/train_net.py", "--config-file", QB_HEAT),
        *("--image-folder", "train", "--resume", "SEED", "1"),
        *("OUTPUT_DIR", str(tmp_path / "qb_heat" / "seed1" / "pretraining")),
        *("SOLVER.EPOCHS", "6.0", *opts),
    ]
    assert stage.settings["config"]["SOLVER.IMS_PER_BATCH"] == 8
    assert stage.settings["config"]["SOLVER.EPOCHS"] == 6.0


def test_labels_are_learned_from_as_many_images_as_the_others_see(tmp_path: Path) -> None:
    sets = ImageSets(pretraining=100, train=40, val=10, classes=2)
    stages = plan(tmp_path, "qb_heat", "supervised", sets=sets, image_folders=["one", "two"])
    command = stages["qb_heat", 1, "pretraining"].command()
    assert command[4:8] == ["--image-folder", "one", "--image-folder", "two"]
    assert command[command.index("SOLVER.EPOCHS") + 1] == "6.0"
    command = stages["supervised", 1, "pretraining"].command()
    assert command[4:6] == ["--train-folder", "train"]
    # 6 epochs of 100 images are 15 of 40.
    assert command[command.index("SOLVER.EPOCHS") + 1] == "15.0"


def test_probes_look_at_the_backbone_anew_and_as_stored(tmp_path: Path) -> None:
    stages = plan(tmp_path, "qb_heat")
    folder = tmp_path / "qb_heat" / "seed1"
    for name, weights, probes in (
        ("probes", "recalibrated", ["knn", "tran-1"]),
        ("probes_as_stored", "as_stored", ["knn"]),
    ):
        command = stages["qb_heat", 1, name].command()
        assert command[1:4] == [
            *("tools/probe_backbone.py", "--weights"),
            str(folder / "backbone" / f"{weights}.safetensors"),
        ]
        asked = command[command.index("--probes") + 1 : command.index("--json")]
        assert asked == probes
        assert command[-2:] == ["SEED", "1"]


def test_a_detector_stands_on_the_backbone_anew_and_is_continued_where_it_was(
    tmp_path: Path,
) -> None:
    stage = plan(tmp_path, "qb_heat", detectors=["mf-dec-211"], annotations=BOXES)[
        "qb_heat", 1, "mf-dec-211"
    ]
    command = stage.command()
    weights = tmp_path / "qb_heat" / "seed1" / "backbone" / "recalibrated.safetensors"
    assert command[command.index("MODEL.WEIGHTS") + 1] == str(weights)
    assert command[command.index("--val-json") + 1] == "v.json"
    assert "--resume" not in command  # MODEL.WEIGHTS starts a run, --resume continues one
    folder = stage.folder / "mf-dec-211"
    folder.mkdir(parents=True)
    (folder / "last_checkpoint").write_text("model_0000099.pth")
    assert "--resume" in stage.command()


def test_a_detector_has_the_encoder_of_the_objectives(tmp_path: Path) -> None:
    opts = ["MODEL.MOBILE_FORMER.VARIANT", "1.0G"]
    asked = {"detectors": ["retinanet"], "annotations": BOXES}
    stage = plan(tmp_path, "random", opts=opts, **asked)["random", 1, "retinanet"]
    assert stage.settings["config"]["MODEL.MOBILE_FORMER.VARIANT"] == "1.0G"
    with pytest.raises(UserError, match="leave --detectors out"):
        plan(tmp_path, "random", opts=["MODEL.BACKBONE.NAME", "timm:resnet10t"], **asked)


def test_settings_are_free_of_where_and_how_a_run_computes() -> None:
    one = load_config(QB_HEAT, ["OUTPUT_DIR", "a", "SEED", "1", "SOLVER.LOG_PERIOD", "5"])
    other = load_config(QB_HEAT, ["MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "3"])
    assert flat_config(one) == flat_config(other)
    changed = load_config(QB_HEAT, ["SOLVER.BASE_LR", "0.1"])
    assert flat_config(one) != flat_config(changed)


def test_a_config_of_ones_own_is_an_objective(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"_BASE_: {QB_HEAT}\nSOLVER:\n  BASE_LR: 0.1\n")
    assert [one.name for one in load_objectives([str(path), "qb_heat"])] == ["mine", "qb_heat"]
    (tmp_path / "qb_heat.yaml").write_text(f"_BASE_: {QB_HEAT}\n")
    with pytest.raises(UserError, match="names qb_heat twice"):
        load_objectives(["qb_heat", str(tmp_path / "qb_heat.yaml")])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("INPUT:\n  PRETRAIN:\n    SIZE: 64\n", "different sizes .128 and 64"),
        ('MODEL:\n  MOBILE_FORMER:\n    VARIANT: "1.0G"\n', "different encoders .*VARIANT 285M"),
        ("INPUT:\n  DATASET_MAPPER_NAME: default\n", "is no objective"),
    ],
)
def test_what_would_compare_something_else_is_refused(
    content: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"_BASE_: {QB_HEAT}\n{content}")
    with pytest.raises(UserError, match=expected):
        load_objectives(["random", str(path)])


def test_an_objective_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"no objective 'simclr', but random, .*qb_heat"):
        load_objectives(["simclr"])


def test_images_are_counted_and_classes_must_be_known(tmp_path: Path) -> None:
    for split, classes in (("train", "ab"), ("val", "b"), ("other", "c"), ("photos", "x")):
        for name in classes:
            for i in range(2):
                (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
                save(tmp_path / split / name / f"{i}.png", draw(8, 8, seed=i))
    folders = {name: str(tmp_path / name) for name in ("train", "val", "other", "photos")}
    asked: dict[str, Any] = {
        "objectives": [],
        "seeds": [1],
        "epochs": 1.0,
        "tools": tmp_path,
        "output_dir": tmp_path,
        "train_folder": folders["train"],
    }
    val = folders["val"]
    assert count_images(Comparison(val_folder=val, **asked)) == ImageSets(4, 4, 2, 2)
    more = Comparison(val_folder=val, image_folders=[folders["photos"], val], **asked)
    assert count_images(more) == ImageSets(4, 4, 2, 2)
    with pytest.raises(UserError, match=r"lacks \(c\)"):
        count_images(Comparison(val_folder=folders["other"], **asked))

    before = count_images(Comparison(val_folder=val, **asked)).of("train", "val")
    first = next(Path(folders["train"]).rglob("*.png"))
    first.rename(first.with_name("another.png"))
    after = count_images(Comparison(val_folder=val, **asked)).of("train", "val")
    assert before.keys() == after.keys() == {"train", "val"}
    assert before["train"] != after["train"]  # as many images, but others
    assert before["val"] == after["val"]
