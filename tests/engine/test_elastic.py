# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Machines come and go under torchrun: the run goes on by itself, to the bits of its worlds."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from detectron2.engine import HookBase
from torch.distributed import TCPStore

from qbheat_det.core.termination import Interrupted
from qbheat_det.engine.run_record import read_run_record

from . import tiny_training
from .processes import make_args, run_in_processes
from .test_resume import assert_same_bits
from .tiny_training import CONFIG, TINY, read_opts, state, words_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
KINDS = ["machine stays away", "machine", "process"]
OPTS = {
    **TINY,
    **read_opts(f"""
SOLVER.IMS_PER_BATCH 6 SOLVER.MAX_ITER {STEPS} SOLVER.CHECKPOINT_PERIOD 2 SOLVER.LOG_PERIOD 50
MODEL.DEVICE cpu
"""),
}


class Node:
    """A torchrun with one process, as one machine of several."""

    def __init__(self, name, *, port, nodes, folder, data):
        self.name = name
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{nodes}"]
        command += ["--max-restarts", "100", "--monitor-interval", "0.1", "--rdzv-id", "elastic"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        command += ["--rdzv-conf", "is_host=0,last_call_timeout=2,keep_alive_interval=1"]
        command += ["--local-addr", "127.0.0.1", str(ROOT / "tools" / "train_net.py")]
        command += tiny_training_words(folder / "run", data)
        self._log = (folder / f"{name}.txt").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._agent = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )

    def find_workers(self):
        path = Path(f"/proc/{self._agent.pid}/task/{self._agent.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def kill(self):
        """As a machine that is switched off: all its processes at once."""
        if self._agent.poll() is not None:
            return
        os.kill(self._agent.pid, signal.SIGSTOP)  # so that it starts no other
        for pid in self.find_workers():
            os.killpg(pid, signal.SIGKILL)
        self._agent.kill()
        self._agent.wait()

    def wait(self, timeout):
        return self._agent.wait(timeout)


def tiny_training_words(output_dir, data):
    truth, images = str(data / "annotations.json"), str(data / "images")
    words = ["--config-file", CONFIG, "--data", truth, "--val", truth, "--images", images]
    words += ["--output", str(output_dir)]
    return [*words, *words_of(OPTS)]


class Cluster:
    """Machines that meet at a store which none of them holds, so that any may go."""

    def __init__(self, count, folder, data):
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._node = {"port": self._store.port, "nodes": count, "folder": folder, "data": data}
        self.nodes = {name: Node(name, **self._node) for name in "abc"[:count]}
        self._tag = folder / "run" / "last_checkpoint"

    def wait_for_checkpoints(self, count):
        last, end = self.last, time.monotonic() + 120
        while count and time.monotonic() < end:
            count, last = count - (self.last != last), self.last
            time.sleep(0.005)
        assert not count, "the run does not go on"

    def wait_for_all(self, *, have_begun):
        """Until the world has all machines, or they have met; torchrun gives up before that."""
        file, end = self._tag.with_name("run.json"), time.monotonic() + 120
        while (
            [start["processes"] for start in read_run_record(file)][-1:] != [len(self.nodes)]
            if have_begun
            else not all(node.find_workers() for node in self.nodes.values())
        ):
            assert time.monotonic() < end, "a machine does not join"
            time.sleep(0.1)

    @property
    def last(self):
        return self._tag.read_text() if self._tag.exists() else ""

    def break_one(self, name, *, kind):
        """Kills a process, whose torchrun starts another, or a machine, which may stay away."""
        if kind == "process":
            for pid in self.nodes[name].find_workers():
                os.killpg(pid, signal.SIGKILL)
            return
        self.nodes[name].kill()
        if kind == "machine stays away":
            self.wait_for_checkpoints(1)  # of the others
        self.nodes[name] = Node(name, **self._node)

    def close(self):
        for node in self.nodes.values():
            node.kill()


def train_up_to(args):
    """The job of a process: goes on to ``args.end`` as a run of one world, and saves."""
    opts = {**OPTS, "OUTPUT_DIR": args.output}
    data = ["--data", f"{args.data}/annotations.json", "--images", f"{args.data}/images"]
    trainer = tiny_training.start_run(
        tiny_training.parse_run(CONFIG, opts, "--resume", *data, "--val", data[1])
    )
    if args.end < STEPS:
        trainer.register_hooks([StopAfter(args.end)])
    with contextlib.suppress(Interrupted):
        trainer.train()


class StopAfter(HookBase):
    def __init__(self, steps):
        self._last = steps - 1

    def before_step(self):
        self.trainer._trainer.asked_to_stop = self.trainer.iter == self._last


def find_worlds(run):
    """Returns the number of processes, and the step up to which their work was kept."""
    starts = read_run_record(run / "run.json")
    names = [Path(start["resumed_from"] or "model_-1").stem for start in starts]
    last = f"model_{STEPS - 1}"
    numbers = [name.replace("model_final", last).removeprefix("model_") for name in names]
    firsts = [int(number) + 1 for number in numbers]
    ends = [*firsts[1:], STEPS]
    kept = [(s["processes"], e) for s, f, e in zip(starts, firsts, ends, strict=True) if e > f]
    return [list(group)[-1] for _, group in itertools.groupby(kept, key=lambda world: world[0])]


@pytest.mark.slow
def test_machines_come_and_go_and_the_run_ends_with_the_bits_of_its_worlds(tiny_data, tmp_path):
    count, rng = 3, random.Random(3)
    cluster = Cluster(count, tmp_path, tiny_data)
    try:
        for kind in [*rng.sample(KINDS, len(KINDS)), KINDS[1]]:
            checkpoints = rng.randrange(kind == KINDS[0], 4)  # 0: while processes start
            cluster.wait_for_all(have_begun=bool(checkpoints))
            cluster.wait_for_checkpoints(checkpoints)
            time.sleep(rng.uniform(0, 0.3 if checkpoints else 8))
            cluster.break_one(rng.choice(sorted(cluster.nodes)), kind=kind)
        assert [node.wait(180) for node in cluster.nodes.values()] == [0] * count
    finally:
        cluster.close()
    worlds = find_worlds(tmp_path / "run")
    assert {count, count - 1} <= {processes for processes, _ in worlds}
    for processes, end in worlds:
        args = make_args(output=str(tmp_path / "calm"), data=str(tiny_data), end=end)
        run_in_processes(train_up_to, args, tmp_path, world_size=processes)
    found, expected = state(tmp_path / "run"), state(tmp_path / "calm")
    for key in ("model", "trainer"):
        assert_same_bits(found[key], expected[key])
