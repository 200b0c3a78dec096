# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the notebooks of docs/tutorials/ and writes their outputs into them.

usage: python -m docs.run_tutorials NAME [NAME …]

It needs ``pip install nbclient ipykernel``. Pictures are written as JPEG, which is smaller. What
libraries write to stderr is left out. ``tests/test_docs.py`` runs the notebooks again and compares
what they print.
"""

import base64
import io
import sys
from pathlib import Path

import nbformat
import PIL.Image
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent / "tutorials"
_JPEG = "image/jpeg"
_MAX_WIDTH = 720  # pixels of a picture


def run(path: Path) -> None:
    """Runs a notebook, and writes it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": "/tmp"}}).execute()
    for cell in notebook.cells:
        cell.pop("metadata", None)
        cell["metadata"] = {}
        if cell.cell_type == "code":
            cell.outputs = [shrink(output) for output in cell.outputs if is_kept(output)]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


def is_kept(output: nbformat.NotebookNode) -> bool:
    """Returns whether an output is a picture or printed text."""
    if output.output_type == "stream":
        return bool(output.name == "stdout")
    return "image/png" in output.get("data", {})


def shrink(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Returns an output whose picture is a JPEG of at most ``_MAX_WIDTH`` pixels."""
    if "data" in output:
        picture = PIL.Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
        picture.thumbnail((_MAX_WIDTH, 4 * _MAX_WIDTH))
        content = io.BytesIO()
        picture.convert("RGB").save(content, "JPEG", quality=80)
        output.data = {_JPEG: base64.b64encode(content.getvalue()).decode()}
    return output


def main() -> None:
    for name in sys.argv[1:]:
        run(TUTORIALS / f"{name}.ipynb")


if __name__ == "__main__":
    main()
