# Copyright (c) qbheat_det contributors. Apache-2.0.
"""mkdocs hooks that generate pages from sources elsewhere in the repository.

The README becomes the home page; the model zoo, the changelog and the notebooks become pages; the
config reference is read from ``qbheat_det/config/defaults.py``. The package is not imported.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = ROOT / "qbheat_det" / "config" / "defaults.py"
COPIES = {  # page of the site: its source in the repository
    "index.md": "README.md",
    "model_zoo.md": "MODEL_ZOO.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
AREAS = {  # sections of the API reference: a package, whose `__all__` is listed, and its purpose
    "qbheat_det.api": "Trained models: `qbheat_det.load`, detectors, encoders, results.",
    "qbheat_det.config": "Configs.",
    "qbheat_det.model_zoo": "Trained weights by name.",
    "qbheat_det.deployment": "The fastest equivalent form of a model.",
    "qbheat_det.export": "Files for other runtimes.",
    "qbheat_det.checkpoint": "Reads, matches and writes weights.",
    "qbheat_det.modeling.backbone": "Backbones.",
    "qbheat_det.modeling.pretrain": "Pre-training objectives.",
    "qbheat_det.modeling.detr": "MF-DETR.",
    "qbheat_det.modeling.retinanet": "RetinaNet.",
    "qbheat_det.modeling.fcos": "FCOS.",
    "qbheat_det.modeling.classification": "Classifiers.",
    "qbheat_det.modeling.contracts": "Protocols that models may implement.",
    "qbheat_det.probing": "Probes of a frozen backbone.",
    "qbheat_det.data": "Data sets, mappers, loading.",
    "qbheat_det.solver": "Optimizers and schedules.",
    "qbheat_det.evaluation": "Evaluators.",
    "qbheat_det.core": "Errors and files.",
}
_CONFIG_INTRO = """# Config keys

