# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Predicts on millions of images, in this process or in Ray actors, and writes Parquet files.

Each chunk of images becomes one Parquet file. The file name depends only on the images of the
chunk, and only the main process writes the file, atomically. So no image is lost or repeated when
a process is killed.
"""

import importlib.util
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from detectron2.config import CfgNode
from torch import Tensor
from tqdm import tqdm

from qbheat_det.checkpoint import local_weights
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError, find_user_message
from qbheat_det.core.files import check_writable, hash_file, remove_leftovers, write_atomically
from qbheat_det.data import DataError, PretrainingMapper, configure_cache
from qbheat_det.deployment import deploy_by_config
from qbheat_det.probing import cache_features, find_feature

from .batch_inputs import Chunk, Item, cut_chunks, import_parquet, list_items, open_items
from .encoder import encode, locate_weights, open_encoder
from .files import find_likeliest, get_predictor, get_scorer, open_weights
from .images import NamedImage, UnreadableImage, read_rgb
from .predict import Predictor, Scores, check_elongation, find_boxes, is_classifier

Row = dict[str, Any]
Read = Callable[[str], Any]  # reads a path of the path manager, or raises UnreadableImage
Run = Callable[[list[Any]], list[Row]]
_SETTINGS = "_settings.json"  # Parquet readers ignore names that start with _
_PARTS = "part-*.parquet"


@dataclass(frozen=True)
class Job:
    """The settings of all workers. ``predict_files`` describes the first five attributes.

    Attributes:
        threshold: boxes with a lower score are left out.
        batch_size: number of images of equal size per batch.
        features: compute the encoder's features of the central square instead of boxes.
        size: side of the central square in pixels. 0 means ``INPUT.PRETRAIN.SIZE``.
    """

    weights: str
    config_file: str | None = None
    device: str | None = None
    fast: bool = False
    opts: tuple[str, ...] = ()
    threshold: float = 0.3
    batch_size: int = 1
    features: bool = False
    size: int = 0


class Worker:
    """Runs a model on chunks. Called with a chunk, it returns the bytes of a Parquet file."""

    def __init__(self, job: Job) -> None:
        """Raises a ``UserError`` if the weights cannot be read or do not fit ``job.features``."""
        import pyarrow as pa

        self._batch_size = job.batch_size
        self._read, self._run = _open_encoder(job) if job.features else _open_predictor(job)
        numbers, boxes = pa.list_(pa.float32()), pa.list_(pa.list_(pa.float32(), 4))
        columns = {name: pa.string() for name in ("source", "file", "error")}
        if job.features:
            columns["embedding"] = numbers
        else:
            columns |= {"width": pa.int32(), "height": pa.int32(), "boxes": boxes}
            columns |= {"scores": numbers, "classes": pa.list_(pa.string())}
            columns["category_ids"] = pa.list_(pa.int64())
        self._make_table = partial(pa.Table.from_pylist, schema=pa.schema(columns))

    def __call__(self, chunk: Chunk) -> bytes:
        """Returns a Parquet file with one row per image, as bytes.

        The row of an unreadable image has only the columns "source", "file" and "error".

        Raises:
            UserError: a shard or a table cannot be read.
        """
        rows: list[Row] = [dict(zip(("source", "file"), i.names, strict=True)) for i in chunk.items]
        with open_items(chunk.items) as paths:
            for start in range(0, len(rows), self._batch_size):
                images = {}
                for number in range(start, min(start + self._batch_size, len(rows))):
                    try:
                        images[number] = self._read(paths[number])
                    except UnreadableImage as error:
                        rows[number]["error"] = error.reason.encode(errors="replace").decode()
                found = self._run(list(images.values())) if images else []
                for number, row in zip(images, found, strict=True):
                    rows[number].update(row)
        file = io.BytesIO()
        import_parquet().write_table(self._make_table(rows), file, compression="zstd")
        return file.getvalue()


def _open_predictor(job: Job) -> tuple[Read, Run]:
    exported, cfg = open_weights(
        job.weights, job.config_file, device=job.device, fast=job.fast, opts=job.opts
    )
    _limit_cache(cfg)
    if is_classifier(cfg):
        return get_scorer(exported, cfg), partial(_classify, cfg.MODEL.CLASS_NAMES)

    def read(path: str) -> NamedImage:
        image = NamedImage(read_rgb(path), None, path)
        check_elongation(image, cfg)
        return image

    return read, partial(_detect, get_predictor(exported, cfg), cfg, job)


def _detect(
    predictor: Predictor, cfg: CfgNode, job: Job, images: Sequence[NamedImage]
) -> list[Row]:
    rows = []
    for found in find_boxes(
        predictor, images, cfg, threshold=job.threshold, batch_size=job.batch_size
    ):
        height, width = found.instances.image_size
        rows.append(
            {
                "boxes": found.boxes.tolist(),
                "scores": found.scores.tolist(),
                "classes": found.labels if found.class_names else list(map(str, found.label_ids)),
                "category_ids": found.label_ids,
                "width": width,
                "height": height,
            }
        )
    return rows


def _classify(class_names: Sequence[str], scores: Sequence[Scores]) -> list[Row]:
    found = [find_likeliest(each, class_names) for each in scores]
    keys = {"classes": "name", "scores": "score"}
    return [{column: [one[key] for one in each] for column, key in keys.items()} for each in found]


def _open_encoder(job: Job) -> tuple[Read, Run]:
    model, cfg = open_encoder(locate_weights(job.weights), job.device)
    feature = find_feature(model)
    _limit_cache(cfg)
    if job.fast:
        model = deploy_by_config(model, cfg.MODEL.DEPLOY)
    mapper = PretrainingMapper(size=job.size or cfg.INPUT.PRETRAIN.SIZE, is_train=False)  # RGB

    def read(path: str) -> Row:
        entry = mapper({"file_name": path, "label": 0})
        if isinstance(entry, DataError):
            raise UnreadableImage(path, entry.reason)
        return entry

    def describe(batch: list[Row]) -> dict[str, Tensor]:
        return encode(model, cfg, [entry["image"].permute(1, 2, 0).numpy() for entry in batch])

    def run(batch: list[Row]) -> list[Row]:
        found = cache_features(describe, [batch], num_images=len(batch), feature=feature)
        return [{"embedding": vector} for vector in found.joined.tolist()]

    return read, run


def _limit_cache(cfg: CfgNode) -> None:
    keys = cfg.DATALOADER
    configure_cache(gigabytes=keys.CACHE_GB, retry_seconds=keys.RETRY_SECONDS)


def run_batch(
    job: Job,
    images: Sequence[str],
    folder: Path,
    *,
    json_file: Path | None = None,
    engine: str = "local",
    workers: int = 0,
    part_size: int = 256,
    column: str = "",
    resume: bool = False,
) -> tuple[int, int]:
    """Predicts on images or computes their features, and writes Parquet files.

    See docs/predict.md.

    Args:
        job: the settings of all workers.
        images: files, folders, shards and Parquet files, see ``list_items``.
        folder: output folder of the Parquet files.
        json_file: also write the boxes or classes to this JSON file, like ``predict_files``.
        engine: "ray" to run actors on a Ray cluster, or "local" to run in this process.
        workers: number of actors. 0 means one per GPU of the cluster, or one per CPU if the
            cluster has no GPU.
        part_size: number of images per Parquet file.
        column: column of the input tables, see ``list_items``.
        resume: skip images that already have results in ``folder``. If False, ``folder`` must not
            have results.

    Returns:
        The number of images with a row in ``folder``, and the number of unreadable ones.

    Raises:
        UserError: weights, inputs or arguments do not match, or the folder already has results.
    """
    parquet = import_parquet()
    if engine == "ray" and not importlib.util.find_spec("ray"):
        raise UserError("--engine ray needs Ray: pip install 'qbheat_det[ray]', or use local")
    if json_file:
        check_writable(json_file)
    _limit_cache(load_config(None, list(job.opts)))  # before the index of shards is read
    items = list_items(images, column, exclude=folder)
    chunks = cut_chunks(items, part_size, _open_folder(folder, job, resume))
    run = _run_on_ray(job, chunks, workers) if engine == "ray" else _run_here(job, chunks)
    sizes = {chunk.name: len(chunk.items) for chunk in chunks}
    left = sum(sizes.values())
    with tqdm(total=len(items), initial=len(items) - left, unit="image", disable=None) as bar:
        for name, content in run if chunks else ():
            write_atomically(folder / name, content)
            bar.update(sizes[name])
    if json_file:
        write_atomically(json_file, partial(_write_json, folder))
    errors = [parquet.read_table(path, columns=["error"])["error"] for path in folder.glob(_PARTS)]
    return sum(map(len, errors)), sum(len(part) - part.null_count for part in errors)


def _open_folder(folder: Path, job: Job, resume: bool) -> set[tuple[str, str]]:
    """Writes the settings into the folder. Returns (source, file) of all images with results."""
    weights = local_weights(locate_weights(job.weights))
    settings = {**asdict(replace(job, device=None)), "opts": list(job.opts)}  # on any device
    settings["weights"] = hash_file(weights) if Path(weights).is_file() else job.weights
    parts = list(folder.glob(_PARTS))
    if not parts:
        write_atomically(folder / _SETTINGS, json.dumps(settings, indent=1).encode())
        return set()
    if not resume:
        raise UserError(f"'{folder}' has results: add --resume, or choose another folder")
    remove_leftovers(folder)
    try:
        found = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        changed = sorted(key for key in settings if found.get(key) != settings[key])
        tables = [import_parquet().read_table(part, columns=["source", "file"]) for part in parts]
    except (AttributeError, OSError, ValueError) as error:  # pyarrow raises the last two
        raise UserError(f"'{folder}': {_SETTINGS} or a part is damaged: {error}") from error
    if changed:
        raise UserError(
            f"'{folder}' has results of other settings ({', '.join(changed)}): choose another one"
        )
    return {tuple(row.values()) for table in tables for row in table.to_pylist()}


def _run_here(job: Job, chunks: Sequence[Chunk]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the content of each Parquet file."""
    worker = Worker(job)
    yield from ((chunk.name, worker(chunk)) for chunk in chunks)


