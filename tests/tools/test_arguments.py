# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The parser of all tools: where config keys may stand among flags."""

import pytest

from qbheat_det.config import get_cfg
from qbheat_det.config.loading import list_leaves
from tests.tool_modules import load_tool, refuse

KEYS = load_tool("arguments")._KEY


@pytest.fixture
def parser():
    made = load_tool("arguments").Parser(prog="tool")
    made.add_argument("--images", nargs="+", default=[])
    made.add_argument("--numbers", nargs="*", type=int, default=[])
    made.add_argument("--size", nargs=2)
    made.add_argument("--output")
    made.add_argument("--fast", action="store_true")
    made.add_overrides()
    return made


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("--images a b SEED 2", {"images": ["a", "b"], "opts": ["SEED", "2"]}),
        ("SEED 2 --images a b", {"images": ["a", "b"], "opts": ["SEED", "2"]}),
        ("--images a SEED 2 --fast", {"images": ["a"], "fast": True, "opts": ["SEED", "2"]}),
        # Pairs in two places keep their order, and a value may look like a number or a flag.
        (
            "TEST.B 1 --images a TEST.C_2 -3",
            {"images": ["a"], "opts": ["TEST.B", "1", "TEST.C_2", "-3"]},
        ),
        ("--numbers 1 2 TEST.KNN.K 5", {"numbers": [1, 2], "opts": ["TEST.KNN.K", "5"]}),
        ("--numbers SEED 2", {"numbers": [], "opts": ["SEED", "2"]}),
        # A flag with a fixed number of values takes them, whatever they are.
        ("--output SEED TEST.B 1", {"output": "SEED", "opts": ["TEST.B", "1"]}),
        ("--size TEST.B SEED SEED 2", {"size": ["TEST.B", "SEED"], "opts": ["SEED", "2"]}),
        # A value may be a key, or contain "=".
        ("MODEL.NAME TEST.B", {"opts": ["MODEL.NAME", "TEST.B"]}),
        ("MODEL.WEIGHTS a=b.pth", {"opts": ["MODEL.WEIGHTS", "a=b.pth"]}),
        # Files that are named like keys.
        ("--images=TEST.B", {"images": ["TEST.B"]}),
        ("--images ./TEST.B c", {"images": ["./TEST.B", "c"]}),
        ("--images TEST.JPG c", {"images": ["TEST.JPG", "c"]}),
        ("--images SEEDS PHOTO.JPG DSC_1.JPG", {"images": ["SEEDS", "PHOTO.JPG", "DSC_1.JPG"]}),
        # Lower-case keys are left for the config, which names the right key.
        ("--fast seed 2", {"fast": True, "opts": ["seed", "2"]}),
    ],
)
def test_flags_with_several_values_end_at_a_config_key(
    parser, command, expected, tmp_path, monkeypatch
):
    (tmp_path / "TEST.JPG").touch()
    monkeypatch.chdir(tmp_path)
    nothing = {"images": [], "numbers": [], "size": None, "output": None, "fast": False, "opts": []}
    assert vars(parser.parse_args(command.split())) == nothing | expected


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("--images a SEED", "SEED has no value"),
        ("--images a TEST.B --fast", "TEST.B has no value"),
        ("--images a TEST.B=3", "write KEY VALUE"),
        ("--fast conf=0.3", "overrides KEY VALUE"),
        ("--images SEED 2", "--images: expected at least one argument"),
    ],
)
def test_a_wrong_override_is_named(parser, command, named, capsys):
    assert named in refuse(parser.parse_args, command.split(), capsys)


def test_the_parser_recognizes_every_key_of_the_config_and_of_tools():
    leaves = [key for key, _ in list_leaves(get_cfg())]
    assert len(leaves) > 300
    assert [key for key in leaves if not KEYS.fullmatch(key)] == []
    words = (
        "knn tran-1 photos photos/A.B qbheat://retinanet/285M_bccd R-50.pkl 285M 1.0G train.json"
    )
    assert [word for word in words.split() if KEYS.fullmatch(word)] == []


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        ("train_net", "--data d --images a"),
        ("predict", "--weights w --images a b"),
        ("export", "--weights w --output o.onnx --images a b"),
        ("export", "--weights w --output o.onnx --int8-images a b"),
        ("probe_backbone", "--data d --val v --weights a b"),
        ("probe_backbone", "--data d --val v --random-seeds 1 2"),
        ("probe_backbone", "--data d --val v --probes knn tran-1"),
        ("compare_pretraining", "--data d --val v --epochs 2 --output o --objectives qb_heat"),
        ("compare_pretraining", "--data d --val v --epochs 2 --output o --seeds 1 2"),
        ("select_images", "--data d --output o --simulate 50 100"),
        ("select_images", "--data d --output o --simulate 50 --seeds 1 2"),
        ("inspect_dataset", "--data d --images a"),
        ("demo", ""),
    ],
)
def test_each_tool_takes_overrides_after_any_flag_and_before_it(tool, command):
    parse = load_tool(tool).parse_args
    pair = ["SOLVER.ACCUMULATE", "2"]
    after = parse([*command.split(), *pair])
    assert after.opts == pair
    assert vars(parse([*pair, *command.split()])) == vars(after)
    plain = vars(parse(command.split()))
    assert {**vars(after), "opts": []} == plain
