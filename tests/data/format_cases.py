# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes three images with boxes in every format that ``--data`` takes."""

import json
import shutil
from pathlib import Path

from PIL import Image

NAMES = ["cat", "dog"]
BOXES = {  # by image of 40 x 20 pixels: class, x, y, width, height
    "a": [(0, 10, 5, 20, 10), (1, 0, 0, 4, 2)],
    "b": [(1, 20, 10, 20, 10)],
    "c": [],
}
ROWS = [(stem, NAMES[k], *box) for stem, boxes in BOXES.items() for k, *box in boxes]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_image(path, turned=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (20, 40) if turned else (40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    image.save(path, exif=exif)


def write_yolo(root, *, head="", more=""):
    for stem, boxes in {**BOXES, **dict.fromkeys(more, BOXES["a"])}.items():
        write_image(root / "train" / "images" / f"{stem}.jpg", turned=stem == "b")
        lines = [f"{k} {(x + w / 2) / 40} {(y + h / 2) / 20} {w / 40} {h / 20}"
                 for k, x, y, w, h in boxes]  # fmt: skip
        if lines:
            write(root / "train" / "labels" / f"{stem}.txt", "\n".join(lines) + "\n\n")
    return write(root / "data.yaml", head or "train: ../train/images\nnc: 2\nnames: [cat, dog]\n")


def write_voc(root):
    for stem, boxes in BOXES.items():
        write_image(root / "JPEGImages" / f"{stem}.jpg")
        objects = "".join(
            f"<object><name>{NAMES[k]}</name><difficult>{int(w < 5)}</difficult><bndbox>"
            f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax>"
            "</bndbox></object>"
            for k, x, y, w, h in boxes
        )
        size = "<size><width>40</width><height>20</height></size>" if stem != "b" else ""
        text = f"<annotation><filename>../{stem}.jpg</filename>{size}{objects}</annotation>"
        write(root / "Annotations" / f"{stem}.xml", text)
    return root


def write_coco(root):
    annotations = []
    images = []
    for number, (stem, boxes) in enumerate(BOXES.items(), start=1):
        write_image(root / "images" / f"{stem}.jpg")
        images.append({"id": number, "file_name": f"{stem}.jpg", "width": 40, "height": 20})
        for k, *box in boxes:
            entry = {"image_id": number, "category_id": k, "bbox": box, "iscrowd": 0}
            annotations.append({"id": len(annotations) + 1, **entry})
    categories = [{"id": index, "name": name} for index, name in enumerate(NAMES)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write(root / "annotations" / "instances_train.json", json.dumps(content))
    return root


def write_labelimg(root):
    write_voc(root)
    for file in [*root.rglob("*.jpg"), *root.rglob("*.xml")]:
        file.rename(root / file.name)
    (root / "Annotations").rmdir()
    (root / "JPEGImages").rmdir()
    return root


def write_yolo_folders(root):
    write_yolo(root).unlink()
    write(root / "train/labels/classes.txt", "cat\ndog\n")
    return root


def write_images(root):
    for stem in BOXES:
        write_image(root / f"{stem}.jpg")


def write_csv(root):
    write_images(root / "train")
    lines = [f"{stem}.jpg,40,20,{name},{x},{y},{x + w},{y + h}" for stem, name, x, y, w, h in ROWS]
    lines = ["filename,width,height,class,xmin,ymin,xmax,ymax", *lines, "c.jpg,40,20,,,,,"]
    write(root / "train" / "_annotations.csv", "\n".join(lines))
    return root


def write_open_images(root):
    write_images(root / "images")
    lines = ["ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax"]
    for stem, name, x, y, w, h in ROWS:
        lines.append(f"{stem},xclick,{name},1,{x / 40},{(x + w) / 40},{y / 20},{(y + h) / 20}")
    return write(root / "boxes.csv", "\n".join([*lines, "c,,,,,,,"]))


def write_via(root):
    write_images(root)
    entries = {}
    for stem, boxes in BOXES.items():
        regions = []
        for k, x, y, w, h in boxes:
            shape = {"name": "rect", "x": x, "y": y, "width": w, "height": h}
            if k:  # a polygon with the same box
                xs, ys = [x, x + w, x + w / 2], [y, y + h / 2, y + h]
                shape = {"name": "polygon", "all_points_x": xs, "all_points_y": ys}
            named = {"class": {NAMES[k]: True, "other": False}}
            regions.append({"shape_attributes": shape, "region_attributes": named})
        entries[f"{stem}.jpg-1"] = {"filename": f"{stem}.jpg", "size": -1, "regions": regions}
    return write(root / "via.json", json.dumps({"_via_img_metadata": entries}))


def write_label_studio(root):
    write_images(root / "pictures")
    tasks = []
    for number, (stem, boxes) in enumerate(BOXES.items(), start=1):
        result = []
        for k, x, y, w, h in boxes:
            value = {"x": x / 0.4, "y": y / 0.2, "width": w / 0.4, "height": h / 0.2, "rotation": 0}
            size = {"original_width": 40, "original_height": 20}
            if stem == "b":  # turned by a quarter, around the corner that is then the top right one
                turned = {"x": (x + w) / 0.4, "width": h / 0.4, "height": w / 0.2, "rotation": 90}
                value |= turned
            value["rectanglelabels"] = [NAMES[k]]
            result.append({"type": "rectanglelabels", "value": value, **size})
        cancelled = {"was_cancelled": True, "result": []}
        place = ("/data/upload/1/0a1b2c3d-{}.jpg", "/data/local-files/?d=pictures%2F{}.jpg",
                 "s3://bucket/{}.jpg")[number - 1]  # fmt: skip
        found = [{"was_cancelled": False, "result": result}, cancelled]
        tasks.append({"id": number, "data": {"image": place.format(stem)}, "annotations": found})
    skipped = {"id": 9, "data": {"image": "a.jpg"}, "annotations": [cancelled]}
    return write(root / "export.json", json.dumps([*tasks, skipped]))


def write_cvat(root):
    write_images(root / "images")
    text = ""
    for stem, boxes in BOXES.items():
        shapes = "".join(
            f'<box label="{NAMES[k]}" xtl="{x}" ytl="{y}" xbr="{x + w}" ybr="{y + h}"/>'
            if k
            else f'<polygon label="{NAMES[k]}" points="{x},{y};{x + w},{y};{x},{y + h}"/>'
            for k, x, y, w, h in boxes
        )
        text += f'<image name="folder/{stem}.jpg" width="40" height="20">{shapes}</image>'
    return write(root / "annotations.xml", f"<annotations>{text}</annotations>")


def write_hugging_face(root):
    write_images(root / "train")
    lines = []
    for stem, boxes in BOXES.items():
        things = {"bbox": [box for _, *box in boxes], "categories": [NAMES[k] for k, *_ in boxes]}
        lines.append(json.dumps({"file_name": f"{stem}.jpg", "objects": things}))
    write(root / "train" / "metadata.jsonl", "\n".join(lines))
    return root


def write_zip(root):
    write_hugging_face(root / "inside")
    path = shutil.make_archive(str(root / "packed"), "zip", root / "inside")
    shutil.rmtree(root / "inside")
    return Path(path)


MAKERS = (
    write_coco, write_yolo, write_voc, write_labelimg, write_yolo_folders, write_csv,
    write_open_images, write_via, write_label_studio, write_cvat, write_hugging_face, write_zip,
)  # fmt: skip

LAYOUTS = {  # of the parts, for YOLO and for VOC; the last has one part
    "train/images train/labels valid/images valid/labels": 2,
    "images/train labels/train images/val labels/val": 2,
    "images labels": 1,
    "train train test test": 2,
    "train/images train/annotations valid/images valid/annotations": 2,
    "images annotations": 1,
}
