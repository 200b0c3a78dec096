# Copyright (c) qbheat_det contributors. Apache-2.0.
"""All files of a data set's folder, walked once, and the kinds of label files among them."""

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
# The cached properties of a ``FileTree``, which adding a folder changes.
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

    Hidden names are skipped. Links to folders outside are followed once, after all other folders.

    Args:
        root: the folder, absolute.
        known: folders that are not walked again.
        skipped: a list to which links and folders that are not walked are added.

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
    folders: list[str] = [root]
    links: list[str] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        if folder in known:
            continue
        if os.path.islink(folder) and folder != root:
            target = os.path.realpath(folder)
            if any(is_below(target, path) or is_below(path, target) for path in walked):
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
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            if folder == root:
                raise UserError(f"the folder '{root}' cannot be read: {error.strerror}") from error
            reason = f"it cannot be read: {error.strerror}"
            skipped.append(
                LeftOut(kind="in a closed folder", where=folder, reason=reason, item="other file")
            )
            continue
        subfolders: list[str] = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _IGNORED:
                continue
            try:
                is_folder = entry.is_dir()
                is_file = entry.is_file()
            except OSError:
                is_folder = False
                is_file = False
            if is_folder and entry.is_symlink():
                links.append(entry.path)
            elif is_folder:
                subfolders.append(entry.path)
            elif is_file:
                yield entry.path
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
        folders += reversed(subfolders)


class FileTree:
    """The files below folders. Hidden files and folders are skipped, and links are followed once.

    Attributes:
        root: the first folder. Names in label files are relative to it.
        label_file: the only file that may have labels; None if all may.
        images: paths of images, by folder and name, files before subfolders.
        unread_images: paths of images in formats that are not read.
        others: paths of all other files.
        skipped: links that are not followed.
        preferred: folder whose images are preferred among those of one name; "" for none.
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
        self.others: list[str] = []
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
                self.others.append(file)

    def prefer(self, folder: str | Path) -> None:
        """Walks a folder, and prefers its images among those of one name."""
        self.add(folder)
        self.preferred = os.path.abspath(folder)

    @property
    def other_roots(self) -> list[str]:
        """The folders that have been added."""
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
        """Paths of images in all formats, without ``companions``; those not read are last."""
        return [path for path in (*self.images, *self.unread_images) if path not in self.companions]

    @cached_property
    def companions(self) -> frozenset[str]:
        """Masks and previews of other images.

        These are the images in folders of such names, if at least half of them are named like
        images elsewhere.
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
        """Images by exact names and stems, and by folded ones."""
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
        """Returns the images whose file name is ``name``, with or without a suffix.

        If there are none, names that are equal up to case, Unicode form and percent signs are
        returned, and last, those that differ in the suffix only.
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
        """Maps kinds, such as "coco", "voc" or "yolo", to the label files of that kind."""
        files_of_kind: dict[str, list[str]] = defaultdict(list)
        if self.label_file:
            name = self._find_kind_of_only_file(self.label_file)
            if name:
                files_of_kind[name].append(self.label_file)
            if not any(kind.name == name and kind.names_others for kind in self._kinds):
                return files_of_kind
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for path in self.others:
            if path != self.label_file:
                groups[os.path.dirname(path), suffix_of(path)].append(path)
        for files in groups.values():
            names = self._find_kinds(files)
            usual = self._find_kind_of_one_image(names)
            for path, name in zip(files, names, strict=True):
                # A file beside others, named like an image, has its labels, even if it is damaged.
                if not name and self.find_images(stem_of(path)):
                    name = usual
                if name:
                    files_of_kind[name].append(path)
        return files_of_kind

    def _find_kinds(self, files: Sequence[str]) -> list[str]:
        """Returns the kinds of the files of one suffix in a folder.

        Many files are not all opened: if a sample of those that are named like images has one kind,
        all of these have it. An empty file has the kind of the others, and no objects.
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
        """Returns the first kind whose files have the labels of one image; "" if there is none."""
        return next((name for name in names if name in self._per_image), "")

    def _find_kind_of_only_file(self, path: str) -> str:
        """Returns the kind of the only file that may have labels; "" if it has none.

        If its content matches no kind, but only one kind has its suffix, it is of that kind. Then
        the reader of that kind tells what is wrong.
        """
        name = find_kind(path, self._kinds)
        if name not in ("", "empty"):
            return name
        possible = [kind.name for kind in self._kinds if suffix_of(path) in kind.suffixes]
        return possible[0] if len(possible) == 1 else ""

    def list_other_labels(self, kind: str) -> list[str]:
        """Returns the label files of one image each that are of another kind."""
        others = self._per_image - {kind}
        return [path for other in sorted(others) for path in self.label_files.get(other, ())]


def stem_of(path: str) -> str:
    """Returns the name of a file without its suffix."""
    return os.path.splitext(os.path.basename(path))[0]


def fold(name: str) -> str:
    """Returns a name in one Unicode form and lower case, to compare it with others."""
    return unicodedata.normalize("NFC", name).casefold()


def is_below(path: str, folder: str) -> bool:
    """Returns whether a path is a folder or lies below it. Both are absolute."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
