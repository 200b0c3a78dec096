# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Data folders as people keep them: each is read exactly, or refused by its true name."""

import json
import os
import shutil

import pytest
from detectron2.data import DatasetCatalog
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.data import open_source, read_annotations, register_source
from qbheat_det.data.datasets.registration import forget_source

from .format_cases import write

BOXES = {(20, 30, 40, 50), (90, 20, 50, 60)}  # in every image of 160 x 120 pixels
STEMS = "abcdef"


def write_images(folder, stems=STEMS, suffix=".jpg"):
    folder.mkdir(parents=True, exist_ok=True)
    for stem in stems:
        Image.new("RGB", (160, 120)).save(folder / f"{stem}{suffix}", format="JPEG")


def yolo_text(second=0):
    rows = ((0, (20, 30, 40, 50)), (second, (90, 20, 50, 60)))
    lines = [
        f"{k} {(x + w / 2) / 160} {(y + h / 2) / 120} {w / 160} {h / 120}"
        for k, (x, y, w, h) in rows
    ]
    return "\n".join(lines)


def write_yolo(images, labels, stems=STEMS, second=0):
    write_images(images, stems)
    for stem in stems:
        write(labels / f"{stem}.txt", yolo_text(second))


def voc_text(name, label="cat", head=""):
    objects = "".join(
        f"<object><name>{label}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
        f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
        for x, y, w, h in sorted(BOXES)
    )
    return f"{head}<annotation><filename>{name}</filename>{objects}</annotation>"


def write_voc(images, labels, stems=STEMS):
    write_images(images, stems)
    for stem in stems:
        write(labels / f"{stem}.xml", voc_text(f"{stem}.jpg"))


def coco_content(stems=STEMS, **changes):
    images = [
        {"id": i, "file_name": f"{stem}.jpg", "width": 160, "height": 120}
        for i, stem in enumerate(stems, start=1)
    ]
    annotations = [
        {"image_id": image["id"], "category_id": 1 + k, "bbox": [*box], "area": box[2] * box[3]}
        for image in images
        for k, box in enumerate(sorted(BOXES))
    ]
    annotations = [{"id": i, "iscrowd": 0, **one} for i, one in enumerate(annotations, start=1)]
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    return {"images": images, "annotations": annotations, "categories": categories, **changes}


def labelme_content(stem):
    shapes = [
        {"label": "cat", "points": [[x, y], [x + w, y + h]], "shape_type": "rectangle"}
        for x, y, w, h in sorted(BOXES)
    ]
    return {"version": "5.2.1", "shapes": shapes, "imagePath": f"{stem}.jpg", "imageData": None}


def rows(prefix=""):
    return [(f"{prefix}{stem}.jpg", x, y, x + w, y + h) for stem in STEMS for x, y, w, h in BOXES]


def labelimg_voc_in_upper_case(root):
    for part in ("Train", "Test"):
        write_voc(root / part, root / part)


def labelimg_in_a_folder_per_camera(root):
    write_voc(root / "cam1", root / "cam1", "abc")
    write_voc(root / "cam2", root / "cam2", "def")


def kangaroo(root):
    write_voc(root / "images", root / "annots")
    write(root / "README.md", "boxes of kangaroos")


def voc_in_subfolders(root):
    write_voc(root / "JPEGImages", root / "Annotations", "abc")
    write_voc(root / "JPEGImages/cam1", root / "Annotations/cam1", "def")


def voc_below_devkit(root):
    write_voc(root / "VOCdevkit/VOC2007/JPEGImages", root / "VOCdevkit/VOC2007/Annotations")
    write(root / "VOCdevkit/VOC2007/ImageSets/Main/trainval.txt", "\n".join(STEMS))


def voc_in_other_folders_and_an_old_encoding(root):
    write_images(root / "Bilder")
    head = '<?xml version="1.0" encoding="gb2312"?>'
    for stem in STEMS:
        text = voc_text(f"{stem}.jpg", label="猫", head=head)
        (root / "Beschriftung").mkdir(exist_ok=True)
        (root / "Beschriftung" / f"{stem}.xml").write_bytes(text.encode("gb18030"))


def voc_after_a_renaming(root):
    """Each file names its neighbour, which exists: the stem decides."""
    write_images(root)
    for stem, other in zip(STEMS, STEMS[1:] + "z", strict=True):
        write(root / f"{stem}.xml", voc_text(f"{other}.jpg"))


