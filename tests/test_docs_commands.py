# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parses all commands on pages, in docstrings and in configs, and runs those marked "tested".

On a page, each block of commands follows a comment: ``<!-- tested -->``, ``<!-- needs … -->`` or
``<!-- takes … -->``. The site shows the last two. Of a command inside a sentence, such as an error
message, the flags and keys are looked up.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import PIL.Image
import pytest

from qbheat_det.config import get_cfg, get_config_path, load_config
from qbheat_det.config.loading import check_timm_name, list_leaves
from qbheat_det.model_zoo import list_entries
from tests.engine.tiny_training import forget_runs
from tests.toy_set import draw_toy_set

from .tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MORE_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "MODEL_ZOO.md"]  # without comments before blocks
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
SOURCES = sorted(path for area in ("qbheat_det", "tools") for path in (ROOT / area).rglob("*.py"))
COMMAND = re.compile(r"^\s*(?:\w+=\S+ )*(?:qbheat|python tools/|torchrun)", flags=re.MULTILINE)
_FENCE = re.compile(
    r"(?:^<!-- ([^\n]*) -->\n)?^ *```(bash|sh|python)\n(.*?)^ *```", flags=re.M | re.S
)
# Commands print their words instead of running.
_PRINT_WORDS = """
say() { printf '%s\\x1f' "$@"; printf '\\n'; }
qbheat() { say qbheat "$@"; }
python() { say python "$@"; }
torchrun() { say torchrun "$@"; }
PATH=/nonexistent
"""
# Trainings take two steps, without a network and without trained weights.
QUICK = (
    *("SOLVER.EPOCHS", "0.0", "SOLVER.MAX_ITER", "2", "SOLVER.IMS_PER_BATCH", "2"),
    *("SOLVER.WARMUP_EPOCHS", "0.0", "SOLVER.WARMUP_ITERS", "1", "DATALOADER.NUM_WORKERS", "0"),
    *("TEST.EVAL_EPOCHS", "0.0", "MODEL.DEVICE", "cpu", "SEED", "1"),
    *("INPUT.MIN_SIZE_TRAIN", "(96,)", "INPUT.MIN_SIZE_TEST", "96"),
    *("MODEL.RETINANET.SCORE_THRESH_TEST", "0.0"),  # keeps boxes to evaluate
)
UNTAUGHT = ("MODEL.TEACHER.WEIGHTS", "")
_RUN = """
python() {{ {python} "$@"; }}
torchrun() {{ python -m torch.distributed.run "$@"; }}
call() {{ python {tool} "$@"; }}
qbheat() {{
    case "$*" in
        train*--weights*|train*--config-file*) call "$@" {quick} ;;
        train*) call "$@" {quick} MODEL.WEIGHTS '' ;;
        pretrain*--config-file*) call "$@" {quick} ;;
        pretrain*) call "$@" {quick} {teacher} ;;
        *) call "$@" ;;
    esac
}}
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the comment before it, and its text."""

    page: str
    mark: str
    text: str

    def __str__(self):
        return f"{self.page}: {self.text.strip().splitlines()[0][:60]}"


def find_blocks(pages):
    """Returns all blocks of pages with commands of this package."""
    blocks = []
    for page in pages:
        for mark, language, text in _FENCE.findall(page.read_text("utf-8")):
            if language == "python" and mark == "tested":
                blocks.append(Block(page.name, mark, f"python - <<'END'\n{text}END\n"))
            elif language != "python" and COMMAND.search(text):
                blocks.append(Block(page.name, mark, text))
    return blocks


def find_examples(path):
    """Returns a block for each docstring of a Python file that has indented commands."""
    blocks = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        doc = (ast.get_docstring(node) or "").replace("\\\n", " ")
        lines = [line.strip() for line in doc.splitlines() if line.startswith("  ")]
        commands = [line for line in lines if COMMAND.match(line)]
        if commands:
            blocks.append(Block(str(path.relative_to(ROOT)), "", "\n".join(commands)))
    return blocks


