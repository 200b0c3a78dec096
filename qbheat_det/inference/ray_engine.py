# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predicts or embeds on a Ray cluster, from folders or object stores to Parquet files.

Ray Data distributes the work, starts again what died, and limits what is in memory. Only addresses
of images and results are sent between the processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import ray
from pyarrow.fs import FSSpecHandler, PyFileSystem

from qbheat_det.core.errors import UserError
from qbheat_det.core.image_files import IMAGE_SUFFIXES
from qbheat_det.core.object_stores import is_remote, list_store, open_store

from .boxes import find_boxes
from .embedding import Embedder
from .files import open_weights
from .images import NamedImage, UnreadableImage, find_inputs, read_rgb

DETECTIONS = pa.schema(
    {
        "file": pa.string(),
        "height": pa.int32(),
        "width": pa.int32(),
        "boxes": pa.list_(pa.list_(pa.float32())),  # XYXY, in pixels of the upright image
        "scores": pa.list_(pa.float32()),
        "labels": pa.list_(pa.string()),
        "error": pa.string(),  # why the image could not be read, or null
    }
)
VECTORS = pa.schema({"file": pa.string(), "vector": pa.list_(pa.float32()), "error": pa.string()})


class DetectionActor:
    """Predicts boxes in one process of the cluster. ``predict_files`` describes the arguments."""

    def __init__(
        self,
        weights: str,
        device: str | None,
        threshold: float,
        tile: int | None,
        opts: Sequence[str],
    ) -> None:
        model = open_weights(weights, device=device, opts=opts)
        if model.is_classifier:
            raise UserError(f"'{weights}' is a classifier and finds no boxes")
        self._predictor = model.build_predictor()
        self._settings = model.settings
        self._threshold = threshold
        self._tile = tile

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Maps a batch of files to rows of ``DETECTIONS``."""
        rows = [self._predict(file) for file in batch["file"].to_pylist()]
        return pa.Table.from_pylist(rows, schema=DETECTIONS)

    def _predict(self, file: str) -> dict[str, Any]:
        try:
            image = NamedImage(read_rgb(file), None, file)
            (result,) = find_boxes(
                self._predictor, [image], self._settings, threshold=self._threshold, tile=self._tile
            )
        except UnreadableImage as error:
            return {"file": file, "error": error.reason}
        height, width = result.image_size
        return {
            "file": file,
            "height": height,
            "width": width,
            "boxes": result.boxes.tolist(),
            "scores": result.scores.tolist(),
            "labels": result.labels,
        }


class EmbeddingActor:
    """Embeds images in one process of the cluster, as ``embed_images`` does."""

    def __init__(self, weights: str, device: str | None) -> None:
        self._embedder = Embedder(weights, device)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Maps a batch of files to rows of ``VECTORS``."""
        rows: list[dict[str, Any]] = []
        for file, outcome in self._embedder.embed(batch["file"].to_pylist()).items():
            if isinstance(outcome, str):
                rows.append({"file": file, "error": outcome})
            else:
                rows.append({"file": file, "vector": outcome.astype(np.float32)})
        return pa.Table.from_pylist(rows, schema=VECTORS)


@dataclass(frozen=True)
class RayReport:
    """The counts of a job. ``unreadable`` maps at most 100 files to the reasons."""

    num_images: int
    num_unreadable: int
    unreadable: dict[str, str]


def run_on_ray(
    actor: type[DetectionActor] | type[EmbeddingActor],
    arguments: dict[str, Any],
    inputs: Sequence[str],
    output: str,
    *,
    batch_size: int = 16,
) -> RayReport:
    """Runs a job on the cluster that ``RAY_ADDRESS`` names, or on the cores of this machine.

    Args:
        actor: the job of each process.
        arguments: keyword arguments of the actor.
        inputs: images and folders, on disks that all machines share, or in an object store.
        output: folder of Parquet files to write, on a shared disk or in an object store.
        batch_size: number of images that a process takes at a time.

    Raises:
        UserError: there are no images, the output exists, or the store refuses.
    """
    filesystem, folder = open_store(output)
    if filesystem.exists(folder) and filesystem.find(folder):
        raise UserError(f"--output '{output}' has files: choose another folder")
    files = list_images(inputs)
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0)) if arguments["device"] != "cpu" else 0
    num_workers = num_gpus or int(resources["CPU"])
    items = ray.data.from_arrow(pa.table({"file": files}))
    results = items.repartition(max(1, len(files) // (4 * batch_size))).map_batches(
        actor,
        fn_constructor_kwargs=arguments,
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=1,
        num_gpus=1 if num_gpus else None,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=num_workers),
    )
    target = PyFileSystem(FSSpecHandler(filesystem))
    # Ray would otherwise keep cores free for writing, half of those of a small machine.
    results.write_parquet(folder, filesystem=target, ray_remote_args={"num_cpus": 0})
    return _read_report(folder, target, len(files))


def list_images(inputs: Sequence[str]) -> list[str]:
    """Lists the images of files, folders and addresses, each of them once.

    Raises a ``UserError`` if there are none.
    """
    files: list[str] = []
    local = [one for one in inputs if not is_remote(one)]
    for address in inputs:
        if is_remote(address):
            files += list_store(address, IMAGE_SUFFIXES)
    if local:
        found = [file.path for file in find_inputs(local) if not file.is_video]
        files += [str(Path(path).absolute()) for path in found]
    if not files:
        raise UserError(f"no images in {', '.join(inputs)}")
    return list(dict.fromkeys(files))


def _read_report(folder: str, filesystem: PyFileSystem, num_files: int) -> RayReport:
    """Counts the rows that were written. Raises an error if there is not one per file."""
    written = pyarrow.dataset.dataset(folder, filesystem=filesystem, format="parquet")
    table = written.to_table(columns=["file", "error"])
    num_distinct = pc.count_distinct(table["file"]).as_py()
    if not len(table) == num_distinct == num_files:
        raise RuntimeError(f"{len(table)} rows of {num_distinct} files for {num_files} images")
    failed = table.filter(pc.is_valid(table["error"]))
    unreadable = {row["file"]: row["error"] for row in failed.slice(0, 100).to_pylist()}
    return RayReport(num_files, len(failed), unreadable)
