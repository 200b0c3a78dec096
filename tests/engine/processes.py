# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Starts processes that find themselves in torchrun's environment, for tests."""

import argparse
import os
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import multiprocessing

from qbheat_det.engine.launch import run_distributed
from tests.servers import free_port

from .tiny_training import CONFIG

PRELOADED = ["qbheat_det.engine"]


def torchrun_environment(rank, world_size, port):
    """What torchrun gives to the process of a rank on one machine."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def make_args(**values):
    """Those of Detectron2's ``default_argument_parser`` that ``run_distributed`` reads."""
    defaults = {
        "config_file": CONFIG,
        "opts": ["MODEL.DEVICE", "cpu"],
        "num_gpus": 1,
        "num_machines": 1,
        "machine_rank": 0,
        "dist_url": "auto",
    }
    return argparse.Namespace(**{**defaults, **values})


def run_in_processes(job, args, folder, *, world_size=2):
    """Runs ``job(args)`` through ``run_distributed`` in new processes; their results by rank.

    Each has what a started one has and nothing of the tests before: they are forks of a server
    that has imported the package once and run nothing, for importing takes longer than most jobs.
    A fork may not use CUDA if its server has asked for devices, so with CUDA each is spawned.
    """
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    multiprocessing.start_processes(
        _work,
        nprocs=world_size,
        args=(job, args, str(folder), world_size, free_port(), dict(os.environ)),
        start_method=method,
    )
    return [
        torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu")
        for rank in range(world_size)
    ]


def _work(rank, job, args, folder, world_size, port, environment):
    os.environ.clear()  # the server's own is that of the first test that needed it
    os.environ.update({**environment, **torchrun_environment(rank, world_size, port)})
    torch.set_num_threads(1)
    torch.save(run_distributed(job, args), Path(folder) / f"{rank}.pt")
