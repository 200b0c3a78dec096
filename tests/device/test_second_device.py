# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every model on a device that refuses to mix with the CPU, and where the host waits for it."""

import fnmatch

import pytest
import torch
from torch.nn import functional as F

from qbheat_det.engine import Trainer
from qbheat_det.engine.step import BatchSource
from qbheat_det.inference.files import predict_files
from tests.engine.tiny_training import losses, start_run

from .cases import CASES, DISTILLED, draw_data, make_args
from .second_device import NAME, Generator, recorded_waits

QUICK = "mf_detr, cached"

# Patterns of places where the host waits for the device: in a step that neither logs, saves nor
# evaluates, and in an evaluation.
ALLOWED = {
    "step": {
        # The loss is checked before the weights change; the optimizer's kernels follow.
        "engine/step.py LossReading.values",
        # The gradient scaler of float16 skips steps that overflow.
        "engine/step.py StepTrainer.run_step",
        # Copies on the stream of the next batch, which the model's does not wait for.
        "engine/step.py BatchSource._move, *.to",
        # The Hungarian algorithm runs on the CPU.
        "modeling/detr/criterion.py SetCriterion.match",
        # Each position with a box is a pair, as many as there are.
        "modeling/detr/query_selection.py QuerySelection.assign",
        # Detectron2's anchors and losses, and torchvision's GIoU, choose by masks.
        "backward",
        "modeling/retinanet.py SyncRetinaNet.label_anchors, *",
        "modeling/loss_normalizer.py SyncNormalizer.losses, *",
        "modeling/*.py *, _utils._loss_inter_union",
        # Positives, and locations that learn from the mean teacher, are chosen by masks.
        "modeling/dense_pseudo_labels.py DensePseudoLabelLoss.__call__",
        # How many locations learn from the mean teacher depends on the positives of the last steps.
        "modeling/dense_pseudo_labels.py SemiSupervisedDetector.pseudo_labels",
        "modeling/retinanet.py SyncRetinaNet.losses",
    },
    "evaluation": {
        # Results are read.
        "engine/evaluation.py Evaluation._evaluate, *.to",
        "evaluation/held_out_loss.py HeldOutLossEvaluator.process",
        "evaluation/baselines.py ReconstructionBaselines.process",
        "evaluation/baselines.py _summarize",
        "evaluation/classification.py ClassificationEvaluator.process",
        "modeling/pretrain/qb_heat.py VisibleQuarters.restore_order",
        # Detectron2's images come one by one, and are not pinned.
        "modeling/loss_normalizer.py SyncNormalizer.preprocess_image, *",
        # Detectron2's boxes are checked, and chosen by masks.
        "modeling/loss_normalizer.py SyncNormalizer.forward, *",
        "modeling/detr/mf_detr.py MFDETR.resize_detections, *",
        "modeling/detr/mf_detr.py MFDETR.inference, boxes.clip",
    },
}
seen = {}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """See ``draw_data``."""
    return draw_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def waits(monkeypatch):
    """Where the host waited, of a "step" and of an "evaluation"; batches are moved ahead."""
    found = {"step": set(), "evaluation": set()}
    take, run_step = BatchSource.take, Trainer.run_step
    after_step, evaluate = Trainer.after_step, Trainer.evaluate

    def recorded(method, kind):
        def run(trainer):
            with recorded_waits() as here:
                result = method(trainer)
            if kind == "evaluation" or trainer.iter == 2:
                found[kind] |= here
            return result

        return run

    def moved(source):
        batch, seconds = take(source)
        return source._move(batch), seconds

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(BatchSource, "take", moved)
    monkeypatch.setattr(Trainer, "run_step", recorded(run_step, "step"))
    monkeypatch.setattr(Trainer, "after_step", recorded(after_step, "step"))
    monkeypatch.setattr(Trainer, "evaluate", recorded(evaluate, "evaluation"))
    return found


def read(folder):
    """Returns the weights of the last checkpoint, on the CPU."""
    return torch.load(folder / "second/model_final.pth", "cpu", weights_only=True)["model"]


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in CASES]
)
def test_a_run_gives_the_losses_of_the_cpu_resumes_and_waits_only_where_it_must(
    case, data, tmp_path, waits
):
    folder = tmp_path / "second"
    trainer = start_run(make_args(case, folder, data, NAME))
    trainer.train()
    assert {x.device.type for x in trainer.evaluated_model.parameters()} == {NAME}
    for kind, found in waits.items():
        assert [
            one for one in found if not any(fnmatch.fnmatchcase(one, p) for p in ALLOWED[kind])
        ] == []
    seen[case] = waits
    whole, expected = losses(folder), read(tmp_path)
    start_run(make_args(case, tmp_path / "cpu", data, "cpu")).train()
    tolerance = 1e-2 if "16" in case or case == DISTILLED else 2e-4  # in half precision
    assert whole == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance, abs=1e-5)

    (folder / "model_final.pth").unlink()
    (folder / "last_checkpoint").write_text("model_0000001.pth")
    start_run(make_args(case, folder, data, NAME, "--resume")).train()
    assert losses(folder) == whole
    torch.testing.assert_close(read(tmp_path), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_each_allowed_wait_is_still_there():
    if len(seen) < len(CASES):
        pytest.skip("needs all cases")
    for kind, allowed in ALLOWED.items():
        found = set().union(*(waits[kind] for waits in seen.values()))
        assert [pattern for pattern in allowed if not fnmatch.filter(found, pattern)] == []


@pytest.mark.parametrize("case", ["retinanet", pytest.param("mf_detr", marks=pytest.mark.slow)])
def test_boxes_of_the_model_and_of_its_deployed_form_are_those_of_the_cpu(
    case, data, tmp_path, waits
):
    start_run(make_args(case, tmp_path, data, NAME)).export("model_final")
    weights = str(tmp_path / "model_final.safetensors")
    options = {"score_threshold": 0}
    expected, *others = [
        predict_files(weights, [str(data / "photos")], device=device, fast=fast, **options).results
        for device, fast in (("cpu", False), (NAME, False), (NAME, True))
    ]
    assert expected
    for found in others:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one["category_id"] == other["category_id"]
            assert one["bbox"] == pytest.approx(other["bbox"], abs=1e-2)


def test_tensors_of_two_devices_do_not_mix():
    here, there = torch.ones(2, 3), torch.ones(2, 3, device=NAME)
    for mixed in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: here[there[:, 0].long()],
        lambda: torch.where(there > 0, there, here),
        lambda: F.linear(there, here),
        lambda: there.addcmul_(there, here),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mixed()
    assert torch.equal((there + torch.tensor(1)).cpu(), here + 1)  # as on CUDA
    with recorded_waits() as waits:
        there[here[:, 0].long()]
    assert len(waits) == 1
    with recorded_waits() as waits:
        here.to(NAME, non_blocking=True).mul_(2).sum(dim=1).softmax(dim=0)
    assert not waits
