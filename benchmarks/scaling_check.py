# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The simulation of ``scaling.py`` beside runs of two processes here.

Measured are steps of two processes that know nothing of each other, with half of the batch each,
the exchange of the gradients alone, and a start. From these the simulation says what two processes
take, and what they take when one is killed and torchrun starts both again. "ours" is what the runs
took, "peer" the simulation.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.scaling import Cluster, Job, simulate
from benchmarks.timing import ROOT, Result

_BATCH, _PERIOD = 32, 20
_RECIPE = "configs/demo/toy_qb_heat.yaml"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_GRADIENTS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
flat = torch.ones(int(%d) // 4)
seconds = []
for _ in range(12):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(flat)
    seconds.append(time.perf_counter() - start)
if dist.get_rank() == 0:
    print(sorted(seconds)[6], flush=True)
dist.destroy_process_group()
"""


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Measures, simulates, and returns a row for two processes and one for a failure among them.

    Args:
        quick: few steps.
        threads: CPU threads, shared by the processes.
    """
    steps, killed_after = (45, 30) if quick else (150, 110)
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads // 2))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with ThreadPoolExecutor() as pool:  # both at once, as they share the machine's memory
            apart = [pool.submit(_train, root / name, steps, batch=_BATCH // 2) for name in "ab"]
        # The first steps warm up.
        seconds = np.concatenate([np.diff(ends.result())[_PERIOD // 2 :] for ends in apart])
        size = _count_gradient_bytes(root / "a")
        exchange = _measure_exchange(root, size)
        both = _train(root / "both", steps, processes=2)
        hurt = _train(root / "hurt", steps, processes=2, killed_after=killed_after)
    job = Job("check", steps * _BATCH, _BATCH, gradient_bytes=size, checkpoint_steps=_PERIOD)
    # A restart lasts as long as a start.
    cluster = Cluster(
        nodes=2,
        compute_rate=_BATCH / 2 / float(np.exp(np.log(seconds).mean())),
        exchange_rate=size / exchange,
        jitter=float(np.log(seconds).std()),
        restart_seconds=both[0],
    )
    death = killed_after * sum(simulate(job, cluster).seconds.values()) / steps
    plain, failing = simulate(job, cluster), simulate(job, cluster, failures_at=[death])
    print(
        f"  one process {statistics.median(seconds):.3f} s a step of {_BATCH // 2} images, "
        f"exchange {exchange:.4f} s, start {both[0]:.1f} s"
    )
    return [
        Result.lower_is_better(name, taken, predicted.hours * 3600, "s")
        for name, taken, predicted in (
            ("scaling/two_processes_vs_simulated", both[-1] - both[0], plain),
            ("scaling/two_processes_and_a_kill_vs_simulated", hurt[-1] - hurt[0], failing),
        )
    ]


def _train(
    folder: Path, steps: int, *, batch: int = _BATCH, processes: int = 1, killed_after: int = 0
) -> list[float]:
    """Returns the seconds from the start of a run to the end of each of its steps."""
    opts = {
        "SOLVER.EPOCHS": 0.0, "SOLVER.MAX_ITER": steps, "SOLVER.WARMUP_EPOCHS": 0.0,
        "SOLVER.IMS_PER_BATCH": batch, "SOLVER.CHECKPOINT_EPOCHS": 0.0,
        "SOLVER.CHECKPOINT_PERIOD": _PERIOD, "SOLVER.LOG_PERIOD": 1, "DATASETS.TEST": "()",
        "DATALOADER.NUM_WORKERS": 0, "MODEL.DEVICE": "cpu",
        "VIS.ENABLED": False,
    }  # fmt: skip
    launch = (*_TORCHRUN, "--max-restarts", "1") if processes > 1 else ()
    words = [str(word) for pair in opts.items() for word in pair]
    command = [sys.executable, *launch, "tools/train_net.py", "--config-file", _RECIPE]
    start, ends = time.perf_counter(), []
    with subprocess.Popen(
        [*command, "--output", str(folder), *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"iteration"') and "total_loss" in line:
                ends.append(time.perf_counter() - start)
                if killed_after and json.loads(line)["iteration"] + 1 == killed_after:
                    os.kill(_find_rank(process.pid, 1), signal.SIGKILL)
                    killed_after = 0
    if process.returncode or not ends:
        raise subprocess.CalledProcessError(process.returncode, command)
    return ends


def _find_rank(agent: int, rank: int) -> int:
    """Returns the process that torchrun started as a rank."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise ProcessLookupError(f"torchrun has no process of rank {rank}")


def _count_gradient_bytes(run_folder: Path) -> int:
    from qbheat_det.checkpoint import read_weights

    state, _ = read_weights(str(run_folder / "model_final.safetensors"))
    return sum(4 * t.numel() for t in state.values() if t.is_floating_point())


def _measure_exchange(folder: Path, size: int) -> float:
    """Returns the seconds in which two processes sum ``size`` bytes of gradients."""
    script = folder / "exchange.py"
    script.write_text(_GRADIENTS % size)
    command: Sequence[str] = [sys.executable, *_TORCHRUN, str(script)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
    return float(done.stdout.split()[-1])
