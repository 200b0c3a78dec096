# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Starting, in one process or several; and the dry run against a real one."""

import dataclasses
import os
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import Backbone
from detectron2.utils import comm
from torch.multiprocessing.spawn import ProcessRaisedException

from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.termination import Interrupted
from qbheat_det.data import register_coco_json
from qbheat_det.engine import Trainer, launch, run_distributed
from qbheat_det.engine.dry_run import DryRunReport, dry_run, format_forecast
from qbheat_det.engine.step import StepTrainer
from qbheat_det.tasks import DETECTION
from tests.servers import free_port

from .processes import make_args, torchrun_environment
from .tiny_detectors import make_retinanet_config


@pytest.fixture
def cfg(tmp_path, tiny_data):
    register_coco_json("dry", str(tiny_data / "annotations.json"), str(tiny_data / "images"))
    cfg = make_retinanet_config()
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("dry",)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.MIN_SIZE_TRAIN = (64,)
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.BASE_LR = 1e-5
    cfg.SOLVER.MAX_ITER = 16
    cfg.SOLVER.CHECKPOINT_PERIOD = cfg.TEST.EVAL_PERIOD = 8
    cfg.OUTPUT_DIR = str(tmp_path / "runs" / "first")
    DatasetCatalog.get("dry")  # Detectron2 reads the names of the classes
    names = MetadataCatalog.get("dry").thing_classes
    return with_values(cfg, DETECTION.get_class_values(names, range(len(names))))


def test_the_forecast_is_that_of_a_real_run_and_nothing_is_left_behind(cfg):
    before, folder = set(DatasetCatalog), Path(cfg.OUTPUT_DIR).parents[1]
    there = set(folder.iterdir())
    report = dry_run(cfg, Trainer, num_steps=5)
    assert set(DatasetCatalog) == before
    assert set(folder.iterdir()) == there

    Path(cfg.OUTPUT_DIR).mkdir(parents=True)
    start = time.perf_counter()
    Trainer(cfg).train()
    seconds = time.perf_counter() - start
    # Other programs on the machine can slow down either of the two.
    assert report.total_seconds == pytest.approx(seconds, rel=0.67, abs=3.0)
    assert {name: times for name, (_, times) in report.costs.items()} == {
        "Set-up": 1,
        "Step of 2 images": 16,
        "Evaluation of 12 images": 2,
        "Checkpoint": 2,
    }
    assert all(seconds > 0 for seconds, _ in report.costs.values())
    files = [path.stat().st_size for path in Path(cfg.OUTPUT_DIR).glob("model_*")]
    assert report.disks["Disk"][0] == pytest.approx(sum(files), rel=0.05)
    assert 100 * 2**20 < report.memory["Memory"] < 2**36


def test_stages_have_one_forecast_with_the_sums_first():
    first = DryRunReport(
        model="Frozen",
        costs={"Set-up": (10.0, 1), "Step of 8 images": (0.5, 100)},
        memory={"Memory": 2 * 2**30},
        disks={"Disk": (2**20, 2**30), "Cache": (3 * 2**20, 2**30)},
    )
    second = dataclasses.replace(
        first,
        costs={"Step of 4 images": (2.0, 120)},
        memory={"Memory": 2**30},
        disks={"Disk": (4 * 2**20, 2**30)},
    )
    text = format_forecast([first, second], ["One", "Two"])
    assert text.count("Whole run") == 1
    sums = text.splitlines()[0]
    assert sums.startswith("Whole run: 5 min 00 s, 2.0 GiB of memory per process")
    assert "5.0 MiB of disk (1.0 GiB available)" in sums
    assert "3.0 MiB of cache" in sums
    assert "SOLVER.CHECKPOINTS_KEPT" not in text
    full = dataclasses.replace(second, disks={"Disk": (2**30, 2**30)})
    assert "SOLVER.CHECKPOINTS_KEPT" in format_forecast([first, full], ["One", "Two"])


def test_a_forecast_advises_what_shortens_the_larger_stage():
    long = DryRunReport("A model", {"Step": (1.0, 100)}, memory={"Memory": 2**30}, disks={})
    short = dataclasses.replace(long, costs={"Step": (1.0, 90)})

    def advise(*reports):
        return format_forecast(reports, ["A stage"] * len(reports)).splitlines()[-1]

    assert advise(long).startswith("Shorter: --minutes N, --epochs N, or --freeze. ")
    assert advise(short, long).startswith("Shorter: --minutes N, --epochs N (of the second stage)")
    assert advise(long, short).startswith(
        "Shorter: --minutes N, or --freeze (only the first stage)"
    )
    assert "--epochs N would shorten the second stage alone" in advise(long, short)


