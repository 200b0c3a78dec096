# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Several processes do what one does with all images: gradients, evaluation, and failing."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.core.errors import UserError
from qbheat_det.engine import Trainer
from qbheat_det.engine.hooks import average_over_processes
from qbheat_det.engine.launch import distribute
from qbheat_det.engine.step import StepTrainer
from tests.feature_cache.test_frozen import train_from_cache
from tests.toy_set import draw_toy_set

from .classifier_cases import make_classes
from .gradient_cases import (
    CLASSIFIER,
    MF_DETR,
    MOCO,
    RETINANET,
    SELECTED_QUERIES,
    Case,
    run_all,
    run_case,
    run_reconstruction,
    run_wasserstein,
)
from .processes import make_args, run_in_processes
from .test_evaluation import configure, evaluate_all, evaluate_weights
from .test_unlabelled import train_with_teacher

UNEVEN = ((0, 1, 2, 3, 4), (6, 3, 1, 2, 0))
KINDS = {
    "no box in one process": {"batches": ((0, 1, 5, 6), (2, 3, 6, 7))},
    "no box at all": {"batches": ((5, 6, 7, 5), (7, 6, 5, 6))},
    "a frozen backbone": {"opts": ("MODEL.BACKBONE.FREEZE_AT", 5)},
    "a partly frozen backbone": {"opts": ("MODEL.BACKBONE.FREEZE_AT", 3)},
    "micro-batches of one image": {"accumulate": 2},
    "uneven micro-batches": {"batches": UNEVEN, "accumulate": 2},
}
FAMILIES = {
    "MF-DETR": (MF_DETR, (), ("no box in one process", "a frozen backbone")),
    "MF-DETR with selected queries": (MF_DETR, SELECTED_QUERIES, ("no box at all",)),
    "RetinaNet": (RETINANET, (), ("no box in one process", "no box at all")),
    "ImageClassifier": (CLASSIFIER, (), ("a frozen backbone",)),
}
EXACT_CASES = (
    {
        f"{name}, {kind}": Case(path, **{"opts": opts, **KINDS[kind]})
        for name, (path, opts, kinds) in FAMILIES.items()
        for kind in ("uneven micro-batches", *kinds)
    }
    | {
        f"MoCo, {kind}": Case(MOCO, **KINDS[kind])
        for kind in ("a partly frozen backbone", "micro-batches of one image")
    }
    | {
        "RetinaNet with unlabelled images": Case(RETINANET, UNEVEN, accumulate=2, is_taught=True),
        "RetinaNet on partial labels": Case(
            RETINANET, UNEVEN, accumulate=2, is_partly_annotated=True
        ),
        "RetinaNet that keeps classes": Case(
            RETINANET, UNEVEN, accumulate=2, is_partly_annotated=True, keeps_classes=True
        ),
        "MF-DETR that keeps classes": Case(
            MF_DETR,
            UNEVEN,
            SELECTED_QUERIES,
            accumulate=2,
            is_partly_annotated=True,
            keeps_classes=True,
        ),
        "MF-DETR on partial labels": Case(
            MF_DETR, UNEVEN, SELECTED_QUERIES, accumulate=2, is_partly_annotated=True
        ),
    }
)
SYNCED, LOCAL = "synchronised BatchNorm", "BatchNorm of each process"
SYNC_BN = ("MODEL.MOBILE_FORMER.NORM", "naiveSyncBN_N", "MODEL.MF_DETR.NORM", "naiveSyncBN_N")
SHUFFLED = "shuffled BatchNorm"
CASES = {
    **EXACT_CASES,
    SYNCED: Case(MF_DETR, UNEVEN, SYNC_BN, batch_statistics=True),
    LOCAL: Case(MF_DETR, UNEVEN, batch_statistics=True),
    SHUFFLED: Case(MOCO, ((0, 1, 2, 3, 4, 5), (6, 7, 0, 2, 4, 1)), batch_statistics=True),
}
RECONSTRUCTION = ("QBHeat", "InterpolatedMasking", "MaskTokenMasking")
WASSERSTEIN = ("dual", "contrastive")
TOY_SIZES = {"an odd number": 5, "fewer than processes": 1}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: other sums in convolutions round otherwise
    yield request.param
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def args(device, tiny_data, tmp_path_factory):
    """What the processes are told: gradients, toy sets, and weights of an objective."""
    folder, is_cpu = tmp_path_factory.mktemp("inputs"), device == "cpu"
    toy_sets = {name: str(draw_toy_set(folder, size)) for name, size in TOY_SIZES.items()}
    images = make_classes(folder / "images", dict.fromkeys("abc", 3))
    (folder / "images" / "c" / "broken.jpg").write_text("no image")
    cfg, _ = configure({}, "--images", images)
    torch.manual_seed(0)
    info = WeightsInfo.from_config(cfg, iteration=0, commit="")
    weights = str(folder / "weights.safetensors")
    save_weights(weights, Trainer.build_model(cfg).state_dict(), info)
    return make_args(
        opts=["MODEL.DEVICE", device],
        kind=device,
        cases=CASES,
        reconstruction=RECONSTRUCTION if is_cpu else (),
        wasserstein=WASSERSTEIN if is_cpu else (),
        folders=toy_sets if is_cpu else {},
        weights=weights,
        images=images,
        output_dir=str(folder / "two"),
        data=str(tiny_data),
        photos=str(draw_toy_set(folder, 5, name="more", seed=9) / "images"),
        folder=str(folder),
    )


