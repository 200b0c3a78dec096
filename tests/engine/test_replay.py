# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The file of a failed step, and running it again: the same result, and what failed is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import META_ARCH_REGISTRY, build_model
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.config import find_memory_format, get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine.failure import dump_failure, read_failure, report_failure
from qbheat_det.engine.replay import replay_failure
from qbheat_det.engine.step import seed_step
from tests.engine.gradient_cases import MF_DETR, RETINANET, Case, make_case_config, make_image
from tests.engine.tiny_detectors import make_retinanet_config


@META_ARCH_REGISTRY.register()
class Explosive(nn.Module):
    """Takes the logarithm of the mean pixel, so that a black image breaks it; has dropout."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5))
        self.logarithm = Logarithm()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.zeros(1), persistent=False)

    def forward(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        means = torch.stack([entry["image"].float().mean()[None] for entry in batch])
        hidden = self.norm(self.inner(means / 255)) if len(batch) > 1 else self.inner(means / 255)
        return {
            "loss_hidden": hidden.square().mean() + self.offset.sum(),
            "loss_logarithm": self.logarithm(means).square().mean() * self.inner[0].bias.sum(),
        }


class Logarithm(nn.Module):
    """The one place where infinity arises."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def make_entry(number: int, *, black: bool = False) -> dict[str, Any]:
    image = torch.zeros(3, 8, 6) if black else torch.full((3, 8, 6), 100.0 + number)
    instances = Instances((8, 6), gt_boxes=Boxes([[0, 0, 3, 4]]), gt_classes=torch.tensor([1]))
    place = {"file_name": f"{number}.jpg", "image_id": number}
    return {**place, "image": image, "instances": instances}


def fail(path: Path, batches: list[Any]) -> dict[str, float]:
    """Runs a step as training does, and dumps it; returns the last losses."""
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.DEVICE = "Explosive", "cpu"
    cfg.SOLVER.IMS_PER_BATCH = 2
    torch.manual_seed(1)
    model = build_model(cfg).train()
    model.offset.fill_(0.25)
    seed_step(3, 5, 1)
    for batch in batches:
        losses = {name: loss * len(batch) / 2 for name, loss in model(batch).items()}
        sum(losses.values()).backward()
    values = {name: float(loss.detach()) for name, loss in losses.items()}
    state = {"batched_inputs": batches, "iteration": 5, "seed": 3, "rank": 1, "losses": values}
    dump_failure(path, cfg=cfg, model=model, **state)
    return values


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_replay_draws_the_same_dropout_and_gives_the_same_losses(
    tmp_path: Path, num_micro_batches: int
) -> None:
    path = tmp_path / "step.pt"
    entries = [make_entry(number) for number in range(2 * num_micro_batches)]
    values = fail(path, [entries[i::num_micro_batches] for i in range(num_micro_batches)])
    torch.manual_seed(99)
    report = replay_failure(path)
    assert report.losses == pytest.approx(values, rel=1e-6)
    assert report.is_same
    assert report.first_module is None
    assert report.not_finite["gradients"] == []


def test_a_replay_names_the_module_the_image_and_the_gradients(tmp_path: Path) -> None:
    path = tmp_path / "step.pt"
    fail(path, [[make_entry(1), make_entry(2, black=True)]])
    report = replay_failure(path)
    assert report.first_module == "logarithm (Logarithm)"
    assert report.first_module_values == "1 of 2 values; finite inputs: True, finite weights: True"
    assert report.not_finite["weights"] == []
    assert "inner.0.bias" in report.not_finite["gradients"]
    assert report.is_same
    finite = [all(np.isfinite(list(losses.values()))) for _, losses in report.images]
    assert finite == [True, False]
    assert "logarithm (Logarithm)" in str(report)
    assert "2.jpg (id 2)" in str(report)


@pytest.mark.parametrize("config", [MF_DETR, RETINANET])
def test_the_packages_detectors_run_again_as_a_batch_and_image_by_image(
    tmp_path: Path, config: str
) -> None:
    path, cfg = tmp_path / "step.pt", make_case_config(Case(config), "cpu")
    cfg.MODEL.BACKBONE.FREEZE_AT = 5
    cfg.SOLVER.IMS_PER_BATCH = 2
    model = build_model(cfg).to(memory_format=find_memory_format(cfg)).train()
    for module in model.backbone.modules():
        if isinstance(module, FrozenBatchNorm2d):  # folded into convolutions
            module.running_var.uniform_(0.1, 3)  # as initialised, folding changes nothing
    batch = [make_image(0), make_image(1)]
    seed_step(3, 5, 0)
    with EventStorage():
        losses = {name: value.item() for name, value in model(batch).items()}
    dump_failure(path, cfg=cfg, model=model, batched_inputs=[batch], iteration=5, seed=3)
    report = replay_failure(path)
    assert report.error == ""
    # To the bit; but RetinaNet's running mean in the file has moved already, and moves again.
    assert report.losses == pytest.approx(losses, rel=0 if config == MF_DETR else 0.2, abs=0)
    assert [alone.keys() for _, alone in report.images] == [losses.keys()] * 2


