# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A round trip with a Label Studio server: tasks in, boxes corrected, the export trains.

Needs the command ``label-studio`` on the path or in ``$LABEL_STUDIO``: pip install label-studio, in
an environment of its own.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detectron2.data import DatasetCatalog
from PIL import Image

import qbheat_det
from qbheat_det.data import open_source, register_source
from qbheat_det.labelling import write_selection

COMMAND = os.environ.get("LABEL_STUDIO") or shutil.which("label-studio")
DETECTOR = "retinanet/285M_bccd"
CELLS = Path(__file__).resolve().parents[2] / "docs" / "cells.jpg"
TOKEN = "0123456789abcdef0123456789abcdef01234567"
CONFIG = """<View><Image name="image" value="$image"/><RectangleLabels name="label" toName="image">
<Label value="RBC"/><Label value="WBC"/><Label value="Platelets"/></RectangleLabels></View>"""
Call = Callable[..., Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="needs Label Studio: pip install label-studio"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three crops of a picture of cells; a name needs quoting."""
    folder = tmp_path_factory.mktemp("photos")
    with Image.open(CELLS) as image:
        for x, name in ((0, "a.png"), (100, "b c+.png"), (200, "d.png")):
            image.crop((x, 40, x + 400, 340)).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def call(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Starts a server that serves files below the photos' parent; returns its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert COMMAND
    data = tmp_path_factory.mktemp("label_studio")
    environment = {
        "LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED": "true",
        "LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT": "/",
        "COLLECT_ANALYTICS": "False",
        "SENTRY_DSN": "",
        "FRONTEND_SENTRY_DSN": "",
    }
    command = [COMMAND, "start", "--no-browser", "--data-dir", str(data), "--port", str(port)]
    command += ["--internal-host", "127.0.0.1", "--username", "a@example.org"]
    command += ["--password", "not-a-secret", "--user-token", TOKEN, "--enable-legacy-api-token"]
    log = (data / "server.log").open("w")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    server = subprocess.Popen(command, env=env | environment, stdout=log, stderr=log)

    def request(path: str, content: Any = None, *, method: str | None = None) -> bytes:
        body = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"Token {TOKEN}", "Content-Type": "application/json"}
        address = f"http://127.0.0.1:{port}{path}"
        asked = urllib.request.Request(address, body, headers, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found: bytes = answer.read()
        return found

    try:
        for _ in range(240):
            try:
                request("/health")
                break
            except OSError:
                assert server.poll() is None, (data / "server.log").read_text()[-2000:]
                time.sleep(0.5)
        yield request
    finally:
        server.terminate()
        server.wait(30)
        log.close()


@pytest.fixture(scope="module")
def project(call: Call, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Imports the tasks of a selection as they are; returns the project's id."""
    labels = tmp_path_factory.mktemp("labelled")
    shutil.copy(CELLS, labels)
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 10, 50, 50], "area": 2500}]
    names = [{"id": i, "name": name} for i, name in enumerate(("RBC", "WBC", "Platelets"), 1)]
    images = [{"id": 1, "file_name": CELLS.name, "width": 640, "height": 480}]
    content = {"images": images, "annotations": boxes, "categories": names}
    (labels / "labels.json").write_text(json.dumps(content))
    selection = qbheat_det.select(
        str(photos), 3, weights=DETECTOR, data=str(labels / "labels.json")
    )
    folder = labels / "next"
    write_selection(selection, folder)
    number = json.loads(call("/api/projects", {"title": "cells", "label_config": CONFIG}))["id"]
    storage = {"project": number, "path": str(photos), "use_blob_urls": True}
    call("/api/storages/localfiles", storage)
    tasks = json.loads((folder / "label_studio.json").read_text())
    call(f"/api/projects/{number}/import", tasks)
    return int(number)


def test_tasks_come_in_with_boxes_and_images_and_the_corrected_export_is_data(
    call: Call, project: int, photos: Path, tmp_path: Path
) -> None:
    tasks = json.loads(
        call(f"/api/projects/{project}/export?exportType=JSON&download_all_tasks=true")
    )
    assert len(tasks) == 3
    expected: dict[str, list[list[float]]] = {}
    for number, task in enumerate(tasks):
        image = call(task["data"]["image"])
        (name,) = (path.name for path in photos.iterdir() if path.read_bytes() == image)
        (prediction,) = json.loads(call(f"/api/predictions?task={task['id']}"))
        result = prediction["result"]
        assert result, name
        if number == 0:  # nobody looks at the first
            continue
        # A person deletes all boxes but two, and moves one of these.
        result = result[:2]
        result[0]["value"] |= {"x": 25.0, "y": 50.0, "width": 10.0, "height": 20.0}
        call(f"/api/tasks/{task['id']}/annotations", {"result": result, "was_cancelled": False})
        expected[name] = [
            [v["x"] * 4, v["y"] * 3, v["width"] * 4, v["height"] * 3]
            for v in (one["value"] for one in result)
        ]
    for kind in ("JSON", "JSON_MIN"):
        export = tmp_path / f"{kind}.json"
        export.write_bytes(call(f"/api/projects/{project}/export?exportType={kind}"))
        source = open_source(str(export), str(photos))
        registered = register_source(f"export_{kind}", source.train)
        assert registered is not None
        records = DatasetCatalog.get(f"export_{kind}")
        found = {
            Path(record["file_name"]).name: [a["bbox"] for a in record["annotations"]]
            for record in records
        }
        assert found.keys() == expected.keys(), kind
        for name, boxes in expected.items():
            np.testing.assert_allclose(found[name], boxes, atol=1e-3, err_msg=f"{kind} {name}")
