# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The account of a data set: all that goes in is used or named, in random folders."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

import pytest
from PIL import Image

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.data import open_source, read_annotations
from qbheat_det.data.datasets.account import MAX_LEFT_OUT, Account, LeftOut, join_accounts
from qbheat_det.data.datasets.formats import FORMATS

WIDTH, HEIGHT = 32, 24
NAMES = ["cat", "dog", "Große Ente"]
STEMS = ["a", "b 1", "IMG_0001", "Capture_décran", "100%", "c.d", "x-y", "train_7", "猫", "q#1"]
SUFFIXES = [".jpg", ".png", ".JPG", ".jpeg", ".bmp", ".tif", ".webp", ".jfif"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def write_yolo(root, images, chance):
    where = chance.choice(["beside", "labels", "yaml"])
    for path, boxes in images.items():
        label = path.with_suffix(chance.choice([".txt", ".txt", ".TXT"]))
        if where != "beside":
            label = root / "labels" / label.relative_to(root / "images")
        lines = [
            f"{k} {(x + w / 2) / WIDTH} {(y + h / 2) / HEIGHT} {w / WIDTH} {h / HEIGHT}"
            for k, x, y, w, h in boxes
        ]
        if lines or chance.random() < 0.7:
            write(label, "\n".join(lines))
    if where == "yaml":
        write(root / "data.yaml", f"train: images\nnames: {json.dumps(NAMES)}\n")
    else:
        write(root / "classes.txt", "\n".join(NAMES))


def write_voc(root, images, chance):
    for path, boxes in images.items():
        objects = "".join(
            f"<object><name>{NAMES[k]}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
            f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
            for k, x, y, w, h in boxes
        )
        text = f"<annotation><filename>{escape(path.name)}</filename>{objects}</annotation>"
        label = root / "xmls" / path.with_suffix(".xml").relative_to(root / "images")
        write(label, text)


def write_coco(root, images, chance):
    content = {"images": [], "annotations": []}
    content["categories"] = [{"id": 7 * k, "name": name} for k, name in enumerate(NAMES)]
    for number, (path, boxes) in enumerate(images.items()):
        name = chance.choice([path.name, str(path.relative_to(root)).replace("/", "\\")])
        size = {"width": WIDTH, "height": HEIGHT} if chance.random() < 0.8 else {}
        content["images"].append({"id": number, "file_name": name, **size})
        for k, *box in boxes:
            entry = {"image_id": number, "category_id": 7 * k, "bbox": box}
            content["annotations"].append({"id": len(content["annotations"]), **entry})
    write(root / "annotations" / "instances_default.json", json.dumps(content))


def write_table(root, images, chance):
    mark = chance.choice(",;\t|")
    lines = [mark.join(["filename", "class", "xmin", "ymin", "xmax", "ymax"])]
    for path, boxes in images.items():
        rows = [(NAMES[k], x, y, x + w, y + h) for k, x, y, w, h in boxes] or [("",) * 5]
        lines += [mark.join(map(str, (path.name, *row))) for row in rows]
    encoding = chance.choice(["utf-8", "utf-8-sig", "utf-16"])
    write(root / "boxes.csv", "\r\n".join(lines).encode(encoding))


def write_label_studio(root, images, chance):
    tasks = []
    for number, (path, boxes) in enumerate(images.items()):
        value = [
            {
                "x": 100 * x / WIDTH,
                "y": 100 * y / HEIGHT,
                "width": 100 * w / WIDTH,
                "height": 100 * h / HEIGHT,
                "rectanglelabels": [NAMES[k]],
            }
            for k, x, y, w, h in boxes
        ]
        result = [{"original_width": WIDTH, "original_height": HEIGHT, "value": v} for v in value]
        annotations = [{"result": result}] if chance.random() < 0.9 else []
        data = {"image": "/data/local-files/?d=" + quote(path.name)}
        tasks.append({"id": number, "data": data, "annotations": annotations})
    write(root / "export.json", json.dumps(tasks))


def write_cvat(root, images, chance):
    text = ""
    for path, boxes in images.items():
        shapes = "".join(
            f'<box label="{NAMES[k]}" xtl="{x}" ytl="{y}" xbr="{x + w}" ybr="{y + h}"/>'
            for k, x, y, w, h in boxes
        )
        text += f"<image name={quoteattr(path.name)}>{shapes}</image>"
    write(root / "annotations.xml", f"<annotations>{text}</annotations>")


def write_via(root, images, chance):
    entries = {}
    for path, boxes in images.items():
        regions = [
            {
                "shape_attributes": {"name": "rect", "x": x, "y": y, "width": w, "height": h},
                "region_attributes": {"label": NAMES[k]},
            }
            for k, x, y, w, h in boxes
        ]
        entries[path.name] = {"filename": path.name, "regions": regions}
    write(root / "via.json", json.dumps({"_via_img_metadata": entries}))


def write_labelme(root, images, chance):
    for path, boxes in images.items():
        shapes = [
            {"label": NAMES[k], "points": [[x, y], [x + w, y + h]], "shape_type": "rectangle"}
            for k, x, y, w, h in boxes
        ]
        content = {"version": "5", "shapes": shapes, "imagePath": path.name}
        write(path.with_suffix(".json"), json.dumps(content))


def write_createml(root, images, chance):
    content = []
    for path, boxes in images.items():
        things = [
            {
                "label": NAMES[k],
                "coordinates": {"x": x + w / 2, "y": y + h / 2, "width": w, "height": h},
            }
            for k, x, y, w, h in boxes
        ]
        content.append({"image": path.name, "annotations": things, "verified": True})
    write(root / "labels.json", json.dumps(content))


def write_supervisely(root, images, chance):
    for path, boxes in images.items():
        things = [
            {
                "classTitle": NAMES[k],
                "geometryType": "rectangle",
                "points": {"exterior": [[x, y], [x + w, y + h]]},
            }
            for k, x, y, w, h in boxes
        ]
        content = {"tags": [], "size": {"height": HEIGHT, "width": WIDTH}, "objects": things}
        label = root / "ann" / path.relative_to(root / "images")
        write(label.with_name(f"{label.name}.json"), json.dumps(content))


def write_vott(root, images, chance):
    for path, boxes in images.items():
        regions = [
            {"tags": [NAMES[k]], "boundingBox": {"left": x, "top": y, "width": w, "height": h}}
            for k, x, y, w, h in boxes
        ]
        content = {"asset": {"name": path.name.replace("%", "%25")}, "regions": regions}
        write(root / f"{len(list(root.glob('*asset.json')))}-asset.json", json.dumps(content))


def write_dota(root, images, chance):
    for path, boxes in images.items():
        lines = [
            f"{x} {y} {x + w} {y} {x + w} {y + h} {x} {y + h} {NAMES[k].replace(' ', '-')} 0"
            for k, x, y, w, h in boxes
        ]
        label = root / "labelTxt" / path.with_suffix(".txt").relative_to(root / "images")
        write(label, "\n".join(["imagesource:x", *lines]))


def write_kitti(root, images, chance):
    for path, boxes in images.items():
        lines = [
            f"{NAMES[k].split()[0].replace('ß', 's')} 0 0 0 {x} {y} {x + w} {y + h} 1 1 1 1 1 1 1"
            for k, x, y, w, h in boxes
        ]
        label = root / "label_2" / path.with_suffix(".txt").relative_to(root / "images")
        write(label, "\n".join(lines))


def write_hugging_face(root, images, chance):
    lines = []
    for path, boxes in images.items():
        things = {"bbox": [box for _, *box in boxes], "categories": [NAMES[k] for k, *_ in boxes]}
        lines.append(json.dumps({"file_name": path.name, "objects": things}))
    write(root / "metadata.jsonl", "\n".join(lines))


WRITERS = {name: globals()[f"write_{name}"] for name in FORMATS}


def make_folder(root, chance, write_labels):
    """Writes images, their labels and faults; returns the number of boxes, or None if unknown."""
    images = {}
    for stem in chance.sample(STEMS, chance.randint(4, len(STEMS))):
        folder = chance.choice(["", "", "cam1", "cam 2"])
        path = root / "images" / folder / f"{stem}{chance.choice(SUFFIXES)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = "JPEG" if path.suffix.lower() == ".jfif" else None
        Image.new("RGB", (WIDTH, HEIGHT), (len(images), 0, 0)).save(path, format=kind)
        images[path] = [
            (chance.randrange(3), chance.randrange(16), chance.randrange(8), 5, 9)
            for _ in range(chance.randrange(4))
        ]
    if not any(images.values()):
        images[next(iter(images))] = [(0, 1, 2, 3, 4)]
    write_labels(root, images, chance)
    paths = list(images)
    for fault in chance.sample(
        ["gone", "cut", "more", "heic", "extra", "hidden", "loop", "far"], 3
    ):
        path = chance.choice(paths)
        if fault == "gone":
            path.unlink(missing_ok=True)
        elif fault == "cut":
            write(path, b"no image")
        elif fault == "more":
            write(path.with_suffix(".gif"), b"GIF89a")
        elif fault == "heic":
            write(root / "images" / "phone.HEIC", b"\0\0\0\x18ftypheic")
        elif fault == "extra":
            Image.new("RGB", (9, 9)).save(root / "images" / "extra.png")
            write(root / "README.md", "some words")
        elif fault == "hidden":
            write(root / ".git" / "config", "x")
            write(root / "images" / ".DS_Store", "x")
        elif fault == "loop":
            (root / "images" / "again").symlink_to(root, target_is_directory=True)
        elif fault == "far":
            images[path] = [(0, 500, 500, 5, 5)]
            write_labels(root, images, chance)


def count_files(root):
    """Counts the visible files below a folder, without following links to folders."""
    return sum(
        not name.startswith(".")
        for folder, below, names in os.walk(root)
        if not below.__setitem__(slice(None), [b for b in below if not b.startswith(".")])
        for name in names
    )


@pytest.mark.parametrize("name", FORMATS)
def test_what_goes_in_is_used_or_named(tmp_path, name):
    chance = random.Random(name)
    num_read = 0
    for number in range(22):
        root = tmp_path / str(number)
        make_folder(root, chance, WRITERS[name])
        try:
            source = open_source(str(root))
            annotations = read_annotations(source.train)
        except UserError:
            continue
        num_read += 1
        account = annotations.account
        assert source.format == name
        counted = [account.count(item) for item in ("image", "label file", "other file")]
        links = sum(one.kind == "behind a link" for one in account.left_out)
        assert sum(counted) - links == count_files(root), (counted, account.render())
        assert account.used["image"] == len(annotations.images)
        assert account.used["box"] == len(annotations.annotations)
        assert min(account.used.values()) >= 0
        listed = len(account.render().splitlines())
        assert listed == len(account.left_out) + len(account.clipped) + len(account.notes)
        for image in annotations.images:
            assert Path(annotations.image_root, image["file_name"]).is_file()
            is_extra = image["file_name"].endswith("extra.png")
            assert is_extra or (image["width"], image["height"]) == (WIDTH, HEIGHT)
        summary = account.summarize()
        kinds = Counter((one.item, one.kind) for one in account.left_out)
        assert all(f" {kind}" in summary for item, kind in kinds if item != "other file")
    assert num_read >= 20


def test_the_summary_counts_and_the_share_of_faults_decides():
    account = Account()
    account.used.update({"image": 448, "box": 3323, "label file": 448})
    account.left_out += [LeftOut("in HEIC format", f"{n}.heic", "convert it") for n in range(2)]
    account.left_out.append(LeftOut("without an image", "a.txt", "no image", "label file"))
    account.left_out.append(LeftOut("of the part 'test'", "t.jpg", "not used", is_fault=False))
    assert account.summarize() == (
        "448 images with 3,323 boxes; left out: 2 images in HEIC format, "
        "1 image of the part 'test', 1 label file without an image"
    )
    account.check(0.1)
    with pytest.raises(UserError, match=r"2 images of 450.*0\.heic.*1\.heic"):
        account.check(0.0)
    account.left_out += [LeftOut("x", f"box {n}", "bad", "box") for n in range(400)]
    with pytest.raises(UserError, match=r"400 boxes of 3,723.*box 4.*and 395 more") as error:
        account.check(0.1)
    listing = Path(str(error.value).split("'")[1])
    assert len(listing.read_text().splitlines()) == 404
    listing.unlink()
    account.check(0.2)
    assert get_cfg().DATASETS.MAX_LEFT_OUT == MAX_LEFT_OUT
    with pytest.raises(UserError, match=f"more than {MAX_LEFT_OUT:.0%}"):
        account.check()
    total = join_accounts([account, account])
    assert total.used == account.used
    numbers = json.loads(json.dumps(account.to_json()))
    assert numbers["images"] == {
        "used": 448,
        "left_out": {"in HEIC format": 2, "of the part 'test'": 1},
    }
