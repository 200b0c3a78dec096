# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A round trip with a Label Studio server: tasks in, boxes corrected, the export is read.

Needs the command ``label-studio`` on the path or in ``$LABEL_STUDIO``: pip install label-studio, in
an environment of its own.
"""

import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog
from PIL import Image

from qbheat_det.data import open_source, register_source
from qbheat_det.labelling import select, write_selection
from tests.servers import serving

COMMAND = os.environ.get("LABEL_STUDIO") or shutil.which("label-studio")
DETECTOR = "retinanet/285M_bccd"
CELLS = Path(__file__).resolve().parents[2] / "docs" / "cells.jpg"
TOKEN = "0123456789abcdef0123456789abcdef01234567"
CONFIG = """<View><Image name="image" value="$image"/><RectangleLabels name="label" toName="image">
<Label value="RBC"/><Label value="WBC"/><Label value="Platelets"/></RectangleLabels></View>"""
OPTIONS = {
    "LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED": "true",
    "LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT": "/",
    "COLLECT_ANALYTICS": "False",
    "SENTRY_DSN": "",
    "FRONTEND_SENTRY_DSN": "",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="needs Label Studio: pip install label-studio"),
]


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Starts a server, and returns a function that calls its API."""
    data = tmp_path_factory.mktemp("label_studio")
    command = [COMMAND, "start", "--no-browser", "--data-dir", str(data)]
    command += ["--internal-host", "127.0.0.1", "--username", "a@example.org"]
    command += ["--password", "not-a-secret", "--user-token", TOKEN, "--enable-legacy-api-token"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def request(path, content=None):
        body = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"Token {TOKEN}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{address}{path}", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read()

    with serving(command, "/health", env=env | OPTIONS, **quiet) as address:
        yield request


def test_tasks_come_in_with_boxes_and_the_corrected_export_is_data(call, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    with Image.open(CELLS) as image:
        for x, name in ((0, "a.png"), (100, "b c+.png"), (200, "d.png")):
            image.crop((x, 40, x + 400, 340)).save(photos / name)
    write_selection(select(str(photos), 3, weights=DETECTOR), tmp_path / "next")
    project = json.loads(call("/api/projects", {"title": "cells", "label_config": CONFIG}))["id"]
    storage = {"project": project, "path": str(photos), "use_blob_urls": True}
    call("/api/storages/localfiles", storage)
    tasks = json.loads((tmp_path / "next" / "label_studio.json").read_text())
    call(f"/api/projects/{project}/import", tasks)
    export = f"/api/projects/{project}/export?exportType="
    expected = {}
    for number, task in enumerate(json.loads(call(f"{export}JSON&download_all_tasks=true"))):
        image = call(task["data"]["image"])
        (name,) = (path.name for path in photos.iterdir() if path.read_bytes() == image)
        (prediction,) = json.loads(call(f"/api/predictions?task={task['id']}"))
        result = prediction["result"][:2]
        if number:  # a person moves one box, and deletes all others but one; nobody opens task 0
            result[0]["value"] |= {"x": 25.0, "y": 50.0, "width": 10.0, "height": 20.0}
            call(f"/api/tasks/{task['id']}/annotations", {"result": result})
            keys = {"x": 4, "y": 3, "width": 4, "height": 3}  # pixels per per cent
            expected[name] = [[one["value"][k] * by for k, by in keys.items()] for one in result]
    for kind in ("JSON", "JSON_MIN"):
        file = tmp_path / f"{kind}.json"
        file.write_bytes(call(export + kind))
        register_source(kind, open_source(str(file), str(photos)).train)
        records = DatasetCatalog.get(kind)
        found = {Path(r["file_name"]).name: [a["bbox"] for a in r["annotations"]] for r in records}
        assert found == {
            name: [pytest.approx(b, abs=1e-3) for b in expected[name]] for name in expected
        }
