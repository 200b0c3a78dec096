# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Folders of images: what counts, in which order, and the sentence where there is nothing."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    check_image_folder,
    list_images,
    load_image_folders,
    register_image_folders,
)
from qbheat_det.data.datasets import image_folder

NAME = "images_of_a_test"


@pytest.fixture(autouse=True)
def _registered_nothing() -> Iterator[None]:
    yield
    if NAME in DatasetCatalog:
        DatasetCatalog.remove(NAME)
        MetadataCatalog.remove(NAME)


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def listed(folder: Path) -> list[str]:
    return [os.path.relpath(path, folder) for path in list_images(folder)]


def test_files_come_before_the_folders_beside_them_all_by_name(tmp_path: Path) -> None:
    names = ["a.png", "z.jpg", "B/1.jpg", "B/c/0.jpg", "a/2.jpg", "a/x/9.jpg", "b/0.jpg"]
    assert listed(fill(tmp_path, *reversed(names))) == names


def test_the_order_is_not_that_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{i:02d}.jpg" for i in range(20)]
    fill(tmp_path, *names)
    real = os.scandir

    class Backwards:
        def __init__(self, path: str) -> None:
            self._entries = sorted(real(path), key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> "Iterator[os.DirEntry[str]]":
            return iter(self._entries)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(image_folder.os, "scandir", Backwards)
    assert listed(tmp_path) == names


def test_endings_count_in_large_and_small_letters_and_nothing_else_does(tmp_path: Path) -> None:
    good = ["a.JPEG", "b.jpg", "c.Png", "d.bmp", "e.webp", "f.tif", "g.TIFF"]
    fill(tmp_path, *good, "h.txt", "i.jpg.part", "jpg", "k.npy", "l", "m.gif")
    assert listed(tmp_path) == good


def test_what_is_hidden_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg", "._a.jpg", ".jpg", ".ipynb_checkpoints/b.jpg", "x/.c.jpg", "x/d.jpg")
    assert listed(tmp_path) == ["a.jpg", "x/d.jpg"]


def test_a_folder_that_is_named_like_an_image_is_a_folder(tmp_path: Path) -> None:
    assert listed(fill(tmp_path, "a.jpg/b.jpg")) == ["a.jpg/b.jpg"]


def test_what_is_neither_file_nor_folder_is_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "a.jpg")
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    os.mkfifo("b.jpg")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("c.jpg")
        assert listed(tmp_path) == ["a.jpg"]


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    store = fill(tmp_path / "store", "blob", "more/b.jpg")
    root = fill(tmp_path / "root", "a.jpg")
    (root / "linked.jpg").symlink_to(store / "blob")
    (root / "folder").symlink_to(store / "more")
    (root / "gone").symlink_to(tmp_path / "nowhere")
    assert listed(root) == ["a.jpg", "linked.jpg", "folder/b.jpg"]


def test_links_in_circles_end(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "one", "1.jpg"), fill(tmp_path / "two", "2.jpg")
    (one / "self").symlink_to(one)
    (one / "up").symlink_to(tmp_path)
    (one / "two").symlink_to(two)
    (two / "one").symlink_to(one)
    assert listed(one) == ["1.jpg", "two/2.jpg"]


