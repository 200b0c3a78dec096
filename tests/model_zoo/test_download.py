# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Downloads: what was cut off goes on, and only the right content takes the name."""

import hashlib
from pathlib import Path

import pytest
from qbheat_det.model_zoo.download import NotFetched, download

from qbheat_det.core.errors import UserError

from .servers import Served
from .zoo_cases import CONTENT

HALF = len(CONTENT) // 2


def _download(served: Served, target: Path, content: bytes = CONTENT) -> None:
    sha256 = hashlib.sha256(content).hexdigest()
    download(f"{served.url}/w", target, sha256=sha256, size=len(content))


def test_a_whole_file_takes_its_name_and_leaves_nothing_else(
    served: Served, tmp_path: Path
) -> None:
    served.files["w"] = CONTENT
    _download(served, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_what_was_cut_off_goes_on_from_there(served: Served, tmp_path: Path) -> None:
    served.files["w"], served.cuts = CONTENT, [HALF]
    _download(served, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert served.bytes_sent == len(CONTENT)
    etag = f'"{hashlib.sha1(CONTENT).hexdigest()}"'
    assert [request[2:] for request in served.requests] == [(None, None), (f"bytes={HALF}-", etag)]


def test_what_an_earlier_call_left_is_gone_on_from(served: Served, tmp_path: Path) -> None:
    served.files["w"], served.cuts = CONTENT, [HALF, 0, 0, 0]
    with pytest.raises(NotFetched, match=f"cut off after {HALF} of {len(CONTENT)} bytes"):
        _download(served, tmp_path / "w")
    assert not (tmp_path / "w").exists()
    _download(served, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert served.bytes_sent == len(CONTENT)


def test_a_file_that_was_changed_in_between_is_begun_anew(served: Served, tmp_path: Path) -> None:
    served.files["w"], served.cuts = b"old" + CONTENT[3:], [HALF, 0, 0, 0]
    with pytest.raises(NotFetched):
        _download(served, tmp_path / "w")
    served.files["w"] = CONTENT
    _download(served, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT


@pytest.mark.parametrize("lack", [{"has_ranges": False}, {"has_validator": False}, {"weak": True}])
def test_without_parts_or_versions_it_is_begun_anew(
    served: Served, tmp_path: Path, lack: dict[str, bool]
) -> None:
    for name, value in lack.items():
        setattr(served, name, value)
    served.files["w"], served.cuts = CONTENT, [HALF]
    _download(served, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert served.bytes_sent == HALF + len(CONTENT)


def test_a_wrong_beginning_is_found_by_the_hash_and_fetched_anew(
    served: Served, tmp_path: Path
) -> None:
    served.files["w"], served.cuts = CONTENT, [HALF, 0, 0, 0]
    with pytest.raises(NotFetched):
        _download(served, tmp_path / "w")
    partial = tmp_path / ".w.partial"
    partial.write_bytes(b"x" * partial.stat().st_size)
    _download(served, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT


def test_a_file_that_was_whole_when_its_process_was_killed_takes_its_name(
    served: Served, tmp_path: Path
) -> None:
    served.files["w"], served.cuts = CONTENT, [HALF, 0, 0, 0]
    with pytest.raises(NotFetched):
        _download(served, tmp_path / "w")
    (tmp_path / ".w.partial").write_bytes(CONTENT)
    sent = served.bytes_sent
    _download(served, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT
    assert served.bytes_sent == sent


@pytest.mark.parametrize("other", [b"short", CONTENT[:-1] + b"x"], ids=["shorter", "as long"])
def test_another_file_is_refused_with_both_hashes_and_not_kept(
    served: Served, tmp_path: Path, other: bytes
) -> None:
    served.files["w"] = other
    found, expected = (hashlib.sha256(content).hexdigest()[:12] for content in (other, CONTENT))
    with pytest.raises(UserError, match=f"begins with {found}, that of the index with {expected}"):
        _download(served, tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_end_is_not_read_to_its_end(served: Served, tmp_path: Path) -> None:
    served.files["w"] = CONTENT + b"x" * 10_000_000
    with pytest.raises(UserError, match="it is longer than the 21000 bytes"):
        _download(served, tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_asked_for_once(served: Served, tmp_path: Path) -> None:
    with pytest.raises(NotFetched, match="/w: 404"):
        _download(served, tmp_path / "w")
    assert len(served.requests) == 1


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFetched, match=r"http://127\.0\.0\.1:9/w"):
        _download(Served(url="http://127.0.0.1:9"), tmp_path / "w")