def mmdetection(root):
    for part in ("train", "val"):
        write_images(root / part)
        write(root / "annotations" / f"{part}.json", json.dumps(coco_content()))


def cvat_coco(root):
    write_images(root / "images" / "default")
    write(root / "annotations" / "instances_default.json", json.dumps(coco_content()))


def coco_official(root):
    for part in ("train", "val"):
        write_images(root / f"{part}2017")
        for kind in ("instances", "person_keypoints"):
            path = root / "annotations" / f"{kind}_{part}2017.json"
            write(path, json.dumps(coco_content()))
        captions = [{"id": 1, "image_id": 1, "caption": "a cat"}]
        content = {"images": coco_content()["images"], "annotations": captions}
        write(root / "annotations" / f"captions_{part}2017.json", json.dumps(content))


def coco_with_a_byte_order_mark(root):
    write_images(root / "images")
    text = "\ufeff" + json.dumps(coco_content()).replace("a.jpg", "images\\\\a.jpg")
    write(root / "train.json", text)


def coco_with_an_entry_per_box(root):
    write_images(root / "images")
    content = coco_content()
    content["images"] += [{**image, "id": image["id"] + 10} for image in content["images"]]
    for one in content["annotations"]:
        one["image_id"] += 10 * (one["category_id"] - 1)
    write(root / "train.json", json.dumps(content))


def coco_with_corners(root):
    write_images(root / "images")
    content = coco_content()
    for one in content["annotations"]:
        x, y, width, height = one["bbox"]
        one["bbox"] = [x, y, x + width, y + height]
    write(root / "train.json", json.dumps(content))


def coco_with_an_empty_part(root):
    write_images(root / "train")
    write(root / "train/_annotations.coco.json", json.dumps(coco_content()))
    empty = coco_content(images=[], annotations=[])
    write(root / "valid/_annotations.coco.json", json.dumps(empty))


def coco_of_pandas(root):
    """Whole numbers are written as floats."""
    write_images(root / "images")
    content = coco_content()
    for one in (*content["images"], *content["categories"]):
        one["id"] = float(one["id"])
    for one in content["annotations"]:
        one |= {key: float(one[key]) for key in ("image_id", "category_id")}
    write(root / "train.json", json.dumps(content))


def labelimg_yolo(root):
    write_yolo(root, root)
    write(root / "classes.txt", "\ufeffcat\r\ndog")


def roboflow_darknet(root):
    for part in ("train", "valid", "test"):
        write_yolo(root / part, root / part)
        write(root / part / "_darknet.labels", "cat\n")
    write(root / "README.roboflow.txt", "exported")


def cvat_yolo(root):
    write_yolo(root / "obj_train_data", root / "obj_train_data")
    write(root / "obj.names", "cat\ndog\n")
    lists = "\n".join(f"data/obj_train_data/{stem}.jpg" for stem in STEMS)
    write(root / "train.txt", lists)
    text = "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n"
    write(root / "obj.data", text)


def cvat_voc_of_two_subsets(root):
    write_voc(root / "JPEGImages", root / "Annotations", [*"abc", "uvw"])
    write(root / "ImageSets/Main/Train.txt", "a\nb\nc")
    write(root / "ImageSets/Main/Validation.txt", "uvw")
    write(root / "ImageSets/Main/cat_Train.txt", "a 1\nb -1")


def one_coco_file_of_two_folders(root):
    for part in ("train", "val"):
        write_images(root / "images" / part, "abc")
    names = [f"{part}/{stem}" for part in ("train", "val") for stem in "abc"]
    write(root / "annotations.json", json.dumps(coco_content(names)))


def class_names_above(root):
    write_yolo(root / "photos", root / "photos", second=1)
    write(root / "classes.txt", "cat\ndog")


def cvat_images(root):
    write_images(root / "images")
    boxes = "".join(
        f'<box label="cat" xtl="{x}" ytl="{y}" xbr="{x + w}" ybr="{y + h}"/>'
        for x, y, w, h in BOXES
    )
    images = "".join(f'<image name="{stem}.jpg">{boxes}</image>' for stem in STEMS)
    write(root / "annotations.xml", f"<annotations><version>1.1</version>{images}</annotations>")


