# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Lists the files of a data set's folder, and finds the images and label files among them."""

import os
import re
import unicodedata
import urllib.parse
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from qbheat_det.core.errors import UserError

from .account import LeftOut
from .image_suffixes import is_image, is_unread_image, suffix_of
from .label_kinds import LabelKind, find_kind

# In larger groups of files of one suffix and folder, only a sample is opened.
_MAX_OPENED = 40
_SAMPLE_SIZE = 5
_COMPANION_WORDS = frozenset(
    {
        *("mask", "masks", "segmentationclass", "segmentationobject", "segmentation", "semantic"),
        *("thumb", "thumbs", "thumbnail", "thumbnails", "preview", "previews"),
    }
)
# The cached properties of a ``FileTree``. They are computed again after a folder is added.
_CACHED = (
    "all_images",
    "companions",
    "image_folders",
    "image_set",
    "label_files",
    "_images_by_name",
)
_IGNORED = ("__MACOSX",)  # copies of files' properties in zips of macOS


def walk(
    root: str, known: Collection[str] = (), skipped: list[LeftOut] | None = None
) -> Iterator[str]:
    """Yields the files below a folder, sorted by name, files before subfolders.

    Hidden files and folders are skipped. A link to a folder is followed after all other folders,
    and only if its target has not been walked.

    Args:
        root: the folder, absolute.
        known: folders that have been walked before, and are skipped.
        skipped: a list to which each link or folder that is skipped is added.

    Raises:
        UserError: the root does not exist, or cannot be read.
    """
    if not os.path.exists(root):
        raise UserError(f"the folder '{root}' does not exist")
    if not os.path.isdir(root):
        raise UserError(f"the folder '{root}' is a file")
    if skipped is None:
        skipped = []
    walked = [os.path.realpath(path) for path in (root, *known)]
    folders: list[str] = [root]  # a stack: the last folder is walked next
    links: list[str] = []  # links to folders, walked after all folders
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        if folder in known:
            continue
        if os.path.islink(folder) and folder != root:
            target = os.path.realpath(folder)
            overlaps = any(is_below(target, path) or is_below(path, target) for path in walked)
            if overlaps:
                reason = f"it is a link to '{target}', which is searched already"
                skipped.append(
                    LeftOut(
                        kind="behind a link",
                        where=folder,
                        reason=reason,
                        item="other file",
                        is_fault=False,
                    )
                )
                continue
            walked.append(target)
        try:
            files, subfolders, new_links = _list_folder(folder, skipped)
        except OSError as error:
            if folder == root:
                raise UserError(f"the folder '{root}' cannot be read: {error.strerror}") from error
            reason = f"it cannot be read: {error.strerror}"
            skipped.append(
                LeftOut(kind="in a closed folder", where=folder, reason=reason, item="other file")
            )
            continue
        yield from files
        links += new_links
        folders += reversed(subfolders)


def _list_folder(folder: str, skipped: list[LeftOut]) -> tuple[list[str], list[str], list[str]]:
    """Returns the paths of a folder's files, of its subfolders, and of its links to folders.

    Each list is sorted by name. Hidden entries are left out. Broken links are added to ``skipped``.
    Raises an ``OSError`` if the folder cannot be read.
    """
    files: list[str] = []
    subfolders: list[str] = []
    links: list[str] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or entry.name in _IGNORED:
            continue
        try:
            is_folder = entry.is_dir()
            is_file = entry.is_file()
        except OSError:  # such as a link to itself
            is_folder = False
            is_file = False
        if is_folder and entry.is_symlink():
            links.append(entry.path)
        elif is_folder:
            subfolders.append(entry.path)
        elif is_file:
            files.append(entry.path)
        else:
            reason = "it is a link to nothing, or no regular file"
            skipped.append(
                LeftOut(
                    kind="that cannot be opened",
                    where=entry.path,
                    reason=reason,
                    item="other file",
                )
            )
    return files, subfolders, links


