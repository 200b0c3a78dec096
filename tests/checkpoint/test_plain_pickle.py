# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pickles as data: equal to Python's own reading, and no line of a hostile file runs."""

import collections
import os
import pickle
import re
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from qbheat_det.checkpoint import info_of, read_weights
from qbheat_det.checkpoint.plain_pickle import read_plain_pickle
from qbheat_det.core.errors import UserError

CONTENT = {
    "floats": np.linspace(-1, 1, 6, dtype="f4").reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "permuted": np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
    "permuted square": np.arange(27.0).reshape(3, 3, 3).transpose(0, 2, 1),
    "halves": np.float16([1, 2]),
    "empty": np.zeros((0, 3), np.int64),
    "bool": np.array(True),
    "number": np.float32(2.5),
    "nested": collections.OrderedDict(a=[1, -(2**70), 2.5, None], b=("é", b"", b"\x00\xff", False)),
    7: "key",
}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read_as_python_reads_them(tmp_path, protocol):
    shared = np.ones(3)
    content = {**CONTENT, "one": shared, "same": shared}
    path = tmp_path / "w.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    read, expected = read_plain_pickle(str(path)), pickle.loads(path.read_bytes())
    assert read.keys() == expected.keys()
    assert read["one"] is read["same"]
    for name, value in expected.items():
        np.testing.assert_equal(read[name], value, strict=isinstance(value, np.ndarray))
    assert read["columns"].flags["WRITEABLE"]


def test_strings_of_python_2_are_latin_1(tmp_path):
    """The bytes that Python 2 writes for ``{"w": np.float32([1, -2])}`` with protocol 2."""
    path = tmp_path / "w.pkl"
    path.write_bytes(
        b"\x80\x02}q\x01U\x01wq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\n"
        b"q\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x02\x85cnumpy\ndtype\nq\x06U\x02f4K\x00K\x01\x87R"
        b"q\x07(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08"
        + np.float32([1, -2]).tobytes()
        + b"tbs."
    )
    expected = pickle.loads(path.read_bytes(), encoding="latin1")
    np.testing.assert_array_equal(read_plain_pickle(str(path))["w"], expected["w"], strict=True)


class _Calls:
    """Pickled as a call of ``function``."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = (function, arguments, state)

    def __reduce__(self):
        return self.reduced


class _Attributes:
    """Pickled as its class and attributes; reading calls ``__setstate__``."""

    def __setstate__(self, state):
        Path("ran").touch()


def _touch(name="posix\nsystem"):
    return f"c{name}\n(S'touch ran'\ntR.".encode()


def _array(dtype=b"U\x02f4K\x00K\x01\x87R", shape=b"K\x02\x85", data=b"U\x08" + b"\0" * 8):
    """An array of protocol 2, with other bytes for one of its parts."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + shape
        + b"cnumpy\ndtype\n"
        + dtype
        + b"\x89"
        + data
        + b"tb."
    )


def _double(times):
    """A key whose hash takes for ever: a tuple that holds the tuple before it twice, and so on."""
    pairs = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(times))
    return b"\x80\x02()q\x00" + pairs + b"}h%cK\x01sl." % times


