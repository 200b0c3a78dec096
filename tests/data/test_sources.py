# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What ``--data`` takes: the same boxes in every format, and what is wrong is named."""

import json
import math
import os
import re
import runpy
import shutil
import urllib.parse
import zipfile
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import replace_folders
from qbheat_det.data import (
    Source,
    open_source,
    read_annotations,
    register_source,
)
from qbheat_det.data.datasets.formats import FORMATS
from qbheat_det.data.datasets.registration import forget_source

from .format_cases import (
    BOXES,
    MAKERS,
    NAMES,
    write,
    write_cvat_project,
    write_image,
    write_labelimg,
    write_voc,
    write_yolo,
)

NAME = "a source of a test"


@pytest.fixture(autouse=True)
def _clean():
    yield
    forget_source(NAME)


def read(path, images=""):
    """Returns the annotations of the training part of a path."""
    return read_annotations(open_source(str(path), str(images)).train)


def list_boxes(annotations):
    """Maps the stems of images to (class index, x, y, width, height) of their boxes."""
    order = {id_: index for index, id_ in enumerate(annotations.category_ids)}
    stems = {image["id"]: Path(image["file_name"]).stem for image in annotations.images}
    boxes = {stem: [] for stem in stems.values()}
    for one in annotations.annotations:
        values = (round(value, 6) for value in one["bbox"])
        boxes[stems[one["image_id"]]].append((order[one["category_id"]], *values))
    return boxes