def test_a_folder_that_cannot_be_written_to_ends_with_a_sentence(cfg, monkeypatch):
    def refuse(**_):
        raise PermissionError

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UserError, match="OUTPUT_DIR"):
        dry_run(cfg, Trainer)


def test_a_signal_in_a_dry_run_leaves_nothing_and_names_no_folder(cfg, monkeypatch):
    run_step = StepTrainer.run_step

    def signal_and_run(self):
        os.kill(os.getpid(), signal.SIGTERM)
        run_step(self)

    monkeypatch.setattr(StepTrainer, "run_step", signal_and_run)
    folder = Path(cfg.OUTPUT_DIR).parents[1]
    before = set(folder.iterdir())
    with pytest.raises(Interrupted, match=r"^SIGTERM stopped the dry run") as stopped:
        dry_run(cfg, Trainer)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert str(folder) not in str(stopped.value)
    assert set(folder.iterdir()) == before


CUDA = ["MODEL.DEVICE", "cuda"]


def describe(args):
    group = torch.distributed.is_initialized() and torch.distributed.get_backend()
    return group, comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()


def refuse(args):
    raise UserError("the file is not there")


@pytest.fixture
def torchrun(monkeypatch):
    """The environment of the only process of a torchrun."""
    for name, value in torchrun_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(comm, "_LOCAL_PROCESS_GROUP", None)


def test_main_runs_here_and_under_torchrun_finds_both_groups_and_leaves_none(request):
    assert run_distributed(describe, make_args()) == (False, 1, 0, 1)
    request.getfixturevalue("torchrun")
    assert run_distributed(describe, make_args()) == ("gloo", 1, 0, 1)
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
def test_a_config_for_gpus_joins_by_nccl(torchrun):
    assert run_distributed(describe, make_args(opts=CUDA)) == ("nccl", 1, 0, 1)


def pretend_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_gpus": 2}, "--num-gpus"),
        ({"num_machines": 2}, "--num-machines"),
        ({"opts": ["MODEL.DEVCE", "cpu"]}, "MODEL.DEVICE"),
        ({"opts": CUDA}, "1 processes need as many GPUs"),
    ],
)
def test_under_torchrun_what_contradicts_it_is_refused(torchrun, monkeypatch, values, named):
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(UserError, match=named):
        run_distributed(describe, make_args(**values))
    machines = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in {**machines, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        run_distributed(describe, make_args())
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(UserError, match="MASTER_PORT"):
        run_distributed(describe, make_args())


def test_processes_that_cannot_be_started_are_refused(monkeypatch):
    pretend_gpus(monkeypatch, 2)
    for asked, named in ((0, "at least 1"), (2, "MODEL.DEVICE")):
        with pytest.raises(UserError, match=named):
            run_distributed(describe, make_args(num_gpus=asked))


def test_bad_input_in_a_started_process_is_a_sentence_and_a_defect_a_traceback(monkeypatch, capsys):
    def fail(main, *_, args, dist_url, **__):
        assert dist_url == "auto"  # Detectron2's own port is the same for two runs
        try:
            main(*args)
        except (UserError, ZeroDivisionError):
            text = f"\n\n-- Process 1 terminated with the error:\n{traceback.format_exc()}"
            raise ProcessRaisedException(text, 1, 1) from None

    pretend_gpus(monkeypatch, 2)
    monkeypatch.setattr(launch, "launch", fail)
    args = make_args(num_gpus=2, dist_url="tcp://127.0.0.1:5000", opts=CUDA)
    with pytest.raises(SystemExit) as stopped:
        exit_on_user_error(run_distributed)(refuse, args)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: the file is not there\n"
    with pytest.raises(ProcessRaisedException):  # a defect
        run_distributed(lambda _: 1 / 0, args)


def test_parameters_without_gradients_are_looked_for_only_if_a_head_leaves_out_outputs():
    class Maps(Backbone):
        def output_shape(self):
            return dict.fromkeys(["s16", "tokens"])

        def forward(self, images):
            raise NotImplementedError

    model = torch.nn.Module()
    assert launch.may_have_unused_parameters(model)
    model.backbone = Maps()
    for read, expected in ((["s16", "tokens"], False), (["s16"], True), (None, True)):
        model.head_in_features = read
        assert launch.may_have_unused_parameters(model) == expected