def work(args):
    """The job of one process."""
    gradients = run_all(args)
    if args.kind != "cpu":
        return gradients
    found = {**gradients, "boxes": evaluate_all(args), "objective": evaluate_weights(args)}
    return {**found, "cached": train_from_cache(args), "taught": train_with_teacher(args)}


@pytest.fixture(scope="module")
def two_processes(args, tmp_path_factory):
    """Everything in one start of two processes, which costs more than what they do."""
    return run_in_processes(work, args, tmp_path_factory.mktemp("two"))


@pytest.fixture
def on_cpu(two_processes, device):
    """What the processes found, for what is done on the CPU alone."""
    if device != "cpu":
        pytest.skip("is tested on the CPU")
    return two_processes


def _flat(gradients):
    return torch.cat([value.cpu().flatten() for value in gradients.values()])


def _relative_error(actual, expected):
    """Of all gradients as one vector, and of the loss."""
    assert actual.keys() == expected.keys()
    return (_flat(actual) - _flat(expected)).norm() / _flat(expected).norm()


def _assert_same(actual, expected, steepness=1):
    assert _relative_error(actual, expected) < 2e-6 * steepness
    largest = _flat(expected).abs().max().item()
    for name, value in expected.items():
        atol = 1e-5 * value.abs().max().item() + 1e-7 * steepness * largest
        torch.testing.assert_close(actual[name].cpu(), value.cpu(), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", EXACT_CASES)
def test_gradients_are_those_of_the_joined_batch(two_processes, device, name):
    joined = run_case(replace(CASES[name], accumulate=1), device)
    assert _flat(joined).norm() > 1e-6
    for found in two_processes:
        _assert_same(found["detection"][name], joined)


def test_synchronised_batchnorm_sees_the_joined_batch(two_processes, device):
    joined = run_case(CASES[SYNCED], device)
    # Its variance is a difference of means, which rounds more than BatchNorm's own.
    assert _relative_error(two_processes[0]["detection"][SYNCED], joined) < 0.01
    assert _relative_error(two_processes[0]["detection"][LOCAL], joined) > 0.1


def test_shuffled_batchnorm_is_that_of_one_process_with_as_many_groups(two_processes, device):
    """The order is drawn under the seed of the first process, which both runs have."""
    groups = replace(CASES[SHUFFLED], opts=("MODEL.MOCO.NORM_GROUPS", 2))
    _assert_same(two_processes[0]["detection"][SHUFFLED], run_case(groups, device))
    together = run_case(CASES[SHUFFLED], device)
    assert _relative_error(two_processes[0]["detection"][SHUFFLED], together) > 0.1


def test_in_one_process_the_retinanet_is_detectron2s(device):
    theirs = Case(RETINANET, opts=("MODEL.META_ARCHITECTURE", "RetinaNet"))
    _assert_same(run_case(Case(RETINANET), device), run_case(theirs, device))


@pytest.mark.parametrize("arch", RECONSTRUCTION)
def test_objectives_that_reconstruct_have_the_gradients_of_the_joined_batch(on_cpu, arch):
    joined = run_reconstruction(arch, 1)
    assert joined["total_loss"] > 0.1
    for found in on_cpu:
        _assert_same(found["reconstruction"][arch], joined)


@pytest.mark.parametrize("form", WASSERSTEIN)
def test_wasserstein_dependency_compares_the_areas_of_all_processes(on_cpu, form):
    joined = run_wasserstein(form)
    assert all(gradient.any() for name, gradient in joined.items() if name != "critic.head.bias")
    for found in on_cpu:
        _assert_same(found["wasserstein"][form], joined, 20)


def test_two_processes_gather_every_image_once_and_find_the_results_of_one(on_cpu, args, tmp_path):
    for name, size in TOY_SIZES.items():
        folder = Path(args.output_dir) / "inference" / name
        found = json.loads((folder / "coco_instances_results.json").read_text())
        truth = json.loads((Path(args.folders[name]) / "annotations.json").read_text())
        expected = sorted(image["id"] for image in truth["images"])
        assert len(expected) == size
        assert sorted(result["image_id"] for result in found) == expected
    main, other = (found["boxes"] for found in on_cpu)
    alone = evaluate_all(make_args(folders=args.folders, output_dir=str(tmp_path)))
    # As text: a class without objects has an AP of nan, which is not equal to itself.
    assert json.dumps(main) == json.dumps(alone)
    assert 0 < alone["an odd number"][0]["bbox"]["AP"] < 100
    assert other == {name: [{}, {}] for name in TOY_SIZES}


def test_two_processes_find_the_held_out_loss_of_one(on_cpu, args):
    main, other = (found["objective"] for found in on_cpu)
    alone = evaluate_weights(args)
    assert main["reconstruction"] == pytest.approx(alone["reconstruction"], rel=1e-5)
    assert other == {}


def test_two_processes_share_one_encoder_one_cache_and_one_head(on_cpu, args):
    first, second = (found["cached"] for found in on_cpu)
    for part in ("encoder", "head"):
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0)
    assert first["encoded"] + second["encoded"] == 12 * 4 + 12
    caches = [folder for folder in (Path(args.folder) / "cache").iterdir() if folder.is_dir()]
    assert sorted(len(list(folder.glob("*.safetensors"))) for folder in caches) == [1, 2]