@pytest.mark.parametrize("make", MAKERS)
def test_the_same_boxes_come_from_every_format(tmp_path, make, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    path = make(tmp_path / "set")
    before = sorted((tmp_path / "set").rglob("*"))
    source = open_source(str(path))
    assert source.val is None
    register_source(NAME, source.train)
    records = DatasetCatalog.get(NAME)
    metadata = MetadataCatalog.get(NAME)
    assert metadata.thing_classes == NAMES
    assert source.account.used["image"] == 3
    assert source.account.used["box"] == 3
    assert not source.account.faults
    content = json.loads(json.dumps(source.train.to_json()))
    assert Source.from_json(content, "run.json") == source.train
    found = {
        Path(record["file_name"]).stem: [
            (one["category_id"], *(round(value, 6) for value in one["bbox"]))
            for one in record["annotations"]
        ]
        for record in records
    }
    assert found == BOXES
    assert {(record["width"], record["height"]) for record in records} == {(40, 20)}
    crowds = [one["iscrowd"] for record in records for one in record["annotations"]]
    assert crowds == ([0, 1, 0] if make in (write_voc, write_labelimg) else [0, 0, 0])
    assert all(Path(record["file_name"]).is_file() for record in records)
    register_source(NAME, source.train.without_labels())
    assert [Path(one["file_name"]).stem for one in DatasetCatalog.get(NAME)] == ["a", "b", "c"]
    assert sorted((tmp_path / "set").rglob("*")) == before


def test_every_format_is_made_by_a_test(tmp_path, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    made = {open_source(str(make(tmp_path / make.__name__))).format for make in MAKERS}
    assert made == set(FORMATS)


def test_subsets_of_a_cvat_project_may_have_images_of_the_same_names(tmp_path):
    source = open_source(str(write_cvat_project(tmp_path)))
    annotations = read_annotations(source.train)
    assert list_boxes(annotations) == BOXES
    assert all("images/Train/" in image["file_name"] for image in annotations.images)
    kinds = [one.kind for one in annotations.account.left_out if one.item == "image"]
    assert kinds == ["outside the used parts"] * 3


def test_parts_of_a_csv_have_the_classes_of_both(tmp_path):
    head, box = "image,label,x1,y1,x2,y2\n", "0,0,9,9\n"
    for part, label in (("train", "dog"), ("test", "cat")):
        write_image(tmp_path / "images" / part / "a.jpg")
        write(tmp_path / f"{part}_labels.csv", f"{head}images/{part}/a.jpg,{label},{box}")
    source = open_source(str(tmp_path))
    assert source.val is not None
    for part in (source.train, source.val):
        assert read_annotations(part).class_names == ("cat", "dog")
        assert not read_annotations(part).account.left_out


_LABEL_STUDIO = '[{"id": 5, "data": {"image": "a.jpg"}, "annotations": [{"result": [%s]}]}]'
_CSV = "image,label,x1,y1,x2,y2\n"
BAD_FILES = [
    ("a.csv", f"{_CSV}a.jpg,,,,,", "no boxes"),
    ("a.csv", "image,label,x1,y1\na.jpg,cat,1,2", r"a\.csv.*image, label, x1, y1.*xmin"),
    ("a.csv", "a,b,c\nd,e,f", r"a\.csv.*a, b, c"),
    ("a.json", '{"_via_img_metadata": {"a": {"filename": "a.jpg"}}}', "image 'a'.*regions"),
    ("a.json", "[{}]", r"a\.json"),
    ("a.json", '[{"image": "a.jpg", "label": []}, 1]', "a.json.*task 2"),
    ("a.json", '{"some": "thing"}', r"a\.json"),
    ("a.json", '[{"image_id": 1, "bbox": [1, 2, 3, 4], "score": 1}]', "results"),
    ("a.json", '{"info": {}, "categories": {}, "items": []}', "Datumaro"),
    ("a.xml", "<annotations><track/></annotations>", "video"),
    ("a.xml", "<!DOCTYPE x><annotations/>", "DOCTYPE"),
    ("metadata.jsonl", '{"file_name": "a.jpg", "objects": {"bbox": [[1, 2, 3]]}}', "entry 1"),
    ("a.manifest", '{"source-ref": "s3://a.jpg"}', "SageMaker"),
    ("a.zip", "no archive", "a.zip"),
    ("data.yaml", "train: nowhere\nnames: [a]", "data.yaml.*'nowhere'"),
    ("data.yaml", "train: ./\nnames: [a]\nnc: 2", "data.yaml.*nc is '2'"),
    ("data.yaml", "train: ./\nnames: {1: a}", "data.yaml.*names"),
    ("data.yaml", "train: ./\nnames: ['']", "data.yaml.*class 0"),
    ("data.yaml", "train: ./", "data.yaml.*names"),
    ("data.yaml", "train: [[3]]\nnames: [a]", "data.yaml.*train"),
    ("data.yaml", "names: [a]", "data.yaml.*'train'"),
    ("data.yaml", "!!python/object/apply:os.system [exit]", "data.yaml"),
]


@pytest.mark.parametrize(("name", "content", "named"), BAD_FILES)
def test_a_bad_file_is_named(tmp_path, name, content, named, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    write_image(tmp_path / "a.jpg")
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=named):
        register_source(NAME, open_source(str(path)).train)


BAD_ENTRIES = [
    ("a.csv", f"{_CSV}a.jpg,cat,1,2,x,4\na.jpg,cat,1,2,3,4", "line 2"),
    ("a.csv", f"{_CSV}a.jpg,,1,2,3,4\na.jpg,cat,1,2,3,4", "line 2"),
    ("a.csv", f"{_CSV}a.jpg,cat,3,2,1,4\na.jpg,cat,1,2,3,4", "line 2"),
    ("a.csv", f"{_CSV}b.jpg,cat,1,2,3,4\na.jpg,cat,1,2,3,4", "b.jpg"),
    ("a.json", '{"a": {"filename": "a.jpg", "regions": [{"x": {}}]}}', "region 1.*shape_attr"),
    ("a.json", _LABEL_STUDIO % '{"value": {"x": 1, "y": 1, "width": 1}}', "region 1.*class"),
    ("metadata.jsonl", '{"file_name": "a.jpg", "objects": [{"bbox": [1, 2, 3]}]}', "object 1"),
]


@pytest.mark.parametrize(("name", "content", "named"), BAD_ENTRIES)
def test_a_bad_entry_is_left_out_and_named_by_its_place(tmp_path, name, content, named):
    write_image(tmp_path / "a.jpg")
    account = read(write(tmp_path / name, content)).account
    messages = [one.message for one in account.faults]
    assert any(name in message and re.search(named, message) for message in messages), messages
    with pytest.raises(UserError, match=named):
        account.check()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", _LABEL_STUDIO % '{"value": {"brushlabels": ["x"], "format": "rle"}}'),
        ("a.xml", "<annotations><image name='a.jpg'><points label='x'/></image></annotations>"),
        (
            "a.json",
            '{"a": {"filename": "a.jpg", "regions": [{"shape_attributes": {"name": "point"}}]}}',
        ),
    ],
)
def test_a_shape_that_cannot_have_a_box_is_no_fault(tmp_path, name, content):
    write_image(tmp_path / "a.jpg")
    account = read(write(tmp_path / name, content)).account
    (left_out,) = account.left_out
    assert (left_out.item, left_out.kind, left_out.is_fault) == ("box", "without a box", False)
    account.check(0.0)