class _Actor(Worker):
    """A worker with the call signature of Ray Data."""

    def __call__(self, batch: Any) -> Any:
        (text,) = batch["chunk"]
        name, items = json.loads(text)
        content = super().__call__(Chunk(name, [Item(*item) for item in items]))
        return {"name": [name], "content": [content]}


def _run_on_ray(job: Job, chunks: Sequence[Chunk], workers: int) -> Iterator[tuple[str, bytes]]:
    """Like ``_run_here``, in Ray actors and any order. Ray repeats the chunks of dead actors."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import ray.data

    Worker(replace(job, device="cpu", fast=False))  # raises the errors of the actors early
    if is_ours := not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="WARNING")
    ray.data.DataContext.get_current().enable_progress_bars = False  # ``run_batch`` shows one
    for name in ("_internal.execution.streaming_executor", "_internal.progress", "exceptions"):
        logging.getLogger(f"ray.data.{name}").setLevel(logging.CRITICAL)
    cluster = ray.cluster_resources()
    gpus = 0 if job.device == "cpu" else cluster.get("GPU", 0)
    workers = workers or int(gpus or cluster.get("CPU", 1))
    rows = [{"chunk": json.dumps(chunk)} for chunk in chunks]
    try:
        found = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Actor,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows))),
            num_cpus=1,
            num_gpus=min(1.0, gpus / workers),
        )
        for row in found.iter_rows():
            yield row["name"], row["content"]
    except Exception as error:  # Ray's error, whose text is the traceback of the actor
        if sentence := find_user_message(str(error)):
            raise UserError(sentence) from error
        raise
    finally:
        if is_ours:
            ray.shutdown()


def _write_json(folder: Path, file: BinaryIO) -> None:
    """Converts the Parquet files to the JSON of ``predict_files``, one result at a time."""
    separator, image_id = b"[", 0
    for path in sorted(folder.glob(_PARTS)):
        for row in import_parquet().read_table(path).to_pylist():
            image_id += row["error"] is None
            for result in _convert(row, image_id) if row["error"] is None else ():
                file.write(separator + json.dumps(result).encode())
                separator = b",\n"
    file.write(b"]" if separator != b"[" else b"[]")


def _convert(row: Row, image_id: int) -> list[Row]:
    if row["boxes"] is None:
        pairs = zip(row["classes"], row["scores"], strict=True)
        classes = [{"name": name, "score": score} for name, score in pairs]
        return [{"file_name": row["file"], "classes": classes}]
    boxes = np.array(row["boxes"], np.float32).reshape(-1, 4)
    boxes[:, 2:] -= boxes[:, :2]
    columns = (boxes.tolist(), row["scores"], row["category_ids"], row["classes"])
    keys = ("bbox", "score", "category_id", "category_name")
    same = {"image_id": image_id, "file_name": row["file"]}
    return [{**same, **dict(zip(keys, one, strict=True))} for one in zip(*columns, strict=True)]