def cvat_voc(root):
    write_voc(root / "JPEGImages", root / "Annotations")
    write(root / "ImageSets/Main/default.txt", "\n".join(STEMS))
    write(root / "labelmap.txt", "# label:color_rgb:parts:actions\ncat:128,0,0::\n")


def yolo_parts(root, train="images/train", val="images/val", **names):
    write_yolo(root / train, root / train.replace("images", "labels"), second=1)
    write_yolo(root / val, root / val.replace("images", "labels"), second=1)


def yolo_from_another_machine(root):
    yolo_parts(root)
    text = "train: /content/pets/images/train\nval: /content/pets/images/val\n"
    write(root / "data.yaml", text + "names: [cat, dog]\n")


def yolo_from_windows(root):
    yolo_parts(root)
    text = "path: C:\\Users\\me\\pets\ntrain: images\\train\nval: images\\val\n"
    write(root / "data.yaml", text + "names: [cat, dog]\n")


def yolo_without_its_validation_folder(root):
    write_yolo(root / "images/train", root / "labels/train")
    write(root / "data.yaml", "train: images/train\nval: images/valid\nnames: [cat]\n")


def yolo_of_years(root):
    yolo_parts(root, "images/train2017", "images/val2017")
    write(root / "labels/classes.txt", "cat\ndog")


def yolo_beside_an_older_version(root):
    write_yolo(root / "images", root / "labels")
    write_yolo(root / "old/images", root / "old/labels", second=1)
    write(root / "classes.txt", "cat\ndog")


def yolo_names_that_yaml_changes(root):
    yolo_parts(root)
    write(root / "data.yaml", "train: images/train\nval: images/val\nnames: [no, 0123]\n")


def yolo_with_pictures_of_a_telephone(root):
    write_yolo(root / "images", root / "labels")
    for stem in "de":
        os.rename(root / "images" / f"{stem}.jpg", root / "images" / f"{stem}.heic")
    os.rename(root / "images/f.jpg", root / "images/f.JFIF")
    write(root / "data.yaml", "train: images\nnames: [cat]\n")


def yolo_with_names_in_percent_and_upper_case(root):
    write_yolo(root / "images", root / "labels", [*"abcd", "Capture_décran", "E1"])
    os.rename(root / "labels/Capture_décran.txt", root / "labels/Capture_d%C3%A9cran.txt")
    os.rename(root / "labels/E1.txt", root / "labels/E1.TXT")
    write(root / "data.yaml", "train: images\nnames: [cat]\n")


def training_and_validation(root):
    for part in ("training", "validation"):
        write_yolo(root / part / "images", root / part / "labels")
    write(root / "classes.txt", "cat")


def linked_folders(root):
    write_yolo(root.parent / "elsewhere/images", root.parent / "elsewhere/labels")
    root.mkdir()
    for name in ("images", "labels"):
        (root / name).symlink_to(root.parent / "elsewhere" / name, target_is_directory=True)
    write(root / "data.yaml", "train: images\nnames: [cat]\n")


def repository(root):
    yolo_parts(root / "data/raw")
    text = "train: data/raw/images/train\nval: data/raw/images/val\nnames: [cat, dog]\n"
    write(root / "data/raw/data.yaml", text)
    write(root / "src/train.py", "print()")
    write_images(root / "docs", "x")
    write(root / "results.csv", "epoch,AP\n1,2\n")


def table(root, head, mark, encoding="utf-8", prefix=""):
    write_images(root / "images")
    lines = [mark.join(map(str, row)) for row in rows(prefix)]
    lines = [f"{line}{mark}cat" for line in lines]
    (root / "labels.csv").write_bytes("\n".join([*head, *lines]).encode(encoding))


def table_with_semicolons(root):
    table(root, ["filename;xmin;ymin;xmax;ymax;class"], ";")


def table_in_utf16_with_tabs(root):
    table(root, ["filename\txmin\tymin\txmax\tymax\tclass"], "\t", "utf-16")


def table_without_a_header(root):
    table(root, [], ",", prefix="images/")


def table_of_sku110k(root):
    write_images(root / "images")
    lines = [",".join(map(str, (*row, "cat", 160, 120))) for row in rows()]
    write(root / "annotations_train.csv", "\n".join(lines))


def labelme(root):
    write_images(root)
    for stem in STEMS:
        write(root / f"{stem}.json", json.dumps(labelme_content(stem)))