def test_broken_weights_and_bad_boxes_are_named(tmp_path: Path) -> None:
    cfg = make_retinanet_config()
    cfg.SOLVER.IMS_PER_BATCH = 1
    model = build_model(cfg).train()
    name, weight = next(iter(model.named_parameters()))
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan
    entry = make_entry(4)
    entry["image"] = torch.rand(3, 64, 64)
    entry["instances"] = Instances(
        (64, 64), gt_boxes=Boxes([[5, 5, 5, 9], [0, 0, 99, 9]]), gt_classes=torch.tensor([0, 1])
    )
    path = tmp_path / "step.pt"
    dump_failure(path, cfg=cfg, model=model, batched_inputs=[[entry]], iteration=0, seed=0)
    report = replay_failure(path)
    assert report.not_finite["weights"] == [name]
    assert report.first_module is not None
    assert report.first_module_values.endswith("finite weights: False")
    assert "2 boxes, of which some have no area" in report.images[0][0]


def dump_and_change(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fail(path, [[make_entry(1), make_entry(2)]])
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_an_error_of_the_model_is_reported_and_another_model_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.pt"
    dump_and_change(path, lambda content: content["batches"][0][0].update(image="no image"))
    report = replay_failure(path)
    assert report.error.startswith("AttributeError")
    assert report.error in str(report)
    assert "; raised AttributeError" in report.images[0][0]

    path = tmp_path / "step.pt"
    for change in ({"config": "MODEL:\n  NO_KEY: 1\n"}, {"weights": {"a": torch.ones(1)}}):
        dump_and_change(path, lambda content, change=change: content.update(change))
        with pytest.raises(UserError, match=r"step\.pt"):
            replay_failure(path)


def make_state() -> dict[str, Any]:
    """Arguments of ``dump_failure`` but for the path, with every kind of data in the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    model.register_buffer("offset", torch.tensor(0.25), persistent=False)
    model(torch.rand(2, 1))
    instances = Instances(
        (8, 6),
        gt_boxes=Boxes([[0.5, 1, 2, 3]]),
        gt_classes=torch.tensor([2]),
        gt_masks=PolygonMasks([[np.array([0.0, 0, 3, 0, 3, 3])]]),
        gt_bits=BitMasks(torch.ones(1, 8, 6, dtype=torch.bool)),
    )
    entry = {
        "image": torch.rand(100, 3, 8, 6)[7],  # a view of a large tensor
        "instances": instances,
        "features": {"s8": torch.ones(2)},
        "array": np.arange(3),
        "height": np.int64(8),
        "path": Path("a.jpg"),
    }
    return {
        "cfg": get_cfg(),
        "model": model,
        "batched_inputs": [[entry], [entry]],
        "iteration": 12,
        "seed": 3,
        "rank": 1,
        "losses": {"loss_a": float("nan"), "loss_b": 2.0},
        "normalizers": torch.tensor([1.0, 3.0]),
        "scale": 8.0,
    }


def test_the_file_holds_all_that_a_replay_needs_and_no_more(tmp_path: Path) -> None:
    path, state = tmp_path / "step.pt", make_state()
    dump_failure(path, **state)
    assert path.stat().st_size < 100_000
    failed = read_failure(path)
    assert (failed.iteration, failed.seed, failed.rank, failed.scale) == (12, 3, 1, 8.0)
    assert (failed.num_processes, failed.device) == (1, "cpu")
    assert "META_ARCHITECTURE" in failed.config
    assert np.isnan(failed.losses["loss_a"])
    torch.testing.assert_close(failed.normalizers, state["normalizers"])
    torch.testing.assert_close(failed.weights, dict(state["model"].state_dict()))
    assert failed.buffers["offset"].item() == 0.25
    assert failed.buffers.keys().isdisjoint(failed.weights)
    ((found,), _), ((entry,), _) = failed.batches, state["batched_inputs"]
    torch.testing.assert_close(found["image"], entry["image"])
    torch.testing.assert_close(found["features"], entry["features"])
    assert found["array"] == repr(entry["array"])
    assert (found["height"], found["path"]) == (8, repr(Path("a.jpg")))
    instances, expected = found["instances"], entry["instances"]
    assert instances.image_size == (8, 6)
    assert instances.get_fields().keys() == expected.get_fields().keys()
    torch.testing.assert_close(instances.gt_boxes.tensor, expected.gt_boxes.tensor)
    torch.testing.assert_close(instances.gt_bits.tensor, expected.gt_bits.tensor)
    polygons = instances.gt_masks.polygons
    np.testing.assert_array_equal(polygons[0][0], expected.gt_masks.polygons[0][0])


def test_the_error_names_iteration_losses_and_file(tmp_path: Path) -> None:
    error = report_failure(str(tmp_path), **make_state())
    path = tmp_path / "failure_0000012_rank1.pt"
    assert path.is_file()
    for part in ("iteration 12", "loss_a", f"--replay {path}"):
        assert part in str(error)
    # A folder that cannot be written to does not hide the failure.
    (tmp_path / "file").write_text("in the way")
    error = report_failure(str(tmp_path / "file"), **make_state())
    assert "loss_a" in str(error)
    assert "--replay" not in str(error)


def test_other_files_are_refused_and_run_nothing(tmp_path: Path) -> None:
    path, mark = tmp_path / "step.pt", tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> Any:
            return (mark.write_text, ("x",))

    form = {"format": "qbheat_det failed step, 3"}
    contents = [7, {"model": {}}, {**form, "config": Attack()}, {**form, "config": ""}]
    for content in (*contents, b"", b"half a file", None):
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        with pytest.raises(UserError, match=r"step\.pt"):
            read_failure(path)
    assert not mark.exists()
