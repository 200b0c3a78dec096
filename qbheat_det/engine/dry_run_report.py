# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a dry run measured, what it predicts for the whole run, and the table of both."""

from collections.abc import Sequence
from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True)
class DryRunReport:
    """Measured on a few steps and images; ``str`` of it is the table for people.

    Attributes:
        iterations: of the whole run.
        images_per_step: over all processes.
        num_evaluations: of the whole run.
        num_checkpoints: that the whole run writes.
        num_checkpoints_kept: most that lie on the disk at a time.
        num_test_images: of one evaluation, over all processes.
        num_parameters: of the model.
        num_trainable: those that are not frozen.
        num_tensors_compared: read back from the checkpoint and equal bit for bit.
        setup_seconds: building data, model and everything else, and the first step.
        step_seconds: of each measured step; the first is not among them.
        evaluation_seconds: predicted for one evaluation of all test images.
        checkpoint_seconds: to write one checkpoint.
        checkpoint_bytes: size of one.
        weights_bytes: size of the two files of weights beside them, the best and the final ones.
        free_bytes: on the disk of ``OUTPUT_DIR``.
        memory_bytes: highest resident memory of this process and, at that time, of its workers.
        memory_total_bytes: of this machine.
        gpu_bytes: highest memory that tensors took on this process's GPU; 0 without one.
        gpu_total_bytes: of that GPU.
        num_views_to_encode: that the cache of features lacks; 0 without one.
        encoding_seconds: to encode them.
        cache_bytes: that they will take on the disk of the cache.
        loader_images_per_second: that the loaders of all processes give alone; 0 if not measured.
        wanted_images_per_second: that steps would take if they never waited.
        waiting: what to do where steps will wait for images; empty where they will not.
    """

    iterations: int
    images_per_step: int
    num_evaluations: int
    num_checkpoints: int
    num_checkpoints_kept: int
    num_test_images: int
    num_parameters: int
    num_trainable: int
    num_tensors_compared: int
    setup_seconds: float
    step_seconds: tuple[float, ...]
    evaluation_seconds: float
    checkpoint_seconds: float
    checkpoint_bytes: int
    weights_bytes: int
    free_bytes: int
    memory_bytes: int
    memory_total_bytes: int
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0
    num_views_to_encode: int = 0
    encoding_seconds: float = 0.0
    cache_bytes: int = 0
    loader_images_per_second: float = 0.0
    wanted_images_per_second: float = 0.0
    waiting: str = ""

    @property
    def mean_step_seconds(self) -> float:
        """Mean, not median: images of all sizes come in a long run, the slow ones too."""
        return sum(self.step_seconds) / len(self.step_seconds)

    @property
    def training_seconds(self) -> float:
        """Predicted for all steps."""
        return self.iterations * self.mean_step_seconds

    @property
    def total_seconds(self) -> float:
        """Predicted for everything."""
        return (
            self.setup_seconds
            + self.encoding_seconds
            + self.training_seconds
            + self.num_evaluations * self.evaluation_seconds
            + self.num_checkpoints * self.checkpoint_seconds
        )

    @property
    def disk_bytes(self) -> int:
        """Predicted for all weights that lie on the disk at a time."""
        return self.num_checkpoints_kept * self.checkpoint_bytes + self.weights_bytes

    @property
    def fits_disk(self) -> bool:
        """Whether the disk has room for them."""
        return self.disk_bytes < self.free_bytes

    def __str__(self) -> str:
        checked = f"{self.num_tensors_compared} tensors of a checkpoint read back bit for bit"
        rows = [
            ("Set-up", format_duration(self.setup_seconds), 1, self.setup_seconds),
            (
                f"Step of {self.images_per_step} images",
                _format_range(self.step_seconds),
                self.iterations,
                self.training_seconds,
            ),
            (
                f"Evaluation of {self.num_test_images:,} images",
                format_duration(self.evaluation_seconds),
                self.num_evaluations,
                self.num_evaluations * self.evaluation_seconds,
            ),
            (
                "Checkpoint",
                format_duration(self.checkpoint_seconds),
                self.num_checkpoints,
                self.num_checkpoints * self.checkpoint_seconds,
            ),
        ]
        if self.num_views_to_encode:
            each = self.encoding_seconds / self.num_views_to_encode
            views = self.num_views_to_encode
            rows.insert(1, ("View to encode", format_duration(each), views, self.encoding_seconds))
        lines = [
            f"Dry run: {len(self.step_seconds) + 1} steps and one evaluation done, {checked}.",
            f"{self.num_parameters:,} parameters, {self.num_trainable:,} of them trained.",
            "",
            f"{'Predicted':<32}{'each':>18}{'times':>10}{'together':>16}",
        ]
        lines += [
            f"{name:<32}{each:>18}{times:>10,}{format_duration(all_of_them):>16}"
            for name, each, times, all_of_them in rows
        ]
        lines += [f"{'Whole run':<60}{format_duration(self.total_seconds):>16}", ""]
        return "\n".join([*lines, *self._list_resources()])

    def _list_resources(self) -> list[str]:
        lines = []
        if self.gpu_total_bytes:
            lines.append(
                _compare(
                    "GPU memory", self.gpu_bytes, self.gpu_total_bytes, " a process; there are"
                )
            )
        lines.append(
            _compare("Memory", self.memory_bytes, self.memory_total_bytes, " a process; there are")
        )
        lines.append(
            f"{_compare('Disk', self.disk_bytes, self.free_bytes, '; free are')} "
            f"({self.num_checkpoints_kept} checkpoints of {_format_bytes(self.checkpoint_bytes)}, "
            f"weights of {_format_bytes(self.weights_bytes)})"
        )
        if self.cache_bytes:
            lines.append(
                f"{'Features:':<12}{_format_bytes(self.cache_bytes)} to be cached besides "
                "(MODEL.CACHE_FEATURES.FOLDER)"
            )
        if self.loader_images_per_second:
            lines.append(
                f"{'Images:':<12}the loader alone gives {self.loader_images_per_second:.3g} a "
                f"second, steps would take {self.wanted_images_per_second:.3g}"
            )
        if self.waiting:
            lines.append(f"{self.waiting}.")
        if not self.fits_disk:
            lines.append("The disk is too small: lower SOLVER.CHECKPOINTS_KEPT or free some space.")
        lines.append("Larger images than those of these steps take more memory and time.")
        return lines


def format_duration(seconds: float) -> str:
    """Returns ``"2 d 3 h"``, ``"1 h 05 min"``, ``"3 min 10 s"``, ``"4.2 s"`` or ``"120 ms"``."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def _format_range(seconds: Sequence[float]) -> str:
    least, greatest = format_duration(min(seconds)), format_duration(max(seconds))
    return least if least == greatest else f"{least} to {greatest}"


def _format_bytes(count: int) -> str:
    return f"{count / _MIB:.1f} MiB" if count < 1024 * _MIB else f"{count / _MIB / 1024:.1f} GiB"


def _compare(name: str, needed: int, there: int, verb: str) -> str:
    return f"{name + ':':<12}{_format_bytes(needed)}{verb} {_format_bytes(there)}"