def _via(**shape):
    region = {"shape_attributes": shape, "region_attributes": {"kind": "cat"}}
    return json.dumps({"a": {"filename": "a.jpg", "regions": {"0": region}}})


def _task(kind, image="a.jpg", **value):
    size = {"original_width": 40, "original_height": 20}
    return json.dumps([{"image": image, "label": [{kind: ["cat"], **value, **size}]}])  # JSON-MIN


SHAPES = [  # each encloses the box [10, 4, 20, 12] of an image of 40 x 20 pixels
    ("a.json", _via(name="ellipse", cx=20, cy=10, rx=10, ry=6)),
    ("a.json", _task("ellipselabels", x=50, y=50, radiusX=25, radiusY=30)),
    ("a.json", _task("polygonlabels", points=[[25, 50], [75, 20], [60, 80]])),
    ("a.json", _via(name="ellipse", cx=20, cy=10, rx=6, ry=10, theta=math.pi / 2)),
    ("a.json", _via(name="circle", cx=20, cy=10, r=6), (14, 4, 12, 12)),
    ("a.json", _task("ellipselabels", x=50, y=50, radiusX=15, radiusY=50, rotation=90)),
    ("a.xml", '<ellipse label="cat" cx="20" cy="10" rx="10" ry="6"/>'),
    ("a.xml", '<ellipse label="cat" cx="20" cy="10" rx="6" ry="10" rotation="90"/>'),
    ("a.xml", '<ellipse label="cat" cx="20" cy="10" rx="10" ry="6" rotation="180"/>'),
    ("a.xml", '<mask label="cat" rle="1, 2" left="10" top="4" width="20" height="12"/>'),
    ("a.xml", '<box label="cat" xtl="14" ytl="0" xbr="26" ybr="20" rotation="90"/>'),
    ("metadata.csv", 'file_name,objects\na.jpg,"[{""bbox"": [10, 4, 20, 12], ""label"": 1}]"'),
]


@pytest.mark.parametrize("row", SHAPES)
def test_shapes_become_their_enclosing_boxes(tmp_path, row):
    name, content, expected = [*row, (10, 4, 20, 12)][:3]
    write_image(tmp_path / "a.jpg")
    if name == "a.xml":
        content = f'<annotations><image name="a.jpg">{content}<tag/></image></annotations>'
    path = write(tmp_path / name, content)
    (found,) = read(path).annotations
    assert found["bbox"] == pytest.approx(expected)