def find_card(path):
    """Returns the commands in the comment card of a config."""
    lines = path.read_text("utf-8").splitlines()
    card = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    match = re.search(r"Command: +(.*?) [A-Z][a-z]+:", card)
    if match is None:
        return []
    text = re.sub(r"<[^>]*>", "W", match[1]).replace(", or ", "\n")
    text = re.sub(r"\[(--[^]]+)\]", r"\1", text)  # flags that may be left out
    text = re.sub(r"^tools/", "python tools/", text, flags=re.MULTILINE)
    return [Block(str(path.relative_to(ROOT)), "", text)]


def find_sentences():
    """Returns prose that may name commands: pages, notebooks, and all strings of Python files."""
    sentences = []
    for page in (*PAGES, *MORE_PAGES, *NOTEBOOKS):
        sentences.append((page.name, page.read_text("utf-8")))
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        inside = set()  # parts of f-strings
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                inside.update(id(part) for part in node.values)
                text = ""
                for part in node.values:
                    text += part.value if isinstance(part, ast.Constant) else "X"
                sentences.append((path.name, text))
            elif isinstance(getattr(node, "value", None), str) and id(node) not in inside:
                sentences.append((path.name, node.value))
    return sentences


def expand(block):
    """Returns the words of each command, as the shell passes them."""
    done = subprocess.run(
        ["bash", "-c", _PRINT_WORDS + block.text], capture_output=True, text=True, check=False
    )
    return [line.split("\x1f")[:-1] for line in done.stdout.splitlines() if "\x1f" in line]


def find_tool(words):
    """Returns the name of a command's tool and its arguments; empty if there is no tool."""
    if words[0] == "qbheat":
        known = load_commands()
        if words[1] in ("version", "--help"):
            return "", []
        tool, given = known[words[1]][:2]
        return tool, [*given, *words[2:]]
    scripts = [i for i, word in enumerate(words) if word.startswith("tools/")]
    if not scripts:
        return "", []
    return Path(words[scripts[0]]).stem, words[scripts[0] + 1 :]


@cache
def load_commands():
    """Returns ``COMMANDS`` of ``tools/qbheat``."""
    scope = {"__name__": "qbheat"}
    exec((ROOT / "tools" / "qbheat").read_text("utf-8"), scope)
    return scope["COMMANDS"]


BLOCKS = find_blocks(PAGES)
EXAMPLES = [block for path in SOURCES for block in find_examples(path)]
CARDS = [block for path in CONFIGS for block in find_card(path)]
TESTED = sorted({block.page for block in BLOCKS if block.mark == "tested"})


def check_command(words):
    """Parses a command, merges its config and its overrides, and looks up its weights."""
    name, arguments = find_tool(words)
    if not name or "…" in " ".join(words):
        return
    tool = load_tool(name)
    if not hasattr(tool, "parse_args"):
        return
    if {"--help", "-h"} & set(arguments):
        with pytest.raises(SystemExit, match=r"^0$"):
            tool.parse_args(arguments)
        return
    args = vars(tool.parse_args(arguments))
    config = args.get("config_file") or None
    if config and not config.startswith(("output/", "mine/")):
        config = get_config_path(str(ROOT / config) if config.startswith("configs/") else config)
    else:
        config = None
    load_config(config, args.get("opts") or [])
    weights = args.get("weights") or []
    for file in [weights] if isinstance(weights, str) else weights:
        check_weights(file.split("=", 1)[-1])


@cache
def find_families():
    """Returns the names of the model zoo, and their first parts."""
    names = {entry.name for entry in list_entries()}
    return names, {name.split("/")[0] for name in names}


def check_weights(file):
    """Asserts that an address of weights, or a name in the zoo, exists."""
    names, families = find_families()
    name = file.removeprefix("qbheat://")
    if file.startswith("timm://"):
        check_timm_name(file.removeprefix("timm://"))
    elif file.startswith("qbheat://") or name.split("/")[0] in families:
        assert name in names


@pytest.mark.parametrize("block", [*BLOCKS, *find_blocks(MORE_PAGES), *EXAMPLES, *CARDS], ids=str)
def test_a_command_parses_and_its_config_and_weights_exist(block):
    commands = expand(block)
    assert commands
    for words in commands:
        check_command(words)