_EQUAL_HASHES = [i * (2**61 - 1) for i in range(1, 20_001)]
_EQUAL_KEYS = b"".join(b"\x8a\x0c" + key.to_bytes(12, "little") + b"N" for key in _EQUAL_HASHES)
_EQUAL_MEMO = b"".join(b"p%d\n" % key for key in _EQUAL_HASHES)
_MANY_ARRAYS = (  # a million numbers each, from the same bytes
    b"\x80\x03(B" + struct.pack("<I", 2**20) + bytes(2**20) + b"q\x01"
    b"cnumpy.core.numeric\n_frombuffer\nq\x02cnumpy\ndtype\nU\x02u1\x85Rq\x03"
    + b"h\x02(h\x01h\x03J\x00\x00\x10\x00\x85U\x01CtR" * 5000
    + b"l."
)
HOSTILE = {
    "system in protocol 0": _touch(),
    "system of nt": _touch("nt\nsystem"),
    "subprocess": _touch("subprocess\ngetoutput"),
    "eval": b'c__builtin__\neval\n(S\'open("ran", "w")\'\ntR.',
    "system as STACK_GLOBAL": pickle.dumps({"model": _Calls(os.system, "touch ran")}, 4),
    "system in protocol 5": pickle.dumps({"model": {"a": _Calls(os.system, "touch ran")}}, 5),
    "INST": b"(S'touch ran'\niposix\nsystem\n.",
    "OBJ": b"(cposix\nsystem\nS'touch ran'\no.",
    "NEWOBJ": b"\x80\x02cpathlib\nPath\n)\x81.",
    "NEWOBJ_EX": b"\x80\x04cposix\nsystem\n)}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "PERSID": b"Ptouch ran\n.",
    "BINPERSID": b"U\x03ranQ.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "BUILD of an object": pickle.dumps(_Attributes(), 2),
    "BUILD of a function": b"c_codecs\nencode\n}b.",
    "numpy runs a string": b"cnumpy.testing._private.utils\nrunstring\n(S'import os'\n}tR.",
    "numpy loads": b"cnumpy\nload\n(S'ran'\ntR.",
    "numpy's array, called": b"cnumpy\nndarray\n(J\xff\xff\xff\x7ftR.",
    "builtins.getattr": b"cbuiltins\ngetattr\n(S'a'\nS'b'\ntR.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0fos.path.commonX\x93.",
    "codec that runs code": b"c_codecs\nencode\n(Vtouch ran\nVunicode_escape\ntR.",
    "bytes of a size": b"c__builtin__\nbytes\n(J\xff\xff\xff\x7ftR.",
    "OrderedDict of items": b"ccollections\nOrderedDict\n((K\x01K\x02ttR.",
    "no function": b"K\x01)R.",
    "unhashable function": b"](K\x01tR.",
    "bad protocol": b"\x80\x7fN.",
    "truncated": pickle.dumps(CONTENT, 4)[:200],
    "no pickle": b"\x7fELF" + bytes(100),
    "text": b"not weights\n" * 50,
    "no value": b"\x80\x02.",
    "value of nothing": b"\x80\x02R.",
    "mark without end": b"\x80\x02(N.",
    "no mark": b"\x80\x02t.",
    "unknown memo": b"\x80\x02h\x07.",
    "memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "string of 2**60": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",
    "bytes of 2**31": b"\x80\x03B\xff\xff\xff\x7fa.",
    "frame of 2**63": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N",
    "digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "list as a key": b"\x80\x02}](K\x01eK\x02s.",
    "nested tuple as a key": b"\x80\x02})" + b"\x85" * 50_000 + b"K\x01s.",
    "doubled tuple as a key": _double(100),
    "keys with the same hash": b"\x80\x02}(" + _EQUAL_KEYS + b"u.",
    "memo with the same hash": b"N" + _EQUAL_MEMO + b".",
    "nested lists": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "array of 10**12": _array(shape=b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85"),
    "array of 2**400": _array(shape=b"\x8a\x33" + b"\0" * 50 + b"\x01\x85"),
    "array of less than nothing": _array(shape=b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86"),
    "array longer than its bytes": _array(shape=b"K\x03\x85"),
    "array of objects": _array(dtype=b"U\x02O8K\x00K\x01\x87R"),
    "array of records": _array(dtype=b"](U\x01aU\x02f4tea\x85R"),
    "array of a datetime": _array(dtype=b"U\x02M8K\x00K\x01\x87R"),
    "array with a list of bytes": _array(data=b"](K\x00K\x00e"),
    "array of no type": _array(dtype=b"N\x86"),
    "big-endian": _array(dtype=b"U\x02f4K\x00K\x01\x87R(K\x03U\x01>NNNNNNtb"),
    "dtype with other state": _array(dtype=b"U\x02f4\x85R}b"),
    "unicode name": b"\x80\x04\x8c\x06p\xc3\xb6six\x8c\x06system\x93.",
    "name with a line end": b"\x80\x04\x8c\x08posix\nab\x8c\x06system\x93.",
    "many arrays from the same bytes": _MANY_ARRAYS,
    "too many values": b"\x80\x02(" + b"N" * 1_100_000 + b"l.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gives_one_sentence_and_runs_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.pkl"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    with pytest.raises(UserError, match=re.escape(str(path))) as caught:
        read_weights(str(path))
    assert time.process_time() - start < 2  # about 0.5 at most
    assert "\n" not in str(caught.value)
    tracemalloc.start()
    with pytest.raises(UserError):
        info_of(str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e8
    assert not Path("ran").exists()


def test_the_hostile_files_would_do_harm(tmp_path, monkeypatch):
    """Python's own reader runs their code, so the test above has something to find."""
    monkeypatch.chdir(tmp_path)
    for name in ("system in protocol 0", "system as STACK_GLOBAL", "INST", "OBJ"):
        pickle.loads(HOSTILE[name])
        assert Path("ran").exists(), name
        Path("ran").unlink()