BAD_OBJECTS = [  # of image b: what replaces what in its label, and the reason
    (write_yolo, "$", "2 .5 .5 .1 .1", "line 3.*class 2"),
    (write_yolo, "$", "0.5 .5 .5 .1 .1", "line 3.*class 0.5"),
    (write_yolo, "$", "0 .5 .5 .1", "line 3.*4 numbers"),
    (write_yolo, "$", "0 20 10 20 10", "line 3.*from 0 to 1"),
    (write_yolo, "$", "0 nan .5 .1 .1", "line 3.*from 0 to 1"),
    (write_yolo, "$", "cat .5 .5 .1 .1", "line 3.*numbers"),
    (write_yolo, "$", "0 .5 .5 -.1 .1", "line 3.*negative"),
    (write_yolo, "$", "0 1.2 .5 .1 .1", "line 3.*outside"),
    (write_yolo, "$", "0 .5 .5 0 .1", "line 3.* 0"),
    (write_voc, "<name>dog</name>", "", "object 1.*class"),
    (write_voc, "<xmin>21</xmin>", "<xmin>x</xmin>", "object 1.*xmin"),
    (write_voc, "<xmax>40</xmax>", "<xmax>9</xmax>", "object 1.*edge"),
    (write_voc, "<annotation>", "", "XML"),
    (write_voc, "<annotation>", "<!DOCTYPE a [<!ENTITY b SYSTEM 'x'>]><annotation>", "DOCTYPE"),
]


@pytest.mark.parametrize(("make", "old", "new", "reason"), BAD_OBJECTS)
def test_a_bad_object_is_left_out_and_named_by_its_file_and_place(tmp_path, make, old, new, reason):
    root = make(tmp_path)
    (file,) = [*tmp_path.rglob("b.txt"), *tmp_path.rglob("b.xml")]
    text = file.read_text()
    file.write_text(text + new if old == "$" else text.replace(old, new))
    annotations = read(root)
    fault, *others = annotations.account.faults
    assert re.search(rf"{file}.*{reason}", fault.message)
    # Without its label file, an image cannot be used.
    assert [one.item for one in others] == ["image"][: fault.item == "label file"]
    kept = list_boxes(annotations)
    assert kept["a"] == BOXES["a"]
    assert kept.get("b", []) == (BOXES["b"] if old == "$" else [])


def test_a_box_beyond_its_image_is_clipped_and_counted(tmp_path):
    root = write_yolo(tmp_path)
    write(tmp_path / "train/labels/b.txt", "1 .9 .5 .4 .5\n")
    annotations = read(root)
    assert list_boxes(annotations)["b"] == [(1, 28, 5, 12, 10)]
    assert annotations.account.clipped == [f"{tmp_path / 'train/labels/b.txt'}, line 1"]
    assert annotations.account.used["box"] == 3


def test_labels_of_yolo_replace_the_last_folder_images_of_a_path(tmp_path):
    assert list_boxes(read(write_yolo(tmp_path / "images" / "set"))) == BOXES


def test_the_last_annotation_of_a_task_that_was_not_cancelled_counts(tmp_path):
    write_image(tmp_path / "a.jpg")
    box = {"x": 25, "y": 20, "width": 50, "height": 60}
    attempts = [
        {"result": [{"value": {"rectanglelabels": [name], **box}}], "was_cancelled": name == "cow"}
        for name in ("cat", "dog", "cow")
    ]
    task = {"data": {"image": "a.jpg"}, "annotations": attempts}
    annotations = read(write(tmp_path / "a.json", json.dumps([task])))
    assert annotations.class_names == ("dog",)
    assert len(annotations.annotations) == 1
    assert any("several" in note for note in annotations.account.notes)
    attempts[0]["ground_truth"] = True
    annotations = read(write(tmp_path / "b.json", json.dumps([task])))
    assert annotations.class_names == ("cat",)


