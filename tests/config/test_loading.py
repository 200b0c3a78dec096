# Copyright (c) qbheat_det contributors. Apache-2.0.
"""YAML, overrides and schedules: what is merged, and what is refused with which sentence."""

import random

import pytest
import torch
import yaml
from detectron2.config import get_cfg as get_detectron2_cfg

from qbheat_det.config import (
    add_qbheat_config,
    find_memory_format,
    get_cfg,
    get_config_path,
    load_config,
)
from qbheat_det.config.loading import EPOCH_KEYS, switch_off_overruled_epochs
from qbheat_det.core import yaml_text
from qbheat_det.core.errors import UserError
from qbheat_det.core.yaml_text import load_yaml


def _write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_inherits_and_overrides_win(tmp_path):
    _write(tmp_path / "base.yaml", "SOLVER: {BASE_LR: 0.5, MAX_ITER: 7}\nVERSION: 2\n")
    leaf = _write(tmp_path / "leaf.yaml", "_BASE_: base.yaml\nSOLVER: {MAX_ITER: 8}\n")
    cfg = load_config(leaf, ["SOLVER.IMS_PER_BATCH", "3"])
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH) == (0.5, 8, 3)


def test_the_keys_can_be_added_to_a_config_of_someone_else():
    cfg = get_detectron2_cfg()
    add_qbheat_config(cfg)
    assert cfg.MODEL.MF_DETR.NUM_OBJECT_QUERIES == 100


def test_code_in_a_file_is_refused_and_not_run(tmp_path):
    witness = tmp_path / "ran"
    text = f"OUTPUT_DIR: !!python/object/apply:os.system ['touch {witness}']\n"
    evil, leaf = tmp_path / "evil.yaml", tmp_path / "leaf.yaml"
    _write(evil, text)
    _write(leaf, "_BASE_: evil.yaml\n")
    for path in (evil, leaf):
        with pytest.raises(UserError, match=r"evil\.yaml is not plain YAML"):
            load_config(path)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL: {MF_DETR: {NUM_QUERIES: 3}}\n", r"MODEL\.MF_DETR\.NUM_OBJECT_QUERIES"),
        ("SOLVR: {MAX_ITER: 3}\n", r"SOLVER\.MAX_ITER"),
        ("SOLVER: {MAX_ITER: many}\n", "MAX_ITER"),
        ("SOLVER: {MAX_ITER: {DEEP: 1}}\n", "MAX_ITER"),
        ("- 1\n", "top level"),
        ("a: [1\n", "not plain YAML"),
        ("- " * 100_000 + "1", "more than 100 levels"),  # libyaml would crash
        ("&a [*a]", r"'\*a' has no value, or is in its own"),
        ("OUTPUT_DIR: 2026-13-01\n", "month"),
        (f"SEED: {'9' * 5000}\n", "digit"),
        ("SOLVER: {BASE_LR: '--3'}\n", r"SOLVER\.BASE_LR"),
        (f"SOLVER: {{STEPS: '{'(' * 5000}'}}\n", r"SOLVER\.STEPS"),
        (f"_BASE_: {'x' * 300}\n", "does not exist"),
        ("", "top level"),
        ("_BASE_: nowhere.yaml\n", r"nowhere\.yaml.*does not exist"),
        ("1: 2\n", "unknown config key '1'"),
        ("MODEL: {FPN: {SEPARABLE: true}}\n", r"'MODEL\.FPN\.SEPARABLE: True' is of an earlier"),
        ("MODEL: {BACKBONE: {NAME: null}}\n", r"bad\.yaml, MODEL\.BACKBONE\.NAME: .* str"),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_config(_write(tmp_path / "bad.yaml", text))


def test_a_file_may_have_the_default_of_a_key_that_was_removed(tmp_path):
    path = _write(tmp_path / "old.yaml", "MODEL: {FPN: {SEPARABLE: false, OUT_CHANNELS: 48}}\n")
    cfg = load_config(path)
    assert cfg.MODEL.FPN.OUT_CHANNELS == 48
    assert "SEPARABLE" not in cfg.MODEL.FPN


