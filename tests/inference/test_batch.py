# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction into Parquet files: results of ``predict``, each image once, whatever is killed."""

import importlib.util
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qbheat_det import load
from qbheat_det.api import Job, predict_files, run_batch
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import open_images, pack_source
from qbheat_det.inference import batch
from tests.engine.tiny_detectors import save_run
from tests.engine.tiny_pretraining import OPTS, RECIPE
from tests.inference.conftest import SIZES
from tests.tool_modules import load_tool, refuse

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def expected(detector: str, photos: Path) -> list[dict[str, Any]]:
    """What ``predict --json`` writes."""
    found = predict_files(detector, [str(photos)], score_threshold=0.1, device="cpu").results
    assert len(found) > 20
    return found


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of all parts, in order."""
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def job(weights: str, **settings: Any) -> Job:
    return Job(weights, device="cpu", **{"threshold": 0.1, **settings})


def drop(results: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key not in keys} for one in results]


def make_source(kind: str, photos: Path, root: Path) -> tuple[str, list[str]]:
    """Returns what --images names, and the file of each row."""
    paths = sorted(path for path in photos.rglob("*.*"))
    names = [path.relative_to(photos).as_posix() for path in paths]
    if kind == "folder":
        return str(photos), names
    if kind == "shards":
        pack_source(open_images([str(photos)]), root / "shards", shard_bytes=4000)
        return str(root / "shards"), sorted(SIZES)
    contents = [path.read_bytes() for path in paths]
    table = {
        "paths": {"other": [0] * 5, "path": names},
        "bytes": {"bytes": contents},
        "structs": {"image": [{"bytes": content, "path": None} for content in contents]},
    }[kind]
    folder = photos if kind == "paths" else root
    pq.write_table(pa.table(table), folder / "t.parquet", row_group_size=2)
    return str(folder / "t.parquet"), names if kind == "paths" else [str(i) for i in range(5)]


@pytest.mark.parametrize("kind", ["folder", "shards", "paths", "bytes", "structs"])
def test_every_source_gives_what_predict_gives(
    kind: str, photos: Path, detector: str, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    photos = Path(shutil.copytree(photos, tmp_path / "photos"))
    source, names = make_source(kind, photos, tmp_path)
    file = tmp_path / "boxes.json"
    total, broken = run_batch(
        job(detector), [source], tmp_path / "out", json_file=file, part_size=2
    )
    assert (total, broken) == ((4, 0) if kind == "shards" else (5, 1))
    rows = read(tmp_path / "out")
    assert sorted(row["file"] for row in rows) == sorted(names)
    assert all(Path(row["source"], row["file"]).exists() for row in rows if kind == "folder")
    found = json.loads(file.read_text())
    originals = dict(zip(names, sorted([*SIZES, "c.png"]), strict=False)) if broken else {}
    for row in rows:
        name = originals.get(row["file"], row["file"])
        boxes = [one for one in expected if one["file_name"] == name]
        own = [one for one in found if one["file_name"] == row["file"]]
        assert drop(own, "file_name", "image_id", "category_name") == drop(
            boxes, "file_name", "image_id"
        )
        assert (row["error"] is None) == (row["boxes"] is not None) == (name != "c.png")
        if not row["error"]:
            assert (row["width"], row["height"]) == SIZES[name]
            assert [b[:2] for b in row["boxes"]] == [one["bbox"][:2] for one in boxes]
            assert row["scores"] == [one["score"] for one in boxes]
    if kind == "folder":
        assert drop(found, "category_name") == expected
    else:
        assert len(found) == len(expected)


def test_a_run_that_was_killed_goes_on_and_new_images_are_added(
    photos: Path, detector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, out = Path(shutil.copytree(photos, tmp_path / "photos")), tmp_path / "out"
    write = batch.write_atomically

    def write_two(path: Path, content: Any) -> None:
        if len(list(out.glob("*.parquet"))) == 2:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(batch, "write_atomically", write_two)
    with pytest.raises(KeyboardInterrupt):
        run_batch(job(detector), [str(photos)], out, part_size=2)
    monkeypatch.setattr(batch, "write_atomically", write)
    (out / ".part-x.incomplete").write_text("half")
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    for damaged in (next(iter(before)), out / "_settings.json"):
        damaged.rename(tmp_path / "whole")
        for content in (b"", b"{", b"[]"):
            damaged.write_bytes(content)
            with pytest.raises(UserError, match=str(out)):
                run_batch(job(detector), [str(photos)], out, resume=True)
        (tmp_path / "whole").rename(damaged)
    shutil.copy(photos / "a.png", photos / "0.png")  # moves the places of all others

    for changed, named in (({}, str(out)), ({"threshold": 0.2}, "threshold")):
        with pytest.raises(UserError, match=named):
            run_batch(job(detector, **changed), [str(photos)], out, resume=bool(changed))
    done = run_batch(job(detector), [str(photos)], out, part_size=2, resume=True)
    assert done == (6, 1)
    assert sorted(row["file"] for row in read(out)) == sorted([*SIZES, "0.png", "c.png"])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(out.glob(".*incomplete"))
    monkeypatch.setattr(batch, "Worker", None)  # nothing is left to do
    assert run_batch(job(detector), [str(photos)], out, resume=True) == done
    copied = str(shutil.copy(detector, tmp_path / "copied.safetensors"))
    assert run_batch(job(copied), [str(photos)], out, resume=True) == done
    with open(copied, "ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match="weights"):
        run_batch(job(copied), [str(photos)], out, resume=True)


def test_broken_links_and_files_whose_names_are_no_text_have_rows_and_are_known_again(
    photos: Path, detector: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    name = b"bad\xff.jpg"
    shutil.copy(next(photos.glob("*.jpg")), folder / os.fsdecode(name))
    (folder / os.fsdecode(b"broken\xfe.jpg")).write_text("no image")
    links = {"dangling.jpg": "nowhere.jpg", "loop.jpg": "loop.jpg"}
    for link, target in links.items():
        (folder / link).symlink_to(target)
    for resume in (False, True):
        found = run_batch(job(detector), [str(folder)], tmp_path / "out", resume=resume)
    rows = read(tmp_path / "out")
    assert found[0] == len(rows) == len({row["file"] for row in rows})
    assert {"bad\\udcff.jpg", "broken\\udcfe.jpg", *links} < {row["file"] for row in rows}
    assert all(row["error"] for row in rows if row["file"] in links)
    json.dumps(rows).encode()


def test_features_are_the_mean_of_the_map_and_the_first_token(tmp_path: Path) -> None:
    cfg = load_config(RECIPE, [word for pair in OPTS.items() for word in pair])
    weights = save_run(cfg, tmp_path / "run")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    for index, each in enumerate(pixels):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(each).save(tmp_path / "photos" / f"{index}.png")
    (tmp_path / "photos" / "3.png").write_text("no image")
    main = load_tool("features").main
    words = f"--weights {weights} --images {tmp_path / 'photos'} --size 64 --batch-size 2"
    words += f" --device cpu --parquet {tmp_path}/"
    assert [
        main([*f"{words}{form}".split(), *f]) for form, f in (("a", ()), ("b", ("--fast",)))
    ] == [1, 1]

    encoder = load(weights, device="cpu")
    with torch.no_grad():
        outputs = encoder([torch.from_numpy(each).permute(2, 0, 1) for each in pixels])
    name = batch.find_feature(encoder.model)
    wanted = [outputs[name].mean(dim=(2, 3))]
    wanted += [outputs["tokens"][:, 0]] if "tokens" in outputs else []
    for folder in ("a", "b"):
        rows = read(tmp_path / folder)
        assert [bool(row["error"]) for row in rows] == [False, False, False, True]
        assert rows[3]["embedding"] is None
        assert rows[3]["error"].endswith(": not an image")
        found = torch.tensor([row["embedding"] for row in rows[:3]])
        torch.testing.assert_close(found, torch.cat(wanted, dim=1), rtol=1e-3, atol=1e-4)


def test_a_classifier_gives_classes(classifier: tuple[str, Any, str], tmp_path: Path) -> None:
    root, _, weights = classifier
    own, file = tmp_path / "own.json", tmp_path / "classes.json"
    predict_files(weights, [root], json_file=file, device="cpu")
    assert run_batch(job(weights), [root], tmp_path / "out", json_file=own) == (7, 1)
    for one, other in zip(json.loads(own.read_text()), json.loads(file.read_text()), strict=True):
        assert one["file_name"] == other["file_name"]
        assert [c["name"] for c in one["classes"]] == [c["name"] for c in other["classes"]]
        scores = [[c["score"] for c in each["classes"]] for each in (one, other)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_ray_that_is_not_installed_is_named(
    photos: Path, detector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "ray" and find(name))
    with pytest.raises(UserError, match=r"qbheat_det\[ray\]"):
        run_batch(job(detector), [str(photos)], tmp_path, engine="ray")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_bad_arguments_are_named(
    photos: Path, detector: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.parquet").write_text("no table")
    table = {"x": [1], "y": [[b"1"]], "image": [{"bytes": None, "path": "a.png"}]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    out, same = (
        f"--parquet {tmp_path / 'out'}",
        f"--weights {detector} --device cpu --images {photos}",
    )
    at = f"--weights {detector} --device cpu --images {tmp_path}"
    for tool, words, named in (
        ("predict", f"{same} --json x.json --resume", "--resume"),
        ("predict", f"{same} {out} --output drawn", "--output"),
        ("predict", f"{same} {out} --format cvat", "--format"),
        ("predict", f"{same} {out} --engine ray --workers -1", "--workers"),
        ("predict", f"{at}/no.parquet {out}", "no.parquet"),
        ("predict", f"{at}/x.parquet {out}", "--column"),
        ("predict", f"{at}/x.parquet {out} --column x", "column x"),
        ("predict", f"{at}/x.parquet {out} --column y", "column y"),
        ("predict", f"{at}/nowhere {out}", "nowhere"),
        ("features", f"{same} {out}", "model_final.pth"),
        ("features", same, "--parquet"),
    ):
        assert named in refuse(load_tool(tool).main, words.split(), capsys)


@pytest.mark.slow
def test_a_raylet_that_is_killed_loses_nothing_and_doubles_nothing(
    detector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    noise, file = np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), np.uint8), io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    cells = [b"no image" if row % 9 == 4 else file.getvalue() for row in range(64)]
    pq.write_table(pa.table({"image": cells}), tmp_path / "t.parquet", row_group_size=8)
    source, out = [str(tmp_path / "t.parquet")], tmp_path / "ray"
    run_batch(job(detector), source, tmp_path / "local", part_size=2)

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        write, written = batch.write_atomically, []

        def write_and_kill(path: Path, content: Any) -> None:
            write(path, content)
            written.append(path.name)
            actors = [a for a in ray._private.state.actors().values() if "MapWorker" in str(a)]
            nodes = {actor["Address"]["NodeID"] for actor in actors if actor["State"] == "ALIVE"}
            if len(nodes) == 2 and 5 < len(written) < 30 and node in cluster.worker_nodes:
                cluster.remove_node(node, allow_graceful=False)

        monkeypatch.setattr(batch, "write_atomically", write_and_kill)
        assert run_batch(job(detector), source, out, engine="ray", part_size=2) == (64, 7)
        assert node not in cluster.worker_nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert sorted(set(written)) == sorted(written)
    assert contents(out) == contents(tmp_path / "local")
    assert sorted(int(row["file"]) for row in read(out)) == list(range(64))