def test_two_uploads_of_one_name_are_not_taken_for_one_image(tmp_path):
    write_image(tmp_path / "a.jpg")
    box = {"x": 25, "y": 20, "width": 50, "height": 60, "rectanglelabels": ["cat"]}
    tasks = [
        {
            "data": {"image": f"/data/upload/1/{mark}-a.jpg"},
            "annotations": [{"result": [{"value": box}]}],
        }
        for mark in ("0a1b2c3d", "4e5f6a7b")
    ]
    file = write(tmp_path / "a.json", json.dumps(tasks))
    with pytest.raises(UserError, match=r"images of .*were not found: .*several uploads"):
        read(file)
    write_image(tmp_path / "b.jpg")
    tasks.append({**tasks[0], "data": {"image": "b.jpg"}})
    annotations = read(write(tmp_path / "a.json", json.dumps(tasks)))
    assert [image["file_name"] for image in annotations.images] == ["b.jpg"]
    assert [one.kind for one in annotations.account.faults] == ["of an ambiguous name"] * 2


def test_absolute_names_need_no_image_folder(tmp_path):
    write_image(image := tmp_path / "elsewhere" / "a.jpg")
    images = [{"id": 1, "file_name": str(image), "width": 40, "height": 20}]
    categories = [{"id": 1, "name": "cat"}]
    content = {"images": images, "annotations": [], "categories": categories}
    annotations = read(write(tmp_path / "labels" / "a.json", json.dumps(content)))
    assert annotations.images[0]["file_name"] == "../elsewhere/a.jpg"
    assert any("outside" in note for note in annotations.account.notes)
    with pytest.raises(UserError, match="no boxes"):
        annotations.check()


def test_a_zip_writes_nothing_beside_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QBHEAT_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../../outside.txt", "x")
        archive.writestr("bomb", b"0" * 10_000_000, zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"a\.zip"):
        open_source(str(tmp_path / "a.zip"))
    assert not list(tmp_path.rglob("outside.txt"))
    assert not list((tmp_path / "cache").rglob("bomb"))


def test_a_data_yaml_names_lists_polygons_keypoints_and_a_part_to_evaluate_on(tmp_path):
    head = "path: /nowhere\ntrain: [train/images]\nval: few.txt\nnames: {0: cat, 1: dog}\n"
    head += "download: import os; os.mkdir('run')\nkpt_shape: [1, 2]\n"
    file = write_yolo(tmp_path, head=head)
    write(tmp_path / "few.txt", "./train/images/b.jpg\ntrain/images/b.jpg\n\n")
    write(tmp_path / "train/labels/b.txt", "1 .5 .5 .5 .5 .1 .2\n")
    source = open_source(str(tmp_path))
    assert source.val
    val = read_annotations(source.val)
    assert [image["file_name"] for image in val.images] == ["train/images/b.jpg"]
    assert [one["bbox"] for one in val.annotations] == [[10, 5, 20, 10]]
    assert len(read_annotations(source.train).images) == 2  # without that of the validation part
    write(file, head.replace("kpt_shape: [1, 2]", ""))
    write(tmp_path / "train/labels/b.txt", "1 .25 .25 .75 .25 .75 .75\n")
    assert read_annotations(source.val).annotations[0]["bbox"] == [10, 5, 20, 10]
    assert not (tmp_path / "run").exists()


def _list_left_out(path):
    """Returns the locations of what is left out of a data set, without quotation marks."""
    return {one.where.strip("'") for one in open_source(str(path)).account.left_out}


def _write_yolo_beside_other_files(root, folder, path):
    """Writes a data.yaml with the field "path" beside files that are not of its data set."""
    head = f"path: {path}\ntrain: train/images\nnames: [cat, dog]\n"
    write_yolo(folder).unlink()
    write_image(folder / "unused" / "e.jpg")
    write_image(root / "docs" / "a.jpg")
    write(root / "docs" / "figure.svg", "<svg/>")
    write(root / "docs" / "z.txt", "0 .5 .5 .5 .5\n")
    return write(root / "data.yaml", head)