def labelme_in_another_folder(root):
    write_images(root / "images")
    for stem in STEMS:
        content = {**labelme_content(stem), "imagePath": f"..\\images\\{stem}.jpg"}
        write(root / "labels" / f"{stem}.json", json.dumps(content))


def createml(root):
    write_images(root / "images")
    content = [
        {
            "image": f"{stem}.jpg",
            "annotations": [
                {
                    "label": "cat",
                    "coordinates": {"x": x + w / 2, "y": y + h / 2, "width": w, "height": h},
                }
                for x, y, w, h in BOXES
            ],
        }
        for stem in STEMS
    ]
    write(root / "train.json", json.dumps(content))


def via(root, attributes):
    write_images(root)
    regions = [
        {
            "shape_attributes": {"name": "rect", "x": x, "y": y, "width": w, "height": h},
            "region_attributes": attributes,
        }
        for x, y, w, h in BOXES
    ]
    entries = {stem: {"filename": f"{stem}.jpg", "regions": regions} for stem in STEMS}
    write(root / "via.json", json.dumps(entries))


def via_without_a_class(root):
    via(root, {})


def via_with_a_checkbox(root):
    via(root, {"quality": {"good": True}, "animal": "cat"})


# The number of images of each part, and the classes.
READ = {
    labelimg_voc_in_upper_case: ([6, 6], ["cat"]),
    labelimg_in_a_folder_per_camera: ([6], ["cat"]),
    kangaroo: ([6], ["cat"]),
    voc_in_subfolders: ([6], ["cat"]),
    voc_below_devkit: ([6], ["cat"]),
    voc_in_other_folders_and_an_old_encoding: ([6], ["猫"]),
    voc_after_a_renaming: ([6], ["cat"]),
    mmdetection: ([6, 6], ["cat", "dog"]),
    cvat_coco: ([6], ["cat", "dog"]),
    coco_official: ([6, 6], ["cat", "dog"]),
    coco_with_a_byte_order_mark: ([6], ["cat", "dog"]),
    coco_with_an_entry_per_box: ([6], ["cat", "dog"]),
    coco_with_corners: ([6], ["cat", "dog"]),
    coco_with_an_empty_part: ([6], ["cat", "dog"]),
    coco_of_pandas: ([6], ["cat", "dog"]),
    labelimg_yolo: ([6], ["cat", "dog"]),
    roboflow_darknet: ([6, 6], ["cat"]),
    cvat_yolo: ([6], ["cat", "dog"]),
    cvat_voc_of_two_subsets: ([3, 1], ["cat"]),
    one_coco_file_of_two_folders: ([3, 3], ["cat", "dog"]),
    class_names_above: ([6], ["cat", "dog"]),
    cvat_images: ([6], ["cat"]),
    cvat_voc: ([6], ["cat"]),
    yolo_from_another_machine: ([6, 6], ["cat", "dog"]),
    yolo_from_windows: ([6, 6], ["cat", "dog"]),
    yolo_without_its_validation_folder: ([6], ["cat"]),
    yolo_of_years: ([6, 6], ["cat", "dog"]),
    yolo_beside_an_older_version: ([6], ["cat", "dog"]),
    yolo_names_that_yaml_changes: ([6, 6], ["no", "0123"]),
    yolo_with_pictures_of_a_telephone: ([6], ["cat"]),
    yolo_with_names_in_percent_and_upper_case: ([6], ["cat"]),
    training_and_validation: ([6, 6], ["cat"]),
    linked_folders: ([6], ["cat"]),
    repository: ([6, 6], ["cat", "dog"]),
    table_with_semicolons: ([6], ["cat"]),
    table_in_utf16_with_tabs: ([6], ["cat"]),
    table_without_a_header: ([6], ["cat"]),
    table_of_sku110k: ([6], ["cat"]),
    labelme: ([6], ["cat"]),
    labelme_in_another_folder: ([6], ["cat"]),
    createml: ([6], ["cat"]),
    via_without_a_class: ([6], ["object"]),
    via_with_a_checkbox: ([6], ["cat"]),
}


