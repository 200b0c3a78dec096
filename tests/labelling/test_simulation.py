# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The simulation of labelling: its points, its curve, and how it continues."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from qbheat_det.api.training import train_afresh
from qbheat_det.core.errors import UserError
from qbheat_det.core.termination import Interrupted
from qbheat_det.engine import RunFlags
from qbheat_det.inference.embedding import Embeddings
from qbheat_det.labelling import simulation
from qbheat_det.labelling.simulation import Point, simulate
from tests.engine.tiny_training import CONFIG, TINY, forget_runs, parse_run
from tests.labelling.test_inspection import write_data
from tests.toy_set import draw_toy_set


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Six images with three boxes each, whose features are known."""
    embedded = Embeddings([], torch.eye(6), {})
    monkeypatch.setattr(simulation, "embed_images", lambda *_: embedded)
    return write_data(tmp_path, 6)


def test_each_strategy_keeps_its_images_and_a_second_call_trains_only_what_is_missing(
    data, tmp_path, monkeypatch
):
    trained = []

    def train(flags):
        evaluated = json.loads(Path(flags.val).read_text())["images"]
        (root,) = flags.val_image_folders
        folders = {(Path(root) / image["file_name"]).parent for image in evaluated}
        assert folders == {tmp_path / "val"}
        names = {image["file_name"] for image in json.loads(Path(flags.data).read_text())["images"]}
        trained.append(names)
        return None, {"bbox": {"AP": float("nan"), "AP50": 10.0 * len(names)}}

    monkeypatch.setattr(simulation, "train_afresh", train)
    (tmp_path / "val").mkdir()
    val = write_data(tmp_path / "val", 7)
    (tmp_path / "val" / "1.png").rename(tmp_path / "val" / "v.png")
    val.write_text(val.read_text().replace('"1.png"', '"v.png"'))
    arguments = {"val": str(val), "images": str(tmp_path), "strategies": ["random", "k_center"]}
    points = simulate(str(data), [4, 2, 4], tmp_path / "out", seeds=[1], **arguments)
    assert [len(names) for names in trained] == [2, 4, 2, 4]
    assert trained[0] < trained[1]
    assert trained[2] < trained[3]
    assert points[1] == Point("random", 1, 4, 12, 0.0, 40.0)
    assert (tmp_path / "out" / "curve.svg").read_text().startswith("<?xml")
    again = simulate(str(data), [2, 4], tmp_path / "out", seeds=[1, 2], **arguments)
    assert len(trained) == 8
    assert again[:4] == points
    with pytest.raises(UserError, match=r"points\.json"):
        simulate(str(data), [2, 4], tmp_path / "out", **arguments, opts=["SOLVER.MAX_ITER", "4"])


def test_a_detector_is_trained_afresh(tmp_path, monkeypatch):
    run, file = tmp_path / "run", str(draw_toy_set(tmp_path, 4) / "annotations.json")
    flags = "--data", file, "--val", file, "--output", str(run)
    args = RunFlags.from_args(parse_run(CONFIG, {**TINY, "SOLVER.MAX_ITER": "1"}, *flags))
    trainer, results = train_afresh(args)
    assert {"AP", "AP50"} <= results["bbox"].keys()
    (run / "model_0000001.pth").touch()
    monkeypatch.setattr(type(trainer), "train", Mock(side_effect=Interrupted(2, "--resume")))
    with pytest.raises(Interrupted, match=r"SIGINT .* run the command again"):
        train_afresh(args)
    assert not (run / "model_0000001.pth").exists()
    forget_runs()


def test_data_and_budgets_that_do_not_fit_are_refused(data, tmp_path):
    for arguments, named in (
        ({"budgets": [7], "val": str(data)}, "7"),
        ({"budgets": [0], "val": str(data)}, "0"),
        ({"budgets": [2]}, "--val"),
        ({"budgets": [2], "val": str(data), "seeds": [-1]}, "-1"),
        ({"budgets": [2], "val": str(data), "strategies": ["luck"]}, "luck"),
        ({"budgets": [2], "val": str(data), "opts": ["SOLVER.EPOCS", "3"]}, "EPOCS"),
    ):
        with pytest.raises(UserError, match=named):
            simulate(str(data), output=tmp_path / "out", **arguments)


@pytest.mark.parametrize("name", ["simulation/run", "curve.svg"])
def test_files_of_others_are_kept(data, tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(UserError, match="choose another --output"):
        simulate(str(data), [2], tmp_path, val=str(data))
    assert (tmp_path / name).exists()


def test_images_without_boxes_are_a_point_and_no_detector_decides(data, tmp_path, monkeypatch):
    content = json.loads(data.read_text())
    data.write_text(json.dumps({**content, "annotations": content["annotations"][:1]}))
    results = {"bbox": {"AP": 1.0, "AP50": 2.0}}
    monkeypatch.setattr(simulation, "train_afresh", lambda flags: (None, results))
    monkeypatch.setattr(simulation, "cover", lambda _, vectors, need, taken, **__:
        [i for i in range(6)[::-1] if i not in taken][:need])  # fmt: skip
    arguments = {"val": str(data), "seeds": [1], "strategies": ["balanced"]}
    points = simulate(str(data), [2, 4, 6], tmp_path / "out", **arguments)
    assert [(point.boxes, point.ap50) for point in points] == [(0, 0), (0, 0), (1, 2)]
    monkeypatch.setattr(simulation, "train_afresh", None)  # nothing is left to train
    assert points == simulate(str(data), [2, 4, 6], tmp_path / "out", **arguments)
