# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Caches of users whose home folder cannot be written."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from qbheat_det.core.caches import use_writable_caches

NOWHERE = "/proc/nowhere"  # not even root can create it
LIBRARIES = {"FVCORE_CACHE", "MPLCONFIGDIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder of temporary files, and no home folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("HOME", NOWHERE)
    return folder


def use(**environ):
    """Returns the variables that are set or changed."""
    found = dict(environ)
    use_writable_caches(found)
    return {key: value for key, value in found.items() if environ.get(key) != value}


def test_a_writable_home_changes_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert use() == {}
    assert not caplog.messages
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_without_a_writable_home_all_caches_are_in_one_temporary_folder(temporary, caplog):
    found = use()
    own = Path(found.pop("QBHEAT_CACHE"))
    assert own.parent == temporary
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert set(found) == LIBRARIES
    assert {Path(folder).parent for folder in found.values()} == {own}
    (message,) = caplog.messages
    assert all(word in message for word in ("QBHEAT_CACHE", str(own), NOWHERE))
    # The next process uses the same folder, and a child process logs nothing.
    assert use()["QBHEAT_CACHE"] == str(own)
    caplog.clear()
    assert use(QBHEAT_CACHE=str(own), **found) == {}
    assert not caplog.messages


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_variables_that_are_set_stay(temporary, tmp_path, caplog):
    own = str(tmp_path / "own")
    found = use(QBHEAT_CACHE=own, MPLCONFIGDIR="/mine")
    assert set(found) == LIBRARIES - {"MPLCONFIGDIR"}
    assert {str(Path(folder).parent) for folder in found.values()} == {own}
    # One that cannot be written stays too: what needs it names it in an error.
    assert "QBHEAT_CACHE" not in use(QBHEAT_CACHE=f"{NOWHERE}/mine")
    assert not caplog.messages
    assert use(XDG_CACHE_HOME=NOWHERE)["QBHEAT_CACHE"].startswith(str(temporary))


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@pytest.mark.parametrize("kind", ["writable by others", "link", "file"])
def test_a_temporary_folder_of_others_is_not_used(kind, temporary, tmp_path):
    taken = temporary / f"qbheat_det_{os.getuid()}"
    if kind == "file":
        taken.write_text("")
    elif kind == "link":
        taken.symlink_to(tmp_path)
    else:
        taken.mkdir()
        taken.chmod(0o777)
    folder = Path(use()["QBHEAT_CACHE"])
    assert folder != taken
    assert folder.parent == temporary
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