@pytest.mark.parametrize("place", ["project/mydata", "datasets/pets"])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_only_the_folder_that_a_data_yaml_names_is_searched(tmp_path, place, is_absolute):
    root = tmp_path / "project"
    path = tmp_path / place if is_absolute else os.path.relpath(tmp_path / place, root)
    file = _write_yolo_beside_other_files(root, tmp_path / place, path)
    source = open_source(str(file))
    assert list_boxes(read_annotations(source.train)) == BOXES
    left_out = _list_left_out(file)
    if place == "project/mydata":
        assert left_out == {str(tmp_path / place / "unused" / "e.jpg")}
    else:  # beside it may be other data sets
        assert left_out == set()
    again = Source.from_json(json.loads(json.dumps(source.train.to_json())), "run.json")
    assert list_boxes(read_annotations(again)) == BOXES


@pytest.mark.parametrize("path", ["", ".", "..", "/nowhere"])
def test_a_data_yaml_without_a_folder_of_its_own_searches_its_folder(tmp_path, path):
    root = tmp_path / "project"
    file = _write_yolo_beside_other_files(root, root, path)
    if path == "..":
        write(file, file.read_text().replace("train/images", "project/train/images"))
    assert list_boxes(read(file)) == BOXES
    assert str(root / "docs" / "figure.svg") in _list_left_out(file)


def test_labels_and_listed_images_outside_of_the_named_folder_are_found(tmp_path):
    """The field "path" may name the images alone, and a list may name images of another folder."""
    head = "path: train/images\ntrain: .\nnames: [cat, dog]\n"
    file = write_yolo(tmp_path / "labels beside images", head=head)
    assert list_boxes(read(file)) == BOXES

    root = tmp_path / "labels elsewhere"
    file = write_yolo(root, head="path: pictures\ntrain: all\nnames: [cat, dog]\n")
    for folder, name in (("images", "pictures"), ("labels", "boxes")):
        (root / name).mkdir()
        (root / "train" / folder).rename(root / name / "all")
    assert list_boxes(read(file)) == BOXES

    root = tmp_path / "listed elsewhere"
    file = write_yolo(root, head="path: lists\ntrain: all.txt\nnames: [cat, dog]\n")
    write(root / "lists" / "all.txt", "".join(f"../train/images/{stem}.jpg\n" for stem in BOXES))
    assert list_boxes(read(file)) == BOXES

    root = tmp_path / "one listed elsewhere, with a copy"
    file = write_yolo(root, head="path: set\ntrain: all.txt\nnames: [cat, dog]\n")
    shutil.copytree(root / "train", root / "set/train")
    write(root / "set/all.txt", "train/images/a.jpg\n../train/images/b.jpg\ntrain/images/c.jpg\n")
    names = [image["file_name"] for image in read(file).images]
    assert names == ["set/train/images/a.jpg", "train/images/b.jpg", "set/train/images/c.jpg"]


@pytest.mark.parametrize("make", [write_yolo, write_voc])
def test_a_folder_of_output_is_counted_as_one(tmp_path, make):
    path = make(tmp_path)
    run = tmp_path / "output" / "mine"
    for name in ("run.json", "config.yaml", "first_stage/log.txt"):
        write(run / name, "[]")
    write_image(run / "figures" / "a picture.jpg")
    replace_folders(tmp_path / "drawn")
    write_image(tmp_path / "drawn" / "drawing.jpg")
    write_image(tmp_path / "others" / "e.jpg")
    left_out = open_source(str(path)).account.left_out
    (of_run,) = [one for one in left_out if one.where == f"'{run}'"]
    assert "(4)" in of_run.message
    assert of_run.item == "other file"
    assert not of_run.is_fault
    where = {one.where.strip("'") for one in left_out}
    assert {str(tmp_path / "drawn"), str(tmp_path / "others/e.jpg")} <= where
    assert not [path for path in where if path.startswith((f"{run}/", f"{tmp_path}/drawn/"))]


