# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Processes that start at the same time share folders and caches without harm."""

import json
import multiprocessing
import os
import shutil
import signal
import time
import zipfile
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog

from qbheat_det.api.training import train_run
from qbheat_det.config import get_cfg, with_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import try_file_lock, write_atomically
from qbheat_det.data.datasets.zip_files import unpack
from qbheat_det.engine import RunFlags, assemble_run
from qbheat_det.engine.run_record import LOCK_FILE, check_start, find_start, occupies, record_start
from tools.train_net import parse_args

from . import tiny_training
from .processes import run_in_processes
from .tiny_training import words_of

ROUNDS = 15
# Forked, as loading workers are: a new interpreter would import PyTorch for seconds.
FORK = multiprocessing.get_context("fork")


def run_at_once(job, argument, count=3):
    """Calls ``job(argument)`` in processes that begin together; their results or errors."""
    barrier = FORK.Barrier(count)
    results = FORK.Queue()

    def work():
        barrier.wait()
        try:
            results.put(job(argument))
        except UserError as error:
            results.put(f"UserError: {error}")

    processes = [FORK.Process(target=work) for _ in range(count)]
    for process in processes:
        process.start()
    collected = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return collected


def _train(folder):
    """Starts as a new run does, and leaves a checkpoint; its process's number."""
    start = find_start(folder, asked=False)
    check_start(start, "")
    with occupies([folder / "first_stage", folder], resume=False):
        for name in ("model_final.pth", "run.json"):
            write_atomically(folder / name, json.dumps([{"process": os.getpid()}]).encode())
    return os.getpid()


@pytest.mark.slow
def test_of_the_new_runs_that_start_at_once_in_a_folder_one_trains(tmp_path):
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        results = run_at_once(_train, folder)
        (winner,) = [result for result in results if isinstance(result, int)]
        files = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
        written = json.dumps([{"process": winner}])
        assert files == {"model_final.pth": written, "run.json": written}
        assert sum("name another --output" in str(result) for result in results) == 2, results


def test_a_killed_run_leaves_its_folder_free(tmp_path):
    def hold():
        with try_file_lock(tmp_path / LOCK_FILE):
            worker = FORK.Process(target=time.sleep, args=(60,))  # lives longer than the run itself
            worker.start()
            workers.put(worker.pid)
            time.sleep(60)

    workers = FORK.Queue()
    run = FORK.Process(target=hold)
    run.start()
    worker = workers.get(timeout=20)
    with pytest.raises(UserError, match="a run that has not ended"), _enter(tmp_path):
        pass
    with occupies([tmp_path], resume=True):  # the older process ends at its next checkpoint
        pass
    run.kill()
    run.join()
    with _enter(tmp_path):
        assert (tmp_path / LOCK_FILE).is_file()
    os.kill(worker, signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def _enter(folder):
    return occupies([folder], resume=False)


def _train_whole(arguments):
    """Trains a tiny detector with its own seed. Returns the seed, and the file of the weights."""
    folder, data = arguments
    opts = {"SEED": str(os.getpid()), "SOLVER.MAX_ITER": "3"}
    train_run(assemble_run(RunFlags.from_args(tiny_training.parse(folder, data, opts))))
    return os.getpid(), (folder / "model_final.pth").read_bytes()


@pytest.mark.slow
def test_of_two_trainings_that_start_at_once_in_a_folder_one_leaves_all_files(tiny_data, tmp_path):
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        results = run_at_once(_train_whole, (folder, tiny_data), count=2)
        ((seed, weights),) = [result for result in results if isinstance(result, tuple)]
        assert sum("name another --output" in str(result) for result in results) == 1, results
        assert [start["seed"] for start in json.loads((folder / "run.json").read_text())] == [seed]
        assert (folder / "model_final.pth").read_bytes() == weights
        assert list(tiny_training.losses(folder)) == [0, 1, 2]


def _open_zip(args):
    """Opens the data of a run in each process of torchrun. Returns the number of images."""
    sets = assemble_run(RunFlags.from_args(args))[-1].cfg.DATASETS
    return sum(len(DatasetCatalog.get(name)) for name in (*sets.TRAIN, *sets.TEST))


@pytest.mark.slow
def test_processes_of_torchrun_open_a_zip_with_an_empty_cache(tiny_data, tmp_path, monkeypatch):
    path = shutil.make_archive(str(tmp_path / "set"), "zip", tiny_data)
    for number in range(ROUNDS):
        monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / f"cache{number}"))
        output = tmp_path / f"run{number}"
        words = ["--data", path, "--output", str(output), *words_of(tiny_training.TINY)]
        args = parse_args(["--config-file", tiny_training.CONFIG, *words])
        assert run_in_processes(_open_zip, args, tmp_path) == [12, 12]


@pytest.mark.slow
def test_a_zip_is_unpacked_once_by_processes_that_start_at_once(tmp_path, monkeypatch):
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(100):
            archive.writestr(f"set/{number}.txt", str(number))
    for number in range(ROUNDS):
        cache = tmp_path / f"cache{number}"
        monkeypatch.setenv("QBHEAT_CACHE", str(cache))
        (folder,) = set(run_at_once(unpack, str(path)))
        contents = {file.name: file.read_text() for file in Path(folder).iterdir()}
        assert contents == {f"{number}.txt": str(number) for number in range(100)}
        visible = [entry for entry in (cache / "unpacked").iterdir() if entry.name[0] != "."]
        assert visible == [Path(folder).parent]


@pytest.mark.slow
def test_runs_that_are_resumed_at_once_are_all_recorded(tmp_path):
    cfg = with_values(get_cfg(), {"OUTPUT_DIR": str(tmp_path), "MODEL.DEVICE": "cpu"})
    for number in range(ROUNDS):
        run_at_once(lambda cfg: record_start(cfg, {})(1.0), cfg)
        starts = json.loads((tmp_path / "run.json").read_text())
        assert [start["seconds"] for start in starts] == [1.0] * 3 * (number + 1)
