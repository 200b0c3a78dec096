# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Names, links, examples and tutorials in docs/ exist and run."""

import ast
import contextlib
import inspect
import io
import json
import logging
import re
import runpy
import shutil
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
from detectron2.checkpoint import DetectionCheckpointer

import qbheat_det
from qbheat_det.api import Detections, Detector
from qbheat_det.config import defaults, get_cfg
from tests.data.pictures import draw, save, save_video
from tests.toy_set import draw_toy_set

from .import_graph import ALLOWED
from .tool_modules import load_tool

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
TEXTS = "".join(PAGES.values())
NAMED_KEYS = sorted(set(re.findall(r"`((?:[A-Z]\w+\.)+[A-Z]\w+)`", TEXTS)))
README = (ROOT / "README.md").read_text(encoding="utf-8")
SEARCHED = ("small objects", "out of memory", "yolo", "resume")
PYTHON = PAGES["python.md"]
TUTORIALS = sorted((DOCS / "tutorials").glob("*.ipynb"))
# Slow ones, which ``python -m docs.run_tutorials`` has written with their outputs.
MEASURED = ("add_class", "few_boxes", "my_pictures", "pretrain_and_probe")


def test_named_tests_exist():
    named = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(test_\w+))?`", TEXTS)
    assert len(named) > 5
    for file, name in named:
        assert f"def {name}" in (TESTS / file).read_text(encoding="utf-8")


def test_named_config_keys_exist():
    assert len(NAMED_KEYS) > 80
    for key in NAMED_KEYS:
        reduce(lambda node, part: node[part], key.split("."), get_cfg())


def test_files_named_in_the_architecture_exist():
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.py)?|(?:\w+/)+\w+)`", PAGES["architecture.md"])
    assert len(paths) > 50
    folders = (ROOT, ROOT / "qbheat_det")
    assert [p for p in paths if not any((folder / p).exists() for folder in folders)] == []


def test_the_drawing_of_the_architecture_has_all_areas():
    drawn = runpy.run_path(str(DOCS / "draw_architecture.py"))["ROWS"]
    assert {area for row in drawn for area in row} == set(ALLOWED)


def test_every_objective_has_its_row():
    files = (ROOT / "configs" / "objectives").glob("*.yaml")
    names = {path.name for path in files if not path.name.startswith("Base-")}
    rows = re.findall(r"^\| [^|]+ \| `(\w+\.yaml)` \|", PAGES["objectives.md"], flags=re.M)
    assert names == set(rows)


def read_code(path):
    """Returns the code cells of a notebook, each as its text and what it printed when committed."""
    cells = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            streams = [out for out in cell["outputs"] if out["output_type"] == "stream"]
            cells.append(
                ("".join(cell["source"]), "".join("".join(out["text"]) for out in streams))
            )
    return cells


def split_numbers(text):
    """Returns the words of a text with each number replaced by "0", and the numbers."""
    number = r"\d+(?:\.\d+)?"
    return re.sub(number, "0", text).split(), [float(found) for found in re.findall(number, text)]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in MEASURED else (), id=path.stem)
        for path in TUTORIALS
    ],
)
def test_a_tutorial_runs_and_prints_the_figures_that_are_committed(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "tutorial"}
    compared = 0
    try:
        for code, committed in read_code(path):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, path.name, "exec"), scope)
            if path.stem in MEASURED:
                words, numbers = split_numbers(committed)
                found_words, found_numbers = split_numbers(printed.getvalue())
                assert found_words == words
                # AP50 in per cent, and numbers of boxes: other processors round differently.
                assert found_numbers == pytest.approx(numbers, rel=0.1, abs=4)
                compared += len(numbers)
    finally:
        logging.disable(logging.NOTSET)
    assert (compared >= 4) == (path.stem in MEASURED)


@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("tutorials/*.ipynb")],
    ids=lambda path: path.name,
)
def test_links_lead_to_files_of_the_repository(path):
    """Links work in a clone; ``docs/site.py`` adapts them to the site."""
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8"))
    local = {link for link in links if ":" not in link}
    assert {link for link in local if not (path.parent / link).exists()} == set()


def test_links_to_sources_become_links_to_pages_of_the_site():
    turn = runpy.run_path(str(DOCS / "site.py"))["on_page_markdown"]
    text = "[a](../MODEL_ZOO.md#b) [c](../qbheat_det/config/defaults.py) [d](../tools/zoo.py)"
    text += " [e](tutorials/few_boxes.ipynb#f)"
    for uri, up in (("train.md", ""), ("tutorials/predict.md", "../")):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        assert (
            turn(text, page)
            == f"[a]({up}model_zoo.md#b) [c]({up}config.md) `d` [e](tutorials/few_boxes.md#f)"
        )


def test_the_config_reference_has_every_key_with_its_default():
    site = runpy.run_path(str(DOCS / "site.py"))
    page = site["describe_config"](site["DEFAULTS"].read_text("utf-8"))
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", page, flags=re.MULTILINE))
    keys = {f"{path}.{key}" for path, node in defaults._KEYS.items() for key in node}
    assert keys == set(rows)
    assert rows["SOLVER.EMA.DECAY"] == "0.9998"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, which is built strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site):
    assert "qbheat_det" in (site / "api.html").read_text("utf-8")
    sections = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    titles = [section["title"].lower() for section in sections]
    assert all(any(words in title for title in titles) for words in SEARCHED)


PHONE = 390  # pixels
FIND_WIDE = """() => {
  document.querySelectorAll("details").forEach((part) => { part.open = true; });
  const shown = [...document.querySelectorAll("table, img, p, li, h1, h2, h3")];
  const parts = shown.filter((part) => !part.closest("nav"));
  const wide = parts.filter((part) => part.getBoundingClientRect().right > innerWidth + 1);
  return wide.map((part) => part.innerText.slice(0, 60));
}"""