def test_listing_looks_at_no_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *(f"{c}/{i}.jpg" for c in "ab" for i in range(50)))
    looked: list[object] = []
    real = os.stat

    def stat(path: object, *args: object, **kwargs: object) -> object:
        looked.append(path)
        return real(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", stat)
    assert len(list_images(tmp_path)) == 100
    assert not [path for path in looked if str(path).endswith(".jpg")]


def test_names_that_are_no_utf8_are_listed(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg"))).write_bytes(b"x")
    (path,) = list_images(tmp_path)
    assert Path(path).read_bytes() == b"x"


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (
        lambda root: fill(root, "train/a.jpg", "val/b.jpg") / "trian",
        r"folder '.*trian' does not exist; '.*' holds the folders train, val$",
    ),
    "missing_deep": (lambda root: root / "a" / "b", r"'.*/a/b' does not exist; '.*' holds no fol"),
    "a_file": (lambda root: fill(root, "a.jpg") / "a.jpg", r"a\.jpg' is a file, but must be"),
    "empty": (lambda root: root, "no image in the folder '.*, and no other file that is not hid"),
    "only_hidden": (lambda root: fill(root, ".a.jpg"), "and no other file that is not hidden"),
    "archives": (
        lambda root: fill(root, *(f"{i}.tar" for i in range(3)), "x/labels.TXT", "x/README"),
        r"but 5 other files: 3 with \.tar, 1 with .*, 1 with .* \(looked for .*\.jpeg",
    ),
    "many_kinds": (
        lambda root: fill(root, *(f"a.{c}" for c in "abcdefg")),
        r"but 7 other files: .* and 2 more",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("check", [list_images, check_image_folder])
def test_a_folder_without_images_says_what_is_there(
    case: str, check: Callable[[Path], object], tmp_path: Path
) -> None:
    make, expected = BAD[case]
    with pytest.raises(UserError, match=expected):
        check(make(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "a/b.jpg")
    (tmp_path / "a").chmod(0)
    with pytest.raises(UserError, match="a' cannot be read"):
        list_images(tmp_path)
    (tmp_path / "a").chmod(0o755)


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(image_folder.os, "scandir", refuse)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        list_images(tmp_path)


def test_a_check_ends_at_the_first_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a/1.jpg", "b/2.jpg", "c/3.jpg")
    visited: list[str] = []
    real = os.scandir
    monkeypatch.setattr(
        image_folder.os,
        "scandir",
        lambda path: visited.append(os.path.basename(path)) or real(path),
    )
    check_image_folder(tmp_path)
    assert visited == [tmp_path.name, "a"]


def test_records_of_several_folders_are_numbered_through(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "one", "b.jpg"), fill(tmp_path / "two", "x/a.jpg", "c.png")
    records, class_names = load_image_folders([two, one])
    assert records == [
        {"file_name": str(path), "image_id": i}
        for i, path in enumerate([two / "c.png", two / "x" / "a.jpg", one / "b.jpg"])
    ]
    assert class_names == []


@pytest.mark.parametrize("slash", ["", "/"])
def test_class_folders_are_labels_in_the_order_of_their_names(tmp_path: Path, slash: str) -> None:
    one = fill(tmp_path / "one", "dog/1.jpg", "cat/2.jpg", "cat/more/3.jpg")
    two = fill(tmp_path / "two", "eel/4.jpg", "cat/5.jpg")
    records, class_names = load_image_folders([f"{one}{slash}", f"{two}{slash}"], labelled=True)
    assert class_names == ["cat", "dog", "eel"]
    found = [(Path(record["file_name"]).stem, record["label"]) for record in records]
    assert found == [("2", 0), ("3", 0), ("1", 1), ("5", 0), ("4", 2)]


def test_a_labelled_image_in_no_class_folder_is_named(tmp_path: Path) -> None:
    fill(tmp_path, "cat/1.jpg", "stray.jpg")
    with pytest.raises(UserError, match=r"stray\.jpg' lies in no class folder"):
        load_image_folders([tmp_path], labelled=True)


def test_a_registered_set_is_listed_when_it_is_loaded(tmp_path: Path) -> None:
    register_image_folders(NAME, [tmp_path], labelled=True)
    metadata = MetadataCatalog.get(NAME)
    assert metadata.unlabelled
    fill(tmp_path, "b/1.jpg", "a/2.jpg")
    assert [record["label"] for record in DatasetCatalog.get(NAME)] == [0, 1]
    assert metadata.folder_classes == ["a", "b"]


def test_a_name_is_registered_again_only_for_the_same_folders(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg")
    register_image_folders(NAME, [tmp_path])
    register_image_folders(NAME, [f"{tmp_path}/"])
    with pytest.raises(UserError, match="already registered"):
        register_image_folders(NAME, [tmp_path, tmp_path])
