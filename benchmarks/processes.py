# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images per second of a training that is spread over processes, each on one thread.

Every process has a batch of its own of two random images, so that work grows with the processes;
gradients are averaged by ``DistributedDataParallel`` over gloo.
"""

import tempfile
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

BATCH = 2


def images_per_second(processes: int, *, side: int, steps: int) -> float:
    """Returns the images per second of all processes together.

    Args:
        processes: to start on this machine.
        side: of the images, in pixels.
        steps: timed, after one that is not.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _train, args=(processes, folder, side, steps), nprocs=processes, join=True
        )
        seconds = float((Path(folder) / "seconds").read_text())
    return processes * BATCH * steps / seconds


def _train(rank: int, processes: int, folder: str, side: int, steps: int) -> None:
    """Trains in one process; the first writes the seconds of the timed steps."""
    from benchmarks.detectors import load_mf_detr
    from benchmarks.trainer_overhead import make_batch

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(load_mf_detr("285M", (2, 1, 1))().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batch = make_batch(side)
    start = 0.0
    for number in range(steps + 1):
        if number == 1:
            distributed.barrier()
            start = time.perf_counter()
        losses = model(batch)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
    distributed.barrier()
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(time.perf_counter() - start))
    distributed.destroy_process_group()