class FileTree:
    """The files of a data set, by type: images, label files of each kind, and other files.

    They are below ``root`` and below folders that are added later. Hidden files are skipped.

    Attributes:
        root: the folder of the data set.
        label_file: the only file that may have labels; None if all may.
        images: paths of the images, sorted by name, files before subfolders.
        unread_images: paths of images in formats that cannot be read.
        other_files: paths of all files that are no images, so also of the label files.
        skipped: links that were not followed, and folders that could not be read.
        preferred: folder whose images are preferred if several images have a name; "" for none.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        label_file: str | Path | None = None,
        kinds: Sequence[LabelKind] = (),
    ) -> None:
        """
        Args:
            root: folder to walk.
            label_file: the only file that may have labels; None for any file below ``root``.
            kinds: the kinds of label files to look for.

        Raises:
            UserError: a folder does not exist, or cannot be read.
        """
        self.root = os.path.abspath(root)
        self._kinds = tuple(kinds)
        self._per_image = {kind.name for kind in kinds if kind.has_one_image}
        self._roots: list[str] = []
        self.label_file: str | None = None
        if label_file:
            self.label_file = os.path.abspath(label_file)
        self.images: list[str] = []
        self.unread_images: list[str] = []
        self.other_files: list[str] = []
        self.skipped: list[LeftOut] = []
        self.preferred = ""
        self.add(self.root)

    @property
    def is_of_one_file(self) -> bool:
        """Whether only one file may have labels."""
        return self.label_file is not None

    def add(self, folder: str | Path) -> None:
        """Walks another folder, if it is not below a folder that was walked before."""
        path = os.path.abspath(folder)
        if any(is_below(path, root) for root in self._roots):
            return
        for name in _CACHED:
            self.__dict__.pop(name, None)
        self._roots.append(path)
        for file in walk(path, self._roots[:-1], self.skipped):
            if is_image(file):
                self.images.append(file)
            elif is_unread_image(file):
                self.unread_images.append(file)
            else:
                self.other_files.append(file)

    def prefer(self, folder: str | Path) -> None:
        """Adds a folder, whose images are preferred if several images have a name."""
        self.add(folder)
        self.preferred = os.path.abspath(folder)

    @property
    def other_roots(self) -> list[str]:
        """The folders that were added after the root."""
        return self._roots[1:]

    def has(self, path: str) -> bool:
        """Returns whether a path is below one of the folders."""
        return any(is_below(os.path.normpath(path), root) for root in self._roots)

    def relative(self, path: str) -> str:
        """Returns a path relative to the root that contains it."""
        for root in self._roots:
            if path.startswith(root + os.sep):
                return path[len(root) + 1 :]
        return os.path.relpath(path, self.root)

    @cached_property
    def all_images(self) -> list[str]:
        """``images``, followed by ``unread_images``, without masks and previews."""
        return [path for path in (*self.images, *self.unread_images) if path not in self.companions]

    @cached_property
    def companions(self) -> frozenset[str]:
        """Images that are masks or previews of other images.

        These are all images in a folder with a name such as "masks", if at least half of them have
        the file name of an image in another folder.
        """
        candidates: dict[str, list[str]] = defaultdict(list)  # by folder
        other_stems: set[str] = set()
        for path in (*self.images, *self.unread_images):
            folder = os.path.dirname(path)
            words = re.split(r"[\W_\d]+", self.relative(folder).lower())
            if _COMPANION_WORDS.intersection(words):
                candidates[folder].append(path)
            else:
                other_stems.add(stem_of(path))
        companions: set[str] = set()
        for paths in candidates.values():
            num_named_alike = sum(stem_of(path) in other_stems for path in paths)
            if 2 * num_named_alike >= len(paths):
                companions.update(paths)
        return frozenset(companions)

    @cached_property
    def image_set(self) -> frozenset[str]:
        """``all_images`` as a set."""
        return frozenset(self.all_images)

    @cached_property
    def image_folders(self) -> frozenset[str]:
        """The folders of ``all_images``."""
        return frozenset(map(os.path.dirname, self.all_images))

    @cached_property
    def _images_by_name(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Maps names to images: first exact names, and then names as ``fold`` returns them.

        Each image has two names, with and without its suffix.
        """
        exact: dict[str, list[str]] = defaultdict(list)
        folded: dict[str, list[str]] = defaultdict(list)
        for path in self.all_images:
            name = os.path.basename(path)
            for key in {name, stem_of(name)}:
                exact[key].append(path)
            for key in {fold(name), fold(stem_of(name))}:
                folded[key].append(path)
        return exact, folded

    def find_images(self, name: str) -> list[str]:
        """Returns the images whose file name, with or without the suffix, is ``name``.

        If there are none, returns images whose names differ in case or Unicode form, or have the
        characters that percent signs in ``name`` stand for. If there are none either, returns
        images whose names differ in the suffix.
        """
        exact, folded = self._images_by_name
        if name in exact:  # the usual case
            return exact[name]
        stem = os.path.splitext(name)[0]
        return (
            folded.get(fold(name))
            or folded.get(fold(urllib.parse.unquote(name)))
            or exact.get(stem)
            or folded.get(fold(stem))
            or []
        )

    @cached_property
    def label_files(self) -> dict[str, list[str]]:
        """Maps each kind of label file, such as "coco", "voc" or "yolo", to the files' paths."""
        files_of_kind: dict[str, list[str]] = defaultdict(list)
        if self.label_file:
            name = self._find_kind_of_only_file(self.label_file)
            if name:
                files_of_kind[name].append(self.label_file)
            if not any(kind.name == name and kind.names_others for kind in self._kinds):
                return files_of_kind
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for path in self.other_files:
            if path != self.label_file:
                groups[os.path.dirname(path), suffix_of(path)].append(path)
        for files in groups.values():
            names = self._find_kinds(files)
            usual = self._find_kind_of_one_image(names)
            for path, name in zip(files, names, strict=True):
                # A file that is named like an image is a damaged label file, if other files of the
                # folder are label files.
                if not name and self.find_images(stem_of(path)):
                    name = usual
                if name:
                    files_of_kind[name].append(path)
        return files_of_kind

    def _find_kinds(self, files: Sequence[str]) -> list[str]:
        """Returns the kind of each file, or "" if it is no label file.

        ``files`` are all files of one suffix in a folder. In a large folder, only some of the files
        that are named like images are opened. If they are of one kind, all of these files are. An
        empty file is a label file without objects, of the same kind as other files in the folder.
        """
        if len(files) > _MAX_OPENED:
            named_like_images = [path for path in files if self.find_images(stem_of(path))]
            sample = named_like_images[:: max(1, len(named_like_images) // _SAMPLE_SIZE)]
            kinds = {find_kind(path, self._kinds) for path in sample} - {"", "empty"}
            if len(kinds) == 1 and kinds <= self._per_image:
                kind_of = dict.fromkeys(named_like_images, kinds.pop())
                return [kind_of.get(path) or find_kind(path, self._kinds) for path in files]
        names = [find_kind(path, self._kinds) for path in files]
        usual = self._find_kind_of_one_image(names)
        return [usual if name == "empty" else name for name in names]

    def _find_kind_of_one_image(self, names: Sequence[str]) -> str:
        """Returns the first of ``names`` whose files have the labels of one image, or ""."""
        return next((name for name in names if name in self._per_image), "")

    def _find_kind_of_only_file(self, path: str) -> str:
        """Returns the kind of the only file that may have labels, or "" if it is no label file.

        If its content matches no kind, and only one kind has its suffix, returns this kind. Reading
        the file then fails with an error that tells what is wrong.
        """
        name = find_kind(path, self._kinds)
        if name not in ("", "empty"):
            return name
        possible = [kind.name for kind in self._kinds if suffix_of(path) in kind.suffixes]
        return possible[0] if len(possible) == 1 else ""

    def list_other_labels(self, kind: str) -> list[str]:
        """Returns the label files that have the labels of one image, and are not of ``kind``."""
        others = self._per_image - {kind}
        return [path for other in sorted(others) for path in self.label_files.get(other, ())]


def stem_of(path: str) -> str:
    """Returns the name of a file without its suffix."""
    return os.path.splitext(os.path.basename(path))[0]


def fold(name: str) -> str:
    """Returns a name in Unicode's form NFC and in lower case, to compare it with other names."""
    return unicodedata.normalize("NFC", name).casefold()


def is_below(path: str, folder: str) -> bool:
    """Returns whether a path is a folder or lies below it. Both are absolute."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
