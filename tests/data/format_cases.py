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


def write_label_studio_csv(root):
    tasks = json.loads(write_label_studio(root).read_text())
    (root / "export.json").unlink()
    lines = ["annotation_id,annotator,id,image,label"]
    for task in tasks[:-1]:
        regions = [{**one["value"], **one} for one in task["annotations"][0]["result"]]
        cell = json.dumps(regions).replace('"', '""')
        lines.append(f'1,1,{task["id"]},{task["data"]["image"]},"{cell if regions else "[]"}"')
    return write(root / "export.csv", "\n".join(lines))


def write_labelme(root):
    write_images(root)
    for stem, boxes in BOXES.items():
        shapes = [
            {"label": NAMES[k], "points": [[x + w, y + h], [x, y]], "shape_type": "rectangle"}
            for k, x, y, w, h in boxes
        ]
        content = {"version": "5.0", "shapes": shapes, "imagePath": f"..\\{stem}.jpg"}
        write(root / f"{stem}.json", json.dumps({**content, "imageData": "A" * 50_000}))
    return root


def write_createml(root):
    write_images(root)
    content = []
    for stem, boxes in BOXES.items():
        objects = [
            {
                "label": NAMES[k],
                "coordinates": {"x": x + w / 2, "y": y + h / 2, "width": w, "height": h},
            }
            for k, x, y, w, h in boxes
        ]
        content.append({"image": f"{stem}.jpg", "annotations": objects})
    write(root / "_annotations.createml.json", json.dumps(content))
    return root


def write_supervisely(root):
    classes = [{"title": name, "shape": "rectangle"} for name in NAMES]
    write(root / "meta.json", json.dumps({"classes": classes, "tags": []}))
    for stem, boxes in BOXES.items():
        write_image(root / "ds0" / "img" / f"{stem}.jpg")
        objects = [
            {
                "classTitle": NAMES[k],
                "geometryType": "rectangle",
                "points": {"exterior": [[x, y], [x + w, y + h]], "interior": []},
            }
            for k, x, y, w, h in boxes
        ]
        content = {"description": "", "tags": [], "size": {"height": 20, "width": 40}}
        write(root / "ds0/ann" / f"{stem}.jpg.json", json.dumps({**content, "objects": objects}))
    return root


def write_vott(root):
    write_images(root)
    for stem, boxes in BOXES.items():
        regions = [
            {
                "tags": [NAMES[k]],
                "boundingBox": {"left": x, "top": y, "width": w, "height": h},
            }
            for k, x, y, w, h in boxes
        ]
        content = {"asset": {"name": f"{stem}.jpg"}, "regions": regions}
        write(root / f"0{stem}-asset.json", json.dumps(content))
    return root


def write_dota(root):
    for stem, boxes in BOXES.items():
        write_image(root / "images" / f"{stem}.jpg")
        lines = [
            f"{x} {y} {x + w} {y} {x + w} {y + h} {x} {y + h} {NAMES[k]} 0"
            for k, x, y, w, h in boxes
        ]
        write(root / "labelTxt" / f"{stem}.txt", "\n".join(["imagesource:x", "gsd:1", *lines]))
    return root


def write_kitti(root):
    for stem, boxes in BOXES.items():
        write_image(root / "image_2" / f"{stem}.jpg")
        lines = [
            f"{NAMES[k]} 0.00 0 -1.57 {x} {y} {x + w} {y + h} 1.5 1.6 3.7 -1.0 1.7 23.0 -1.6"
            for k, x, y, w, h in boxes
        ]
        write(root / "label_2" / f"{stem}.txt", "\n".join(lines))
    return root


def write_darknet(root):
    """Writes CVAT's export YOLO 1.1, whose paths have a folder that is not in it."""
    lists = []
    for stem, boxes in BOXES.items():
        write_image(root / "obj_train_data" / f"{stem}.jpg")
        lists.append(f"data/obj_train_data/{stem}.jpg")
        lines = [f"{k} {(x + w / 2) / 40} {(y + h / 2) / 20} {w / 40} {h / 20}"
                 for k, x, y, w, h in boxes]  # fmt: skip
        write(root / "obj_train_data" / f"{stem}.txt", "\n".join(lines))
    write(root / "train.txt", "\n".join(lists))
    write(root / "obj.names", "\n".join(NAMES))
    text = "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n"
    write(root / "obj.data", text)
    return root


def write_table_without_header(root):
    write_images(root / "images")
    lines = [f"images/{stem}.jpg,{x},{y},{x + w},{y + h},{name}" for stem, name, x, y, w, h in ROWS]
    return write(root / "labels.csv", "\n".join([*lines, "images/c.jpg,,,,,"]))


def write_table_of_sizes(root):
    write_images(root)
    lines = ["Bild;Klasse;x;y;width;height"]
    lines += [f"{stem}.jpg;{name};{x};{y};{w};{h}" for stem, name, x, y, w, h in ROWS]
    path = root / "boxes.csv"
    path.write_bytes("\r\n".join([*lines, "c.jpg;;;;;"]).encode("utf-16"))
    return root


def write_table_of_lists(root):
    write_images(root)
    lines = ["image_id,width,height,bbox,label"]
    lines += [f'{stem},40,20,"[{x}, {y}, {w}, {h}]",{name}' for stem, name, x, y, w, h in ROWS]
    write(root / "train.csv", "\n".join([*lines, "c,40,20,,"]))
    return root


def write_via_csv(root):
    project = json.loads(write_via(root).read_text())["_via_img_metadata"]
    (root / "via.json").unlink()
    names = ("filename", "file_size", "region_shape_attributes", "region_attributes")
    lines = [",".join(names)]
    for entry in project.values():
        rows = entry["regions"] or [{"shape_attributes": {}, "region_attributes": {}}]
        for row in rows:
            cells = (json.dumps(row[key]).replace('"', '""') for key in row)
            lines.append(f"{entry['filename']},-1," + ",".join(f'"{cell}"' for cell in cells))
    return write(root / "via.csv", "\n".join(lines))


def write_cvat_project(root):
    """Writes CVAT's export of a project, whose subsets have images of the same names."""
    write_cvat(root)
    text = (root / "annotations.xml").read_text().replace("folder/", "")
    train = text.replace("<image ", '<image subset="Train" ')
    other = train.replace('"Train"', '"Other"').replace('xtl="10"', 'xtl="11"')
    body = train.replace("</annotations>", "") + other.replace("<annotations>", "")
    write(root / "annotations.xml", body)
    for stem in BOXES:
        write_image(root / "images" / "Other" / f"{stem}.jpg")
        (root / "images" / "Train").mkdir(exist_ok=True)
        (root / "images" / f"{stem}.jpg").rename(root / "images" / "Train" / f"{stem}.jpg")
    return root


MAKERS = (
    write_coco, write_yolo, write_voc, write_labelimg, write_yolo_folders, write_csv,
    write_open_images, write_via, write_label_studio, write_cvat, write_hugging_face, write_zip,
    write_label_studio_csv, write_labelme, write_createml, write_supervisely, write_vott,
    write_dota, write_kitti, write_darknet, write_table_without_header, write_table_of_sizes,
    write_table_of_lists, write_via_csv,
)  # fmt: skip

LAYOUTS = {  # of the parts, for YOLO and for VOC; the last has one part
    "train/images train/labels valid/images valid/labels": 2,
    "images/train labels/train images/val labels/val": 2,
    "images labels": 1,
    "train train test test": 2,
    "train/images train/annotations valid/images valid/annotations": 2,
    "images annotations": 1,
}
