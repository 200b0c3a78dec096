# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which classes are annotated in an image, in COCO files and where several data sets are joined."""

import json

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    check_class_map,
    cut_records,
    find_annotated,
    fingerprint_records,
    join_annotations,
    join_class_names,
    open_source,
    read_annotations,
    read_class_map,
    register_source,
)
from qbheat_det.data.checks import find_record_errors
from qbheat_det.data.datasets.annotated import count_annotated, restore_annotated
from qbheat_det.data.datasets.registration import forget_source
from qbheat_det.data.datasets.source import Source
from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

from .pictures import draw, save

NAME = "qbheat_test_of_joining"
SIDE = 40


@pytest.fixture(autouse=True)
def _clean():
    yield
    forget_source(NAME)


def write(path, images, boxes, classes):
    """Writes a COCO file and its images.

    Args:
        path: path of the file.
        images: for each image, its content (the seed of a drawing) and other fields of its entry.
        boxes: (number of the image, class id, left edge) of each box.
        classes: class names by id.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, (seed, fields) in enumerate(images, start=1):
        name = f"{path.stem}_{number}.png"
        save(path.parent / name, draw(SIDE, SIDE, seed=seed))
        entries.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE, **fields})
    annotations = [
        {"id": k, "image_id": i, "category_id": c, "bbox": [x, 2, 8, 8], "area": 64, "iscrowd": 0}
        for k, (i, c, x) in enumerate(boxes, start=1)
    ]
    categories = [{"id": id_, "name": name} for id_, name in classes.items()]
    content = {"images": entries, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content))
    return str(path)


def read(path):
    return read_annotations(open_source(path).train)


def join(*members, class_map=None):
    class_map = class_map or {}
    names = join_class_names([one.class_names for one in members], class_map)
    return join_annotations(members, names, class_map)


def list_boxes(annotations):
    """Returns (name of the class, left edge) of the boxes of each image."""
    names = dict(zip(annotations.category_ids, annotations.class_names, strict=True))
    boxes = {image["id"]: [] for image in annotations.images}
    for entry in annotations.annotations:
        boxes[entry["image_id"]].append((names[entry["category_id"]], entry["bbox"][0]))
    return list(boxes.values())


def list_annotated(annotations):
    """Returns the names of the annotated classes of each image."""
    names = dict(zip(annotations.category_ids, annotations.class_names, strict=True))
    annotated = find_annotated(annotations.keep())
    return [
        {names[id_] for id_ in annotated.get(image["id"], names)} for image in annotations.images
    ]


def test_classes_are_joined_by_name_and_each_image_has_those_of_its_set(tmp_path):
    first = read(write(tmp_path / "a.json", [(1, {}), (2, {})], [(1, 7, 3)], {7: "cat", 9: "dog"}))
    second = read(write(tmp_path / "b.json", [(3, {})], [(1, 1, 5)], {1: "owl", 2: "cat"}))
    joined, dropped = join(first, second)
    assert joined.class_names == ("cat", "dog", "owl")
    assert list_boxes(joined) == [[("cat", 3)], [], [("owl", 5)]]
    assert list_annotated(joined) == [{"cat", "dog"}, {"cat", "dog"}, {"cat", "owl"}]
    assert dropped == []
    assert [image["id"] for image in joined.images] == [1, 2, 3]
    assert count_annotated(joined.keep()) == {"cat": 3, "dog": 2, "owl": 1}

    source = Source.join([open_source(p).train for p in (first.origin, second.origin)],
                         joined.class_names, {})  # fmt: skip
    restored = Source.from_json(json.loads(json.dumps(source.to_json())), "run.json")
    assert restored == source
    register_source(NAME, restored)
    records = DatasetCatalog.get(NAME)
    assert [record[ANNOTATED_CLASSES] for record in records] == [[0, 1], [0, 1], [0, 2]]
    assert MetadataCatalog.get(NAME).thing_classes == ["cat", "dog", "owl"]
    assert find_record_errors(NAME, records, num_classes=3) == []
    (error,) = find_record_errors(NAME, records, num_classes=2)[:1]
    assert error.kind == "unknown category"
    plain = [{k: v for k, v in one.items() if k != ANNOTATED_CLASSES} for one in records]
    assert fingerprint_records(plain) != fingerprint_records(records)
    tiles = cut_records(records, 32, is_train=False)
    assert [tile[ANNOTATED_CLASSES] for tile in tiles[:5]] == [[0, 1]] * 5

    names = {"owl": "bird", "dog": "cat"}
    renamed, _ = join(first, second, class_map=names)
    assert renamed.class_names == ("cat", "bird")
    assert list_annotated(renamed) == [{"cat"}, {"cat"}, {"cat", "bird"}]


def test_an_image_in_two_sets_has_the_labels_of_both(tmp_path):
    """For each class, they are those of the first set that has it annotated."""
    boxes = [(1, 1, 3), (1, 2, 9), (2, 1, 4)]
    some = {"annotated_category_ids": [1]}
    first = read(write(tmp_path / "a.json", [(1, some), (2, {})], boxes, {1: "cat", 2: "dog"}))
    boxes = [(1, 1, 10), (1, 2, 20), (1, 2, 9.4), (1, 3, 30)]
    second = read(write(tmp_path / "b.json", [(1, {})], boxes, {1: "cat", 2: "dog", 3: "owl"}))
    assert list_annotated(first) == [{"cat"}, {"cat", "dog"}]
    joined, dropped = join(first, second)
    expected = [("cat", 3), ("dog", 9.4), ("dog", 20), ("owl", 30)]
    assert [sorted(boxes) for boxes in list_boxes(joined)] == [expected, [("cat", 4)]]
    assert list_annotated(joined) == [{"cat", "dog", "owl"}, {"cat", "dog"}]
    # The cat at 10 contradicts the one at 3. The dog at 9 is also at 9.4.
    assert [(account is first.account, left_out.is_fault) for account, left_out in dropped] == [
        (True, False),
        (False, True),
    ]
    assert any("a_1.png" in note for note in joined.account.notes)
    again, _ = join(read(first.origin), read(second.origin))
    assert again.keep() == joined.keep()

    second.images[0]["width"] = 99
    with pytest.raises(UserError, match=r"a_1\.png.*b_1\.png.*99"):
        join(first, second)


def test_keys_of_lvis_name_the_annotated_classes(tmp_path):
    images = [
        (1, {"neg_category_ids": [2], "not_exhaustive_category_ids": []}),
        (2, {"neg_category_ids": [2], "not_exhaustive_category_ids": [1]}),
        (3, {}),  # as with empty lists
    ]
    boxes = [(1, 1, 3), (2, 1, 3), (3, 3, 3)]
    classes = {1: "cat", 2: "dog", 3: "owl"}
    lvis = read(write(tmp_path / "a.json", images, boxes, classes))
    assert list_annotated(lvis) == [{"cat", "dog"}, {"dog"}, {"owl"}]
    lvis.images = lvis.images[2:]  # a part without the keys is still of LVIS
    assert list_annotated(lvis) == [{"owl"}]

    images = [
        (1, {"not_exhaustive_category_ids": [1]}),
        (2, {"annotated_category_ids": []}),
        (3, {}),
    ]
    other = read(write(tmp_path / "b.json", images, boxes, classes))
    assert list_annotated(other) == [{"dog", "owl"}, set(), {"cat", "dog", "owl"}]


def test_files_of_one_folder_keep_their_lists(tmp_path):
    """Their classes get new ids, also in the lists of images."""
    some = {"annotated_category_ids": [8]}
    write(tmp_path / "set" / "a.json", [(1, some)], [(1, 8, 3)], {8: "cat", 9: "dog"})
    lvis = {"neg_category_ids": [1], "not_exhaustive_category_ids": [2]}
    write(tmp_path / "set" / "b.json", [(2, lvis)], [(1, 2, 3)], {1: "dog", 2: "cat"})
    assert list_annotated(read(str(tmp_path / "set"))) == [{"cat"}, {"dog"}]


BAD_KEYS = [
    ({"annotated_category_ids": [1, 5]}, "'annotated_category_ids' has 5"),
    ({"neg_category_ids": "1"}, "'neg_category_ids' must be a list"),
    ({"not_exhaustive_category_ids": [True]}, "'not_exhaustive_category_ids' must be a list"),
    ({"annotated_category_ids": [1], "neg_category_ids": []}, "both 'annotated_category_ids'"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_KEYS)
def test_wrong_lists_are_named_with_their_image(fields, named, tmp_path):
    path = write(tmp_path / "a.json", [(1, {}), (2, fields)], [(1, 1, 3)], {1: "cat"})
    with pytest.raises(UserError, match=rf"a\.json: image id 2: .*{named}"):
        open_source(path)


def test_two_entries_of_an_image_join_their_lists(tmp_path):
    path = tmp_path / "a.json"
    images = [(1, {"annotated_category_ids": [1]}), (1, {"annotated_category_ids": [2]})]
    write(path, images, [(1, 1, 3), (2, 2, 9)], {1: "cat", 2: "dog", 3: "owl"})
    content = json.loads(path.read_text())
    content["images"][1]["file_name"] = content["images"][0]["file_name"]
    for second_id in (2, 1):
        content["images"][1]["id"] = content["annotations"][1]["image_id"] = second_id
        path.write_text(json.dumps(content))
        annotations = read(str(path))
        assert list_annotated(annotations) == [{"cat", "dog"}]
        register_source(NAME, open_source(str(path)).train)
        (record,) = DatasetCatalog.get(NAME)
        assert record[ANNOTATED_CLASSES] == [0, 1]


def test_corrections_do_not_change_which_classes_are_annotated(tmp_path):
    keys = {"neg_category_ids": [2], "not_exhaustive_category_ids": [1]}
    images = [(1, keys), (2, {"neg_category_ids": []})]
    boxes = [(1, 1, 3), (1, 4, 3), (2, 1, 3)]
    classes = {1: "cat", 2: "dog", 3: "owl", 4: "emu"}
    content = read(write(tmp_path / "a.json", images, boxes, classes)).keep()
    annotated = find_annotated(content)
    assert annotated == {1: {2, 4}, 2: {1}}
    for box, new_class in zip(content["annotations"], (2, 3, 4), strict=True):
        box["category_id"] = new_class
    assert find_annotated(content) != annotated
    content["images"] = restore_annotated(content, annotated)
    assert find_annotated(content) == annotated


BAD_MAPS = [
    ("- cat", "must map class names"),
    ("cat: [dog]", "line 1"),
    ("cat: dog\ncat: owl", "'cat' twice"),
    ("cat: {", "cannot be read"),
    ("cat: dog\ndog: owl", "'cat' becomes 'dog', which is renamed too"),
    ("cat: cat", "'cat' becomes 'cat'"),
    ("emu: owl", "no data set has the class 'emu'"),
    ("cat: ''", "'cat' has no new name"),
]


@pytest.mark.parametrize(("text", "named"), BAD_MAPS)
def test_wrong_class_maps_are_named(text, named, tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        check_class_map(read_class_map(path), ["cat", "dog"], "--class-map")


def test_names_in_class_maps_are_texts(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text("on: off\n1: 02\n")
    assert read_class_map(path) == {"on": "off", "1": "02"}