Every key that the package adds to Detectron2's, with its default. Override any of them at the
end of a command (`qbheat train … SOLVER.EPOCHS 20.0`), or in a YAML file with `_BASE_`. Unknown
keys and values of another type are errors. Detectron2's keys are in
[its reference](https://detectron2.readthedocs.io/en/latest/modules/config.html)."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that have no file in docs/."""
    pages = {page: (ROOT / source).read_text("utf-8") for page, source in COPIES.items()}
    pages["index.md"] = f"---\nhide: [navigation]\n---\n{pages['index.md']}"
    behind = "---\nsearch: {boost: 0.2}\n---\n"  # the site's search shows guides first
    pages["config.md"] = behind + describe_config(DEFAULTS.read_text("utf-8"))
    pages["api.md"] = behind + list_api()
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        pages[f"tutorials/{path.stem}.md"] = convert_notebook(path)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Redirects links to pages of the site, and shows the requirements of commands."""
    markdown = re.sub(r"(\]\([^):]*)\.ipynb", r"\1.md", markdown)
    if page.file.src_uri in COPIES:
        markdown = markdown.replace("](docs/", "](")
    up = "../" * page.file.src_uri.count("/")
    sources = COPIES | {"config.md": DEFAULTS.relative_to(ROOT).as_posix()}
    for target, source in sources.items():
        markdown = re.sub(
            rf"\]\((?:\.\./)*{re.escape(source)}(#[\w-]*)?\)", rf"]({up}{target}\1)", markdown
        )
    # Files without a page are shown by name.
    markdown = re.sub(
        r"\[([^]]+)\]\((?:\.\./)*(?:(?:configs|tools|qbheat_det)/[^)]+|LICENSE|CITATION\.cff)\)",
        format_as_code,
        markdown,
    )
    shown: set[str] = set()
    return re.sub(
        r"^<!-- ((?:needs|takes) .*?) -->$",
        lambda mark: show_requirement(mark, shown),
        markdown,
        flags=re.M,
    )


def on_page_content(html: str, **_: Any) -> str:
    """Marks flags in inline code, so that no line ends within one."""
    return re.sub(
        r"(?<=<code>)[^<]*--[^<]*(?=</code>)",
        lambda code: re.sub(r"--[\w-]+", r'<span class="flag">\g<0></span>', code[0]),
        html,
    )


def show_requirement(mark: re.Match[str], shown: set[str]) -> str:
    """Returns the requirement of a command; empty if the page has shown it before."""
    requirement = mark[1]
    if requirement in shown:
        return ""
    shown.add(requirement)
    return f"*{requirement[0].upper()}{requirement[1:]}:*"


def format_as_code(link: re.Match[str]) -> str:
    """Returns the text of a link as code."""
    return f"`{link[1].strip('`')}`"


def convert_notebook(path: Path) -> str:
    """Converts a notebook to Markdown."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            text = f"```python\n{text}\n```"
        parts.append(text)
        parts += [convert_output(output) for output in cell.get("outputs", [])]
    note = f"*This page is the notebook `docs/tutorials/{path.name}`.*"
    return "\n\n".join([parts[0], note, *parts[1:], ""])


def convert_output(output: dict[str, Any]) -> str:
    """Converts an output of a notebook's cell, which is text or a JPEG, to Markdown."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text'])}```"
    content = "".join(output["data"]["image/jpeg"]).replace("\n", "")
    return f"![output of the cell above](data:image/jpeg;base64,{content})"


def list_api() -> str:
    """Returns a page of all public classes and functions."""
    parts = ["# Python API\n\nExamples are in [Python](python.md)."]
    listed: set[str] = set()  # a class of two areas is shown in the first one
    for area, purpose in AREAS.items():
        path = ROOT / area.replace(".", "/")
        if path.is_dir():
            path /= "__init__.py"
        else:
            path = path.with_suffix(".py")
        parts.append(f"## {area}\n\n{purpose}")
        for name in list_public_names(ast.parse(path.read_text("utf-8"))):
            if not name.startswith("_") and not name.isupper() and name not in listed:
                listed.add(name)
                parts.append(f"::: {area}.{name}")
    return "\n\n".join(parts) + "\n"


def list_public_names(module: ast.Module) -> list[str]:
    """Returns ``__all__``, or else the classes and functions of a module."""
    for statement in module.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [statement.name for statement in module.body if isinstance(statement, kinds)]


def describe_config(source: str) -> str:
    """Returns a page of all config keys: one section per node, with defaults and comments."""
    comments = read_comments(source)
    nodes = next(
        statement.value
        for statement in ast.parse(source).body
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "_KEYS"
    )
    parts = [_CONFIG_INTRO]
    for path, keys, comment in list_items(nodes, comments):
        parts.append(f"## {path}\n\n{comment}\n\n| key | default | |\n| --- | --- | --- |")
        parts[-1] += "".join(
            f"\n| `{path}.{key}` | `{ast.unparse(value)}` | {text} |"
            for key, value, text in list_items(keys, comments)
        )
    return "\n\n".join(parts) + "\n"


def list_items(
    node: ast.expr | None, comments: dict[int, tuple[bool, str]]
) -> Iterator[tuple[str, ast.expr, str]]:
    """Yields each key of a dict literal, its value, and the comments above and beside it."""
    assert isinstance(node, ast.Dict)
    for key, value in zip(node.keys, node.values, strict=True):
        assert isinstance(key, ast.Constant)
        lines = []
        number = key.lineno - 1
        while comments.get(number, (False, ""))[0]:  # the lines above
            lines.insert(0, comments[number][1])
            number -= 1
        beside = [key.lineno]
        if not isinstance(value, ast.Dict) and value.end_lineno != key.lineno:
            beside.append(value.end_lineno or 0)
        lines += [comments[number][1] for number in beside if number in comments]
        text = " ".join(lines).replace("|", "\\|").replace("<", "&lt;")
        # Keys are code, which wraps on a phone.
        yield str(key.value), value, re.sub(r"\b(?:[A-Z]\w*\.)+[A-Z]\w*\b", r"`\g<0>`", text)


def read_comments(source: str) -> dict[int, tuple[bool, str]]:
    """Returns for each line with a comment: whether it has no code, and the comment's text."""
    return {
        token.start[0]: (token.line.strip().startswith("#"), token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