@pytest.mark.parametrize("make", READ, ids=lambda make: make.__name__)
def test_a_folder_is_read_exactly(tmp_path, make):
    make(root := tmp_path / "set")
    source = open_source(str(root))
    parts = [read_annotations(part) for part in (source.train, source.val) if part]
    sizes, classes = READ[make]
    assert [len(part.images) for part in parts] == sizes
    for part in parts:
        assert list(part.class_names) == classes
        assert not part.account.faults
        for image in part.images:
            found = {
                tuple(round(value, 3) for value in one["bbox"])
                for one in part.annotations
                if one["image_id"] == image["id"]
            }
            assert found == BOXES, image


def coco_results(root):
    write_images(root / "images")
    entries = [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.9}]
    write(root / "train.json", json.dumps(entries))


def tfrecords(root):
    write(root / "train.tfrecord", "x")


def only_masks(root):
    write_images(root / "images")
    write_images(root / "masks")


def parts_without_labels(root):
    write_images(root / "train")
    write_images(root / "val")


def two_data_sets(root):
    for name in ("pets", "wild"):
        yolo_parts(root / name)
        write(root / name / "data.yaml", "train: images/train\nnames: [cat, dog]\n")


def foreign_json_beside_folders(root):
    """What was read as classes "train" and "val" before."""
    parts_without_labels(root)
    content = {"dataset": {}, "items": [], "categories": {}}
    write(root / "annotations/train.json", json.dumps(content))


def table_of_unknown_columns(root):
    write_images(root / "images")
    write(root / "labels.csv", "Bild;von;bis;oben;unten\na.jpg;20;60;30;80\n")


def data_set_in_another(root):
    write_yolo(root / "images", root / "labels")
    write_yolo(root / "more/images", root / "more/labels", "uvwxyz")
    write(root / "classes.txt", "cat")


def two_data_yamls(root):
    write_yolo(root / "images", root / "labels")
    write(root / "few.txt", "images/a.jpg\n")
    write(root / "data.yaml", "train: images\nnames: [cat]\n")
    write(root / "data-few.yaml", "train: few.txt\nnames: [cat]\n")


def via_with_two_attributes(root):
    via(root, {"quality": "good", "animal": "cat"})