def _count_nodes(value):
    """Counts the values of nested lists and dicts, with shared ones as often as they occur."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_count_nodes, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_count_nodes, value))
    return 1


def _measure_depth(value):
    """Counts the levels of nested lists and dicts."""
    if isinstance(value, dict):
        return 1 + max(map(_measure_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_measure_depth, value), default=0)
    return 0


def test_aliases_are_counted_as_if_they_were_written_out(monkeypatch):
    generator = random.Random(0)
    for _ in range(100):
        lines = ["a0: &a0 [x, {y: z}]"]
        for number in range(1, generator.randint(2, 7)):
            aliases = [f"*a{generator.randrange(number)}" for _ in range(generator.randint(0, 4))]
            lines.append(f"a{number}: &a{number} {{k: [{', '.join(['w', *aliases])}]}}")
        text = "\n".join(lines)
        value = yaml.safe_load(text)
        for limit, extent in (("_MAX_NODES", _count_nodes), ("_MAX_DEPTH", _measure_depth)):
            with monkeypatch.context() as patch:
                patch.setattr(yaml_text, limit, extent(value))
                assert load_yaml(text) == value
                patch.setattr(yaml_text, limit, extent(value) - 1)
                with pytest.raises(yaml.YAMLError, match="values"):
                    load_yaml(text)


def test_nine_lines_of_aliases_do_not_fill_the_memory():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for number in range(1, 9):
        lines.append(f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]")
    long_text = [f"s: &s {'x' * 100_000}", f"all: [{', '.join(['*s'] * 2000)}]"]
    for bomb in (lines, long_text):
        for scalars_as_text in (False, True):
            with pytest.raises(yaml.YAMLError, match="1,000,000 values"):
                load_yaml("\n".join(bomb), scalars_as_text=scalars_as_text)


def test_files_that_inherit_each_other_are_refused(tmp_path):
    _write(tmp_path / "a.yaml", "_BASE_: b.yaml\n")
    with pytest.raises(UserError, match="inherit"):
        load_config(_write(tmp_path / "b.yaml", "_BASE_: a.yaml\n"))


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (["SOLVER.MAX_ITER"], "no partner"),
        (["SOLVER.MAXITER", "3"], r"did you mean 'SOLVER\.MAX_ITER'"),
        (["SOLVER.MAX_ITER", "many"], "MAX_ITER"),
        (["SOLVER", "3"], "group of keys"),
        (["MODEL.MF_DETR.QUERY_GROUPS.COUNT", "1"], r"'MODEL\.MF_DETR\.QUERY_GROUPS\.COUNT'"),
        (["SOLVER.BASE_LR", "None"], r"SOLVER\.BASE_LR: .* float"),
    ],
)
def test_bad_overrides_are_refused_with_a_sentence(opts, message):
    with pytest.raises(UserError, match=message):
        load_config(None, opts)


def test_an_unknown_shipped_config_names_the_nearest():
    with pytest.raises(UserError, match=r"coco/mf_detr_211_285M_probe\.yaml"):
        get_config_path("coco/mf_detr_211_285M_prob.yaml")


@pytest.mark.parametrize(("below", "above"), [("3", "0.5"), ("0.5", "3"), ("2", "-1")])
def test_an_integer_will_do_where_a_float_stands(tmp_path, below, above):
    _write(tmp_path / "base.yaml", f"SOLVER:\n  BASE_LR: {below}\nVERSION: 2\n")
    text = f"_BASE_: base.yaml\nSOLVER:\n  BASE_LR: {above}\n"
    cfg = load_config(_write(tmp_path / "top.yaml", text), ["SOLVER.GAMMA", below])
    assert (cfg.SOLVER.BASE_LR, type(cfg.SOLVER.BASE_LR)) == (float(above), float)
    assert (cfg.SOLVER.GAMMA, type(cfg.SOLVER.GAMMA)) == (float(below), float)


def test_the_layout_of_maps_is_the_devices_unless_it_is_asked_for():
    cfg = get_cfg()
    for device, asked, is_innermost in (
        ("cpu", None, True),
        ("cuda:1", None, False),
        ("cpu", False, False),
        ("cuda", True, True),
    ):
        cfg.MODEL.DEVICE, cfg.MODEL.CHANNELS_LAST = device, asked
        assert (find_memory_format(cfg) == torch.channels_last) == is_innermost
    cfg.MODEL.CHANNELS_LAST = "auto"
    with pytest.raises(UserError, match=r"MODEL\.CHANNELS_LAST"):
        find_memory_format(cfg)


IN_EPOCHS = {"SOLVER.EPOCHS": 12.0, "SOLVER.STEP_EPOCHS": "(8, 11)"}


@pytest.mark.parametrize(
    ("layers", "epochs", "steps"),
    [
        ([IN_EPOCHS], 12.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.MAX_ITER": "100"}], 0.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.STEPS": "()"}], 12.0, []),
        ([{"SOLVER.MAX_ITER": 7}, IN_EPOCHS], 12.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.EPOCHS": "0", "SOLVER.MAX_ITER": "5"}], 0.0, [8, 11]),
        ([IN_EPOCHS, {"SOLVER.STEP_EPOCHS": "[]", "SOLVER.STEPS": "(5,)"}], 12.0, []),
    ],
)
def test_iterations_of_a_later_layer_switch_the_epochs_of_an_earlier_one_off(layers, epochs, steps):
    cfg = get_cfg()
    cfg.SOLVER.EPOCHS, cfg.SOLVER.STEP_EPOCHS = 12.0, [8, 11]  # as if the layers were merged
    switch_off_overruled_epochs(cfg, layers)
    assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.STEP_EPOCHS) == (epochs, steps)


@pytest.mark.parametrize(("in_epochs", "in_iterations"), EPOCH_KEYS.items())
def test_one_layer_with_both_spellings_is_refused(in_epochs, in_iterations):
    layers = [{in_epochs: "(3,)", in_iterations: "(7,)"}]
    with pytest.raises(UserError, match=rf"{in_epochs} .* and {in_iterations} .* leave one out"):
        switch_off_overruled_epochs(get_cfg(), layers)
