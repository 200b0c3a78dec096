# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A report's sights one after another: what fails costs itself alone, and is said."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing.flags import add_subject_flags, read_options
from qbheat_det.engine.seeing.gather import describe_subjects, gather
from qbheat_det.engine.seeing.options import Sight, SightOptions
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.sights import SIGHTS
from qbheat_det.engine.seeing.subject import Subject, open_subjects

from ..tiny_detectors import make_probe_config, save_run


def see_well(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    return Exhibit("good", f"{len(subjects)} subjects, {options.extra['times']} times")


def see_nothing(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    raise NothingToSee("no linear models")


def see_fault(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    raise UserError("that folder is empty")


def see_defect(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    raise ZeroDivisionError("by zero")


def add_times(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=2)


def test_each_failure_costs_one_sight_and_keeps_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_run(make_probe_config(), tmp_path / "run")
    subjects = open_subjects([str(tmp_path / "run")])
    sights = [
        Sight("defect", "", see_defect),
        Sight("fault", "", see_fault),
        Sight("nothing", "", see_nothing),
        Sight("good", "", see_well, add_times),
    ]
    outcomes = list(
        gather(sights, subjects, lambda sight: SightOptions(extra=sight.default_flags()))
    )
    assert [(outcome.reason, outcome.is_failure) for outcome in outcomes] == [
        ("ZeroDivisionError: by zero", True),
        ("that folder is empty", True),
        ("no linear models", False),
        ("", False),
    ]
    assert outcomes[3].exhibit == Exhibit("good", "1 subjects, 2 times")
    assert "'defect' failed; the report goes on without it" in caplog.text


def test_options_are_those_of_the_command_line_and_else_the_sights_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_subject_flags(parser)
    words = ["a", "b", "--images", "photos", "--num-images", "3", "--seed", "7"]
    sight = Sight("good", "", see_well, add_times)
    options = read_options(parser.parse_args(words), sight)
    assert options == SightOptions(Path("photos"), 3, 7, {"times": 2})
    add_times(parser)
    assert read_options(parser.parse_args([*words, "--times", "5"]), sight).extra == {"times": 5}
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "--num-images", "0"])


def test_what_is_known_of_runs_is_told_and_what_is_not_is_none(tmp_path: Path) -> None:
    cfg = make_probe_config()
    cfg.SOLVER.IMS_PER_BATCH = 4
    save_run(cfg, tmp_path / "known")
    (tmp_path / "known" / "metrics.json").write_text('{"iteration": 9, "epoch": 2.5}\n')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.json").write_text("")
    known, bare = describe_subjects(
        open_subjects([str(tmp_path / "known"), str(tmp_path / "bare")], device="cpu")
    )
    assert known == {
        "label": "known", "fault": "", "kind": "detector", "model": "ChannelProbe",
        "backbone": cfg.MODEL.BACKBONE.NAME, "weights": "model_final.pth",
        "steps": 10, "epochs": 2.5, "images": 40,
    }  # fmt: skip
    assert bare["fault"] == "'bare' has no checkpoint yet"
    assert bare["steps"] is None
    assert bare["model"] is None
    (tmp_path / "known" / "model_final.pth").unlink()
    (begun,) = describe_subjects(open_subjects([str(tmp_path / "known")], device="cpu"))
    fault = "'known' has no checkpoint yet"
    assert begun == {**known, "weights": None, "fault": fault}, "what a running one tells"


@pytest.mark.parametrize("name", ["build_fpn_backbone", "build_mobile_former_fpn_backbone"])
def test_of_a_feature_pyramid_the_encoder_below_it_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(f"MODEL: {{BACKBONE: {{NAME: {name}}}}}\n")
    (tmp_path / "model_final.pth").write_bytes(b"not read for this")
    (known,) = describe_subjects(open_subjects([str(tmp_path)], device="cpu"))
    assert known["backbone"] == "MobileFormer below an FPN"


def test_no_two_sights_have_a_flag_in_common() -> None:
    parser = argparse.ArgumentParser()  # as tools/report.py's: an argparse error where they collide
    add_subject_flags(parser)
    for sight in SIGHTS.values():
        if sight.add_flags is not None:
            sight.add_flags(parser)
    own = [name for sight in SIGHTS.values() for name in sight.default_flags()]
    assert len(set(own)) == len(own)
    assert not {"runs", "images", "output", "only", "without"} & set(own)


def test_the_table_names_each_sight_once_and_every_flag_has_a_default() -> None:
    for name, sight in SIGHTS.items():
        assert name == sight.name
        assert sight.summary
        assert not sight.summary.endswith(".")
        assert isinstance(sight.default_flags(), dict)  # parses no words at all
