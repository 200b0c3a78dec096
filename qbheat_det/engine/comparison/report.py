# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The files that a comparison leaves: every value as JSON, the tables, the picture."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qbheat_det.analysis.comparison_chart import plot_comparison
from qbheat_det.analysis.comparison_summary import summarise_all
from qbheat_det.analysis.comparison_table import render_comparison
from qbheat_det.core.files import write_atomically

from ..run_record import find_commit, list_versions
from .plan import Comparison, ImageSets
from .run import State

NAME = "comparison"


class Report:
    """Writes ``comparison.json``, ``.md``, ``.svg`` and ``.png``, with what is done so far."""

    def __init__(self, comparison: Comparison, sets: ImageSets, *, jobs: int, threads: int) -> None:
        self._comparison = comparison
        self._sets = sets
        self._hardware = describe_hardware()
        self._jobs, self._threads = jobs, threads
        self._commit = find_commit()

    def write(self, state: State) -> str:
        """Writes all files, each whole or not at all; returns the tables.

        Raises:
            UserError: one cannot be written.
        """
        results = [state.results[stage.key] for stage in state.stages if stage.key in state.results]
        names = [objective.name for objective in self._comparison.objectives]
        about = self._describe(state)
        table = render_comparison(results, names, about)
        content = {
            "about": about,
            "commit": self._commit,
            "versions": list_versions(),
            "summary": {
                name: {measure: spread.to_dict() for measure, spread in figures.items()}
                for name, figures in summarise_all(results, names).items()
            },
            "failed": {" ".join(map(str, key)): reason for key, reason in state.failed.items()},
            "results": [_without_config(result) for result in results],
        }
        files: dict[str, bytes | None] = {
            "json": json.dumps(content, indent=1).encode(),
            "md": table.encode(),
            "svg": plot_comparison(results, names),
            "png": plot_comparison(results, names, format="png"),
        }
        for ending, data in files.items():
            if data is not None:
                _write(self._comparison.output_dir / f"{NAME}.{ending}", data)
        return table

    def _describe(self, state: State) -> dict[str, Any]:
        asked, sets = self._comparison, self._sets
        return {
            "objectives": {one.name: one.config_file for one in asked.objectives},
            "seeds": list(asked.seeds),
            "epochs": asked.epochs,
            "overrides": list(asked.opts),
            "detector_overrides": list(asked.detector_opts),
            "probes": list(asked.probes),
            "probes_as_stored": list(asked.probes_as_stored),
            "detectors": list(asked.detectors),
            "recalibrate_bn": asked.num_recalibrated,
            "pretraining_images": sets.pretraining,
            "train_images": sets.train,
            "val_images": sets.val,
            "classes": sets.classes,
            "jobs": self._jobs,
            "threads_a_job": self._threads,
            "hardware": self._hardware,
            "stages": len(state.stages),
            "done": len(state.results),
            "failed": len(state.failed),
        }


def describe_hardware() -> dict[str, Any]:
    """Returns processor, cores, memory and accelerator of this machine."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gb": _memory_gb(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None
    return round(size / 1e9, 1)


def _without_config(result: Mapping[str, Any]) -> dict[str, Any]:
    """The whole config of each stage stands in its own file."""
    settings = {key: value for key, value in result["settings"].items() if key != "config"}
    return {**result, "settings": settings}


def _write(path: Path, data: bytes) -> None:
    write_atomically(path, lambda stream: stream.write(data))