def test_two_processes_share_one_teacher_and_each_unlabelled_image_once_an_epoch(on_cpu):
    first, second = (found["taught"] for found in on_cpu)
    for part in ("teacher", "student"):
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0)
    assert any(not torch.equal(first["teacher"][k], v) for k, v in first["student"].items())
    # Five images, two in a step.
    used = [name for pair in zip(first["used"], second["used"], strict=True) for name in pair]
    assert len(used) == 12
    assert len({*used[:5]}) == len({*used[5:10]}) == 5


EQUAL = torch.arange(1, 1000) / 7  # sums of three of which do not divide back


class OneLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        return {"loss": self.weight.sum() * batch[0]["value"]}


def fail_and_average(args):
    """The job of one process: a loss of nan on the last one, then two averages."""
    rank = comm.get_rank()

    model = OneLoss()
    trainer = StepTrainer(
        distribute(model),
        itertools.repeat([{"value": math.nan if rank == 2 else 1.0}]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch_size=3,
    )
    said = ""
    with EventStorage():
        try:
            trainer.run_step()
        except UserError as error:
            said = str(error)
    frozen, moving = EQUAL.clone(), torch.tensor([3.0 * rank, 1.0])
    for _ in range(3):
        average_over_processes(frozen)
    average_over_processes(moving)
    return {"said": said, "frozen": frozen, "moving": moving, "weight": model.weight.detach()}


def test_processes_wait_for_a_failing_one_and_average_their_statistics(tmp_path):
    results = run_in_processes(fail_and_average, make_args(), tmp_path, world_size=3)
    assert not torch.equal(sum([EQUAL, EQUAL], EQUAL.clone()) / 3, EQUAL)
    for found in results:
        assert "loss nan on process 2" in found["said"]
        torch.testing.assert_close(found["weight"], torch.ones(1))
        torch.testing.assert_close(found["moving"], torch.tensor([3.0, 1.0]))
        torch.testing.assert_close(found["frozen"], EQUAL, rtol=0, atol=0)
