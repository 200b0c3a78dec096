# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Subjects beside each other: who is left out, and which pictures all are looked at with."""

from pathlib import Path

import pytest

from qbheat_det.core.errors import UserError
from qbheat_det.engine.seeing.refusal import NothingToSee
from qbheat_det.engine.seeing.same_pictures import SamePictures, find_sizes
from qbheat_det.engine.seeing.side_by_side import FaultOfAll, look_at_each, require_kind
from qbheat_det.engine.seeing.subject import Subject

from .encoder_subjects import cut_short, make_pictures, make_subject, pretraining_config


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("weights"), pretraining_config(), "sound")


def test_one_who_is_at_fault_is_left_out_with_a_sentence_that_names_it(
    sound: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.json").write_text("")
    new = Subject.open(tmp_path / "new")
    cut = cut_short(sound, tmp_path)

    def look(subject: Subject) -> int:
        return sum(1 for _ in subject.model.parameters())

    looked = look_at_each([new, cut, sound], look, nothing="nothing")
    assert list(looked.found) == ["sound"]
    assert looked.left_out[0] == "'new' has no checkpoint yet"
    assert looked.left_out[1].startswith("'cut': '")
    assert looked.explain() == [f"Left out: {'; '.join(looked.left_out)}."]
    assert [record.getMessage() for record in caplog.records if "left out" in record.msg] == [
        f"left out: {looked.left_out[1]}"  # what is merely not there is no warning
    ]
    with pytest.raises(UserError, match="nothing: 'new' has no checkpoint yet; 'cut': "):
        look_at_each([new, cut], look, nothing="nothing")
    with pytest.raises(NothingToSee, match="nothing: 'new' has no checkpoint yet"):
        look_at_each([new], look, nothing="nothing")
    assert sum("left out" in record.msg for record in caplog.records) == 1  # errors say it already


def test_a_fault_of_all_ends_the_sight_and_another_kind_is_said(sound: Subject) -> None:
    def look(subject: Subject) -> int:
        raise FaultOfAll("that folder is empty")

    with pytest.raises(FaultOfAll, match=r"^that folder is empty$"):
        look_at_each([sound], look, nothing="nothing")
    with pytest.raises(NothingToSee, match=r"^'sound' \(pre-training\) is no detector$"):
        require_kind(sound, "detector", "is no detector")
    require_kind(sound, "pretraining", "")


def test_pictures_that_cannot_be_read_are_counted_and_named(
    sound: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_pictures(tmp_path, 3)
    pictures = SamePictures([sound], 3, folder)
    assert [Path(name).name for name in pictures.pick(sound)] == ["0.png", "1.png", "2.png"]
    assert pictures.explain() == []
    (folder / "1.png").write_bytes(b"no picture")
    pictures = SamePictures([sound], 3, folder)
    assert [Path(name).name for name in pictures.pick(sound)] == ["0.png", "2.png"]
    assert pictures.pick(sound) == pictures.files
    (sentence,) = pictures.explain()
    assert sentence.startswith("1 of the pictures that were chosen could not be read")
    assert sentence.endswith(": 1.png.")
    assert [record.getMessage() for record in caplog.records].count(sentence) == 1
    for path in folder.iterdir():
        path.write_bytes(b"no picture")
    with pytest.raises(FaultOfAll, match="no image that can be read"):
        SamePictures([sound], 3, folder).pick(sound)
    with pytest.raises(FaultOfAll, match="missing"):
        SamePictures([sound], 3, tmp_path / "missing")


def test_pictures_are_those_of_the_first_who_has_any_and_sizes_of_those_who_tell(
    sound: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pictures(tmp_path, 2)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights")
    other = Subject.open(broken)
    given = sound.load_entries(2, folder)
    monkeypatch.setattr(sound, "load_entries", lambda *asked: given)
    assert len(SamePictures([other, sound], 2, None).pick(other)) == 2
    assert find_sizes([other, sound]) == [64]
