# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Starting: in one process, under torchrun, through Detectron2; and what is refused."""

import argparse
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.modeling import Backbone
from detectron2.utils import comm
from torch.multiprocessing.spawn import ProcessRaisedException

from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.engine import launch, run_distributed

from .processes import free_port, make_args, torchrun_environment
from .tiny_training import CONFIG, TINY

ROOT = Path(__file__).resolve().parents[2]
CUDA = ["MODEL.DEVICE", "cuda"]


def describe(args: argparse.Namespace) -> tuple[Any, ...]:
    group = torch.distributed.is_initialized() and torch.distributed.get_backend()
    return group, comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()


def refuse(args: argparse.Namespace) -> None:
    raise UserError("the file is not there")


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the only process of a torchrun."""
    for name, value in torchrun_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(comm, "_LOCAL_PROCESS_GROUP", None)


def test_main_runs_here_and_under_torchrun_finds_both_groups_and_leaves_none(
    request: pytest.FixtureRequest,
) -> None:
    assert run_distributed(describe, make_args()) == (False, 1, 0, 1)
    request.getfixturevalue("torchrun")
    assert run_distributed(describe, make_args()) == ("gloo", 1, 0, 1)
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
def test_a_config_for_gpus_joins_by_nccl(torchrun: None) -> None:
    assert run_distributed(describe, make_args(opts=CUDA)) == ("nccl", 1, 0, 1)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_gpus": 2}, "--num-gpus"),
        ({"num_machines": 2}, "--num-machines"),
        ({"opts": ["MODEL.DEVCE", "cpu"]}, "MODEL.DEVICE"),
        ({"opts": CUDA}, "--nproc-per-node 1"),
    ],
)
def test_under_torchrun_what_contradicts_it_is_refused(
    torchrun: None, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], named: str
) -> None:
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(UserError, match=named):
        run_distributed(describe, make_args(**values))
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(UserError, match="MASTER_PORT"):
        run_distributed(describe, make_args())


def test_processes_that_cannot_be_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, asked, named in ((0, 2, "--num-gpus"), (0, 0, "at least 1"), (2, 2, "MODEL.DEVICE")):
        pretend_gpus(monkeypatch, gpus)
        with pytest.raises(UserError, match=named):
            run_distributed(describe, make_args(num_gpus=asked))


def test_bad_input_in_a_started_process_is_a_sentence_and_a_defect_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(main: Any, *_: Any, args: Any, dist_url: str, **__: Any) -> None:
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


@pytest.mark.slow
def test_torchrun_trains_evaluates_and_saves_with_two_processes(
    tmp_path: Path, tiny_data: Path
) -> None:
    truth, images = str(tiny_data / "annotations.json"), str(tiny_data / "images")
    flags = ["--data", truth, "--val", truth, "--images", images]
    opts = {**TINY, "MODEL.DEVICE": "cpu", "SOLVER.MAX_ITER": "2", "OUTPUT_DIR": str(tmp_path)}
    opts["MODEL.RETINANET.SCORE_THRESH_TEST"] = "0.0"  # else nothing is found
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "tools" / "train_net.py"), "--config-file"]
    command += [CONFIG, *flags, *(word for pair in opts.items() for word in pair)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run(command, check=True, env=environment, timeout=300)
    assert '"bbox/AP"' in (tmp_path / "metrics.json").read_text()
    assert '"processes": 2' in (tmp_path / "run.json").read_text()


def test_parameters_without_gradients_are_looked_for_only_if_a_head_leaves_out_outputs() -> None:
    class Maps(Backbone):
        def output_shape(self) -> dict[str, Any]:
            return dict.fromkeys(["s16", "tokens"])

        def forward(self, images: Any) -> Any:
            raise NotImplementedError

    model = torch.nn.Module()
    assert launch.may_have_unused_parameters(model)
    model.backbone = Maps()
    for read, expected in ((["s16", "tokens"], False), (["s16"], True), (None, True)):
        model.head_in_features = read
        assert launch.may_have_unused_parameters(model) == expected