REFUSED = {
    coco_results: "results of a detector",
    tfrecords: "TFRecord",
    only_masks: "masks",
    parts_without_labels: "train, val .* no classes",
    two_data_sets: r"--data \S*pets or --data \S*wild",
    foreign_json_beside_folders: "Datumaro",
    data_set_in_another: r"Choose one: --data \S*more. To use the one directly in '\S*set', move",
    two_data_yamls: r"data-few.yaml' and '\S*data.yaml' have different parts",
    via_with_two_attributes: "quality, animal must have the name 'class'",
    table_of_unknown_columns: "Bild, von, bis, oben, unten.*xmin",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_folder_is_refused_by_its_true_name(tmp_path, make):
    make(root := tmp_path / "set")
    with pytest.raises(UserError, match=REFUSED[make]) as error:
        open_source(str(root))
    assert str(root) in str(error.value)


def test_what_was_assumed_is_told(tmp_path):
    for make, told in (
        (yolo_from_windows, r"images\train"),
        (yolo_without_its_validation_folder, "images/valid"),
        (voc_after_a_renaming, "5 label files name another image"),
        (coco_with_corners, "corners"),
        (repository, "data/raw"),
        (via_without_a_class, "object"),
    ):
        make(root := tmp_path / make.__name__)
        notes = read_annotations(open_source(str(root)).train).account.notes
        assert any(told in note for note in notes), notes


def test_class_folders_are_known_by_their_images(tmp_path):
    for name in ("train/cat", "train/dog", "Validation/cat"):
        write_images(tmp_path / "both" / name, "a")
    source = open_source(str(tmp_path / "both"))
    assert source.format == "classes"
    folders = [part.folders[0] for part in (source.train, source.val)]
    assert folders == [str(tmp_path / "both" / name) for name in ("train", "Validation")]
    write_images(tmp_path / "both/bus", "a")  # so that "train" is a vehicle
    assert open_source(str(tmp_path / "both")).val is None
    shutil.move(tmp_path / "both", tmp_path / "above/both")
    (folder,) = open_source(str(tmp_path / "above")).train.folders
    assert folder == str(tmp_path / "above/both")
    write_yolo(tmp_path / "above/both/cat/x", tmp_path / "above/both/cat/x")
    assert open_source(str(tmp_path / "above")).format == "yolo"


def test_images_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for part in ("train", "val"):
        write_images(tmp_path / part / "images", "ab")
        write(tmp_path / part / "labels/a.txt", yolo_text())
    write(tmp_path / "train/labels/b.txt", yolo_text())
    write(tmp_path / "classes.txt", "cat")
    source = open_source(str(tmp_path))
    counts = [len(read_annotations(part).annotations) for part in (source.train, source.val)]
    assert counts == [4, 2]  # the label file b of train does not belong to b of val
    (tmp_path / "train/images/b.jpg").unlink()
    assert len(read_annotations(source.val).annotations) == 2
    (fault,) = read_annotations(source.train).account.faults
    assert (fault.item, fault.where) == ("label file", str(tmp_path / "train/labels/b.txt"))


def test_of_two_images_of_one_name_the_one_that_is_named_has_the_labels(tmp_path):
    write_images(tmp_path, "ab")
    for stem in "ab":
        Image.new("RGB", (160, 120)).save(tmp_path / f"{stem}.png")
    write(tmp_path / "a.xml", voc_text("a.png"))
    write(tmp_path / "b.xml", voc_text("other.gif"))
    account = read_annotations(source := open_source(str(tmp_path)).train).account
    assert [one["file_name"] for one in read_annotations(source).images] == ["a.png", "b.jpg"]
    doubles = [one.where for one in account.left_out]
    assert doubles == [str(tmp_path / "a.jpg"), str(tmp_path / "b.png")]


def test_a_long_name_of_a_folder_does_not_mix_the_parts(tmp_path):
    root = tmp_path / ("long_" * 24)
    yolo_parts(root)
    shutil.rmtree(root / "images/val")
    write_images(root / "images/val", "ab")
    write(root / "data.yaml", "train: images/train\nval: images/val\nnames: [cat, dog]\n")
    source = open_source(str(root))
    sizes = []
    for name, part in (("long train", source.train), ("long val", source.val)):
        register_source(name, part)
    for name in ("long train", "long val"):
        sizes.append(len(DatasetCatalog.get(name)))
        forget_source(name)
    assert sizes == [6, 2]


def test_an_image_that_is_missing_does_not_get_its_namesake(tmp_path):
    write_images(tmp_path / "cam1", "ab")
    lines = [f"cam{n}/{stem}.jpg,1,2,30,40,cat{n}" for n in (1, 2) for stem in "ab"]
    write(tmp_path / "boxes.csv", "\n".join(lines))
    annotations = read_annotations(open_source(str(tmp_path)).train)
    assert [one["category_id"] for one in annotations.annotations] == [0, 0]
    missing = [one.item for one in annotations.account.faults]
    assert missing == ["missing image"] * 2
    yolo = tmp_path / "yolo"
    write_yolo(yolo / "images/train", yolo / "labels/train", "ab")
    write(yolo / "val.txt", "images/val/a.jpg\n")
    write(yolo / "data.yaml", "train: images/train\nval: val.txt\nnames: [cat]\n")
    val = read_annotations(open_source(str(yolo)).val)
    assert not val.images
    assert val.account.faults[0].item == "missing image"


def test_of_two_label_files_of_one_image_one_is_used(tmp_path):
    write_yolo(tmp_path / "images", tmp_path / "labels", "ab")
    write(tmp_path / "labels/b.TXT", "0 .5 .5 .1 .1")
    for folder in ("images", "labels_old", "runs/detect/predict/labels"):
        write(tmp_path / folder / "a.txt", "0 .5 .5 .1 .1")
    write(tmp_path / "runs/detect/predict/labels/c.txt", "0 .5 .5 .1 .1")
    write_images(tmp_path / "images", "c")  # has no objects
    write(tmp_path / "data.yaml", "train: images\nnames: [cat]\n")
    annotations = read_annotations(open_source(str(tmp_path)).train)
    assert len(annotations.images) == 3
    (fault,) = annotations.account.faults
    assert fault.item == "label file"
    assert "has the labels of" in fault.reason
    own = [one["bbox"] for one in annotations.annotations if one["image_id"] == 1]
    sizes = {tuple(map(round, box[2:])) for box in own}
    assert sizes == {(40, 50), (50, 60)}


def test_coco_files_without_sizes_are_completed(tmp_path):
    write_images(tmp_path / "images")
    content = coco_content()
    for image in content["images"]:
        del image["width"], image["height"]
    write(tmp_path / "train.json", json.dumps(content))
    source = open_source(str(tmp_path)).train
    register_source("without sizes", source)
    records = DatasetCatalog.get("without sizes")
    forget_source("without sizes")
    assert {(record["width"], record["height"]) for record in records} == {(160, 120)}


def test_images_of_both_parts_are_not_trained_on(tmp_path):
    write_yolo(tmp_path / "images", tmp_path / "labels")
    write_yolo(tmp_path / "images/val", tmp_path / "labels/val", "xyz")
    head = "train: images\nnames: [cat]\n"
    write(tmp_path / "data.yaml", f"{head}val: images/val\n")
    source = open_source(str(tmp_path))
    account = read_annotations(source.train).account
    assert account == read_annotations(source.val).account == source.account
    assert account.used == {"image": 9, "box": 18, "label file": 10}
    sizes = [len(read_annotations(part).images) for part in (source.train, source.val)]
    assert sizes == [6, 3]
    assert not account.faults
    write(tmp_path / "data.yaml", f"{head}val: images\n")  # as in files for quick checks
    source = open_source(str(tmp_path))
    assert source.val is None
    account = read_annotations(source.train).account
    assert account.used == {"image": 9, "box": 18, "label file": 10}
    assert any("has all images of the part" in note for note in account.notes)


def test_links_to_a_folder_that_is_there_are_named(tmp_path):
    write_voc(tmp_path / "z", tmp_path / "z")
    (tmp_path / "a_link").symlink_to(tmp_path / "z", target_is_directory=True)
    annotations = read_annotations(open_source(str(tmp_path)).train)
    assert len(annotations.images) == 6
    (left_out,) = annotations.account.left_out
    assert left_out.kind == "behind a link"


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_voc(tmp_path, tmp_path)
    (tmp_path / "lost+found").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("found"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    annotations = read_annotations(open_source(str(tmp_path)).train)
    assert len(annotations.images) == 6
    assert [one.kind for one in annotations.account.left_out] == ["in a closed folder"]


def test_many_files_are_recognized_like_few(tmp_path):
    stems = [f"img{number}" for number in range(50)]
    write_yolo(tmp_path, tmp_path, stems)
    write(tmp_path / "classes.txt", "cat")
    write(tmp_path / "readme.txt", "some words")
    annotations = read_annotations(open_source(str(tmp_path)).train)
    assert len(annotations.annotations) == 100
    (left_out,) = annotations.account.left_out
    assert (left_out.item, left_out.is_fault) == ("other file", False)


def test_class_folders_account_for_all_that_is_beside_them(tmp_path):
    for name in ("train/cat", "train/dog", "val/cat", "val/dog", "test/cat"):
        write_images(tmp_path / name, "ab")
    write(tmp_path / "readme.txt", "some words")
    write(tmp_path / "train/cat/phone.heic", "ftypheic")
    source = open_source(str(tmp_path))
    account = source.account
    assert account.used["image"] == 8
    kinds = sorted((one.item, one.kind) for one in account.left_out)
    assert kinds == [
        ("image", "in HEIC format"),
        *[("image", "of the part 'test'")] * 2,
        ("other file", "without labels"),
    ]


def test_labels_of_a_missing_folder_do_not_get_the_images_of_another_part(tmp_path):
    write_voc(tmp_path / "images/val", tmp_path / "xml/val")
    write_voc(tmp_path / "images/train", tmp_path / "xml/train")
    shutil.rmtree(tmp_path / "images/train")
    source = open_source(str(tmp_path))
    train, val = map(read_annotations, (source.train, source.val))
    assert not train.images
    assert len(val.images) == 6
    assert [one.item for one in train.account.faults].count("missing image") == 6


def test_the_folder_of_the_images_chooses_between_copies(tmp_path):
    for folder in ("images", "small"):
        write_images(tmp_path / folder)
    write(tmp_path / "annotations/train.json", json.dumps(coco_content()))
    account = read_annotations(open_source(str(tmp_path)).train).account
    assert len(account.faults) == 6
    assert "choose their folder with --images" in account.faults[0].reason
    train = read_annotations(open_source(str(tmp_path), str(tmp_path / "small")).train)
    assert train.image_root == str(tmp_path / "small")
    assert {image["file_name"] for image in train.images} == {f"{stem}.jpg" for stem in STEMS}
    assert not train.account.faults