@cache
def find_flags(command):
    """Returns the flags of a command of ``qbheat``."""
    tool = load_tool(load_commands()[command][0])
    if not hasattr(tool, "parse_args"):
        return {"--help"}
    text = io.StringIO()
    subcommands = (["list"], ["fetch"]) if command == "zoo" else ([],)
    for words in subcommands:
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
            tool.parse_args([*words, "--help"])
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text.getvalue(), flags=re.MULTILINE))


def test_flags_and_keys_of_commands_in_sentences_exist():
    known = load_commands()
    is_key = load_tool("arguments")._KEY.fullmatch
    keys = {key for key, _ in list_leaves(get_cfg())}
    number = 0
    for place, text in find_sentences():
        for command in re.findall(r"[`']qbheat ([a-z]+)\b", text):
            assert command in known or command == "version", (place, command)
        for command, rest in re.findall(r"qbheat (\w+)((?: [^\s`,;)]+)+)", text):
            if command not in known:
                continue
            number += 1
            for word in rest.split():
                flag = re.match(r"--[a-z][\w-]*", word)
                assert not flag or flag[0] in find_flags(command), (place, command, rest)
                word = word.rstrip(".:")
                assert not is_key(word) or word in keys, (place, command, rest)
        for name in re.findall(r"qbheat://([\w./-]*\w)", text):
            is_placeholder = re.match(r"(timm/)?(NAME|X$)", name)
            assert is_placeholder or name in find_families()[0], (place, name)
    assert number > 150


def test_users_of_other_libraries_see_commands():
    ours = [words for block in BLOCKS if block.page == "coming_from.md" for words in expand(block)]
    assert len(ours) > 30


def test_every_block_is_tested_or_has_a_reason():
    assert [str(b) for b in BLOCKS if not re.match(r"tested$|needs |takes ", b.mark)] == []
    assert len(TESTED) >= 5


@pytest.fixture
def desk(tmp_path):
    return fill_desk(tmp_path)


def fill_desk(tmp_path):
    """Fills a folder with photos, boxes as COCO files and as a YOLO set, and class folders."""
    picture = PIL.Image.open(ROOT / "docs" / "cells.jpg")
    width, height = picture.size
    (tmp_path / "photos").mkdir()
    for index in range(4):  # with blood cells, for the zoo's detector
        left = width - height - 12 * index
        picture.crop((left, 0, left + height, height)).save(tmp_path / "photos" / f"{index}.jpg")
    for name in ("docs", "tools", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "images").mkdir()
    for part, number in (("train", 8), ("val", 4)):
        toy = draw_toy_set(tmp_path / "toy", number, name=f"docs_{part}", size=96)
        data = json.loads((toy / "annotations.json").read_text("utf-8"))
        classes = [category["id"] for category in data["categories"]]
        for record in data["images"]:
            name = f"{part}_{Path(record['file_name']).name}"
            _write_yolo(tmp_path / "yolo", part, name, record, data["annotations"], classes)
            shutil.copy(toy / "images" / record["file_name"], tmp_path / "images" / name)
            shutil.copy(tmp_path / "images" / name, tmp_path / "yolo" / "images" / part / name)
            label = record["id"] % 2
            folder = tmp_path / "flowers" / part / ("daisy", "tulip")[label]
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "images" / name, folder)
            record["file_name"] = name
        (tmp_path / f"{part}.json").write_text(json.dumps(data), "utf-8")
    names = [category["name"] for category in data["categories"]]
    sets = {"path": "yolo", "train": "images/train", "val": "images/val", "names": names}
    (tmp_path / "data.yaml").write_text(json.dumps(sets), "utf-8")
    return tmp_path


def _write_yolo(folder, part, name, record, boxes, classes):
    for kind in ("images", "labels"):
        (folder / kind / part).mkdir(parents=True, exist_ok=True)
    lines = []
    for box in boxes:
        if box["image_id"] == record["id"]:
            x, y, w, h = box["bbox"]
            wide, high = record["width"], record["height"]
            place = ((x + w / 2) / wide, (y + h / 2) / high, w / wide, h / high)
            lines.append(" ".join(map(str, (classes.index(box["category_id"]), *place))))
    (folder / "labels" / part / name).with_suffix(".txt").write_text("\n".join(lines), "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", TESTED)