@pytest.mark.slow
def test_no_table_of_the_site_is_wider_than_a_phone(site):
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="driving a browser needs playwright: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium")
    wide = {}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": PHONE, "height": 844})
        page.set_default_timeout(120_000)
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri(), wait_until="domcontentloaded")
            found = page.evaluate(FIND_WIDE)
            if found:
                wide[path.name] = found
        browser.close()
    assert wide == {}


def test_figures_are_explained_and_listed():
    page = PAGES["visualize.md"]
    for name in load_tool("report").FIGURES:
        assert f"\n### {name}\n" in page
        assert f"| [`{name}`](#{name}) |" in page


def test_the_code_of_the_readme_runs():
    for example in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda p: p.name)
def test_make_targets_and_python_modules_of_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for module in re.findall(r"python -m ((?:docs|tests|benchmarks)[\w.]*)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_files_named_in_the_readme_exist():
    for path in re.findall(r"(?:configs|tools|docs)/[\w./-]+\.\w+", README):
        assert (ROOT / path).is_file()


PAGE_CODE = [
    pytest.param(code, id=f"{page.name}-{index}")
    for page in [*ROOT.glob("*.md"), *sorted(DOCS.glob("*.md"))]
    for index, code in enumerate(
        re.findall(
            r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
        )
    )
]


def resolve(node, scope):
    """Returns the object that a dotted name leads to from an import; None if it is a variable."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, scope)
        if owner is not None:
            return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("code", PAGE_CODE)
def test_imports_attributes_and_keywords_of_python_examples_exist(code):
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    scope = {}
    exec(compile(ast.Module(imports, type_ignores=[]), "imports", "exec"), scope)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolve(node, scope)
        if isinstance(node, ast.Call):
            function = resolve(node.func, scope)
            starred = [word for word in node.keywords if word.arg is None]
            if function is None or starred or not callable(function):
                continue
            with contextlib.suppress(ValueError):  # built-in functions without a signature
                signature = inspect.signature(function)
                signature.bind_partial(**{str(word.arg): None for word in node.keywords})


def find_ours():
    """Returns the code in the right columns of ``docs/coming_from.md``."""
    codes = []
    for table in re.split(r"\n\s*\n", PAGES["coming_from.md"]):
        if re.match(r"\| .* \| qbheat_det \|\n", table):
            rows = [row.rsplit(" | ", 1)[1] for row in table.splitlines()[2:]]
            codes += [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    return codes


def _follow(node, scope):
    """Returns what an expression names, with types for values; binds the arguments of calls."""
    if isinstance(node, ast.Name):
        return scope[node.id]
    if isinstance(node, ast.Attribute):
        owner = _follow(node.value, scope)
        if node.attr in getattr(owner, "__dataclass_fields__", {}):
            return object
        return getattr(owner, node.attr)
    assert isinstance(node, ast.Call), ast.unparse(node)
    function = _follow(node.func, scope)
    is_method = isinstance(node.func, ast.Attribute) and isinstance(
        _follow(node.func.value, scope), type
    )
    keywords = {str(word.arg): word.value for word in node.keywords}
    inspect.signature(function).bind(*[None] * is_method, *node.args, **keywords)
    if isinstance(function, type):
        return function
    return {"load": Detector, "predict": Detections}.get(function.__name__, object)


def test_python_beside_that_of_other_libraries_exists():
    scope = {"qbheat_det": qbheat_det, "detector": Detector, "result": Detections, "model": None}
    scope["DetectionCheckpointer"] = DetectionCheckpointer
    ours = find_ours()
    assert len(ours) > 25
    for code in ours:
        (statement,) = ast.parse(code).body
        assert isinstance(statement, ast.Assign | ast.Expr)
        _follow(statement.value, scope)
    with pytest.raises(TypeError, match="conf"):
        _follow(ast.parse('detector.predict("a.jpg", conf=0.5)', mode="eval").body, scope)


BLOCKS = re.findall(r"```python\n(.*?)```", PYTHON, flags=re.DOTALL)
QUICK = {
    "SOLVER.IMS_PER_BATCH": 4,
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "INPUT.MIN_SIZE_TEST": 64,
}


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (4, ("drawn.jpg", "tasks.json", "cvat.json")),  # prediction
        pytest.param(9, ("output/more/model_final.safetensors",), marks=pytest.mark.slow),
    ],
)
def test_the_code_of_the_python_page_runs(count, written, tmp_path, monkeypatch):
    assert len(BLOCKS) == 9
    (tmp_path / "photos").mkdir()
    for name in ("photo.jpg", "photos/a.jpg", "photos/b.jpg"):
        save(tmp_path / name, draw(120, 90, seed=len(name)))
    save_video(tmp_path / "video.mp4", [draw(96, 64, seed=index) for index in range(2)])
    toy = draw_toy_set(tmp_path, 20)
    (tmp_path / "train.json").write_bytes((toy / "annotations.json").read_bytes())
    (toy / "images").rename(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    # The page trains for hours: use small data and settings.
    code = "\n".join(BLOCKS[:count]).replace('"data.yaml"', '"train.json"')
    quick = repr({"SOLVER.BASE_LR": 0.005, **QUICK})
    code = code.replace('{"SOLVER.BASE_LR": 0.005}', quick)
    code = code.replace("minutes=20", f'weights="retinanet/285M_bccd", epochs=1, overrides={quick}')
    exec(compile(code, "docs/python.md", "exec"), {})
    assert all((tmp_path / name).stat().st_size for name in written)