def test_a_data_set_in_the_folder_of_its_run_is_used(tmp_path):
    file = write_yolo(tmp_path / "set", head="path: set\ntrain: train/images\nnames: [cat, dog]\n")
    for name in ("run.json", "config.yaml"):
        write(tmp_path / "set" / name, "[]")
    write_image(tmp_path / "set" / "unused" / "e.jpg")
    for path in (tmp_path / "set", file.rename(tmp_path / "data.yaml"), tmp_path):
        assert list_boxes(read(path)) == BOXES
        assert str(tmp_path / "set/unused/e.jpg") in _list_left_out(path)


def test_images_without_any_label_file_and_broken_ones_are_named(tmp_path):
    source = open_source(str(write_yolo(tmp_path))).train
    write(tmp_path / "train/images/b.jpg", "no image")
    account = read_annotations(source).account
    assert [one.item for one in account.faults] == ["image"]
    with pytest.raises(UserError, match=r"images/b\.jpg"):
        account.check()
    for file in (tmp_path / "train/labels").iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"train/labels/a\.txt"):
        register_source(NAME, source)


def test_edges_of_voc_that_are_counted_from_zero_do_not_leave_the_image(tmp_path):
    write_voc(tmp_path)
    file = tmp_path / "Annotations" / "b.xml"
    write(file, file.read_text().replace("min>21<", "min>0<").replace("min>11<", "min>0<"))
    (box,) = read(tmp_path).annotations[2:]
    assert box["bbox"] == [0, 0, 40, 20]


def test_lists_of_voc_are_parts_with_the_classes_of_all(tmp_path):
    write_voc(tmp_path)
    write(tmp_path / "ImageSets/Main/train.txt", "a\nc\n")
    write(tmp_path / "ImageSets/Main/val.txt", "b -1\n")
    source = open_source(str(tmp_path))
    assert source.val
    train, val = read_annotations(source.train), read_annotations(source.val)
    assert (len(train.images), len(val.images)) == (2, 1)
    assert train.class_names == val.class_names == ("cat", "dog")
    other = read_annotations(source.val.with_classes(["dog", "cat", "cow"]))
    assert other.class_names == ("dog", "cat", "cow")
    write(tmp_path / "ImageSets/Main/val.txt", "b\nz\n")
    with pytest.raises(UserError, match=r"val\.txt, line 2"):
        read_annotations(source.val).account.check()


ADDRESSES = (
    "/data/local-files/?d=photos/set%201/a.jpg",
    "old/set 1/a.jpg",
    "https://host/set%201/a.jpg?key=1",
    "C:\\photos\\set 1\\a.jpg",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_folders_of_an_address_choose_between_images_of_one_name(tmp_path, address):
    for folder in ("set 1", "set 2"):
        write_image(tmp_path / "photos" / folder / "a.jpg")
    task = _task("rectanglelabels", address, x=25, y=25, width=50, height=50)
    file = write(tmp_path / "exports" / "export.json", task)
    content = read(file, tmp_path / "photos")
    assert [image["file_name"] for image in content.images] == ["set 1/a.jpg"]


@pytest.mark.parametrize("name", [b"k\xfche.jpg", b"50%25.jpg", b"a+b&c.jpg"])
def test_quoted_names_of_local_files_are_found(tmp_path, name):
    write_image(tmp_path / os.fsdecode(name))
    address = "/data/local-files/?d=" + urllib.parse.quote(name)
    task = _task("rectanglelabels", address, x=25, y=25, width=50, height=50)
    content = read(write(tmp_path / "export.json", task))
    assert [os.fsencode(image["file_name"]) for image in content.images] == [name]


def test_the_documentation_lists_the_formats():
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "train.md").read_text("utf-8")
    script = runpy.run_path(str(root / "docs" / "write_formats_table.py"))
    assert text == script["update"](text), "run: python -m docs.write_formats_table"