def test_the_tested_commands_of_a_page_run(page, desk):
    script = "\n".join(
        block.text for block in BLOCKS if (block.page, block.mark) == (page, "tested")
    )
    run_script(script, desk)


def run_script(script, folder):
    """Runs commands in a folder. Trainings take two steps."""
    shell = _RUN.format(python=shlex.quote(sys.executable), tool=ROOT / "tools" / "qbheat",
                        quick=shlex.join(QUICK), teacher=shlex.join(UNTAUGHT))  # fmt: skip
    done = subprocess.run(
        ["bash", "-e", "-c", shell + script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


# Examples of --help that do not run here, and why. Each pattern belongs to an example.
NOT_RUN = {
    r"--engine ray": "needs a cluster and a bucket",
    r"qbheat (app|serve)|^curl": "serves until it is stopped: tests/app",
    r"qbheat demo": "takes minutes: tests/tools/test_command.py",
    r"timm://|zoo fetch '\*'": "needs a network",
    r"QBHEAT_ZOO=zoo_weights": "needs the files of zoo fetch '*'",
    r"inspect --labels|--apply|--simulate": "takes minutes: tests/labelling",
    r"qbheat compare (?!.*--plan)": "takes minutes: tests/analysis/test_comparison.py",
    r"mobile-former-294m.pth.tar": "needs the authors' file: tests/checkpoint/test_convert.py",
    r"--num-gpus 8|-r 8": "needs eight GPUs",
    r"--weights distill/285M|--image-size 800 1333|analyze_model": "takes minutes",
}
# Runs of tiny models that examples start from.
_RUNS = """
qbheat pretrain --config-file quick_schedules/qb_heat_small_cells.yaml --output output/pretraining
qbheat train --config-file quick_schedules/retinanet_small_cells.yaml --freeze \\
    --weights output/pretraining/model_final.safetensors --output output/run
qbheat train --config-file custom/tran1_285M_probe.yaml --data flowers/train --val flowers/val \\
    --output output/classifier MODEL.WEIGHTS ''
qbheat export --weights output/run --output detector.onnx
"""
_COPIES = """
output/pretraining/model_final.safetensors output/model_final.safetensors
output/pretraining output/random
output/run output/mine
output/run output/fish
output/run output/boats
output/run output/probe
output/run output/probe_random
photos/0.jpg photo.jpg
photos others
flowers/train train
flowers/val val
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data and with runs, named as in the examples."""
    folder = fill_desk(tmp_path_factory.mktemp("runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in expand(Block("", "", _RUNS)):
            run_words(words)
    for line in _COPIES.strip().splitlines():
        source, target = (folder / name for name in line.split())
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    return folder


def run_words(words):
    """Runs a command of ``qbheat`` in this process. Trainings take two steps."""
    name, arguments = find_tool(words)
    forget_runs()
    if name != "train_net":
        assert not load_tool(name).main(arguments)
    elif "--eval-only" in arguments:
        load_tool(name).invoke_main(arguments)
    else:
        load_tool(name).invoke_main([*arguments, *QUICK])


def find_reason(command):
    """Returns why an example is not run; "" if it is."""
    return "".join(why for pattern, why in NOT_RUN.items() if re.search(pattern, command))


HELP = [
    line
    for block in EXAMPLES
    if block.page.startswith("tools/")
    for line in block.text.splitlines()
]


def test_each_reason_belongs_to_an_example():
    assert [p for p in NOT_RUN if not any(re.search(p, line) for line in HELP)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [line for line in HELP if not find_reason(line)],
    ids=lambda command: " ".join(command.split())[:80],
)
def test_an_example_of_help_runs(command, runs, tmp_path, monkeypatch):
    folder = shutil.copytree(runs, tmp_path / "folder", symlinks=True)
    for output in re.findall(r"--output (\S+)", command):  # the commands refuse to replace it
        shutil.rmtree(folder / output, ignore_errors=True)
        (folder / output).unlink(missing_ok=True)
    monkeypatch.chdir(folder)
    (words,) = expand(Block("", "", command))
    if words[0] == "torchrun":
        run_script(command, folder)
    else:
        run_words(words)
