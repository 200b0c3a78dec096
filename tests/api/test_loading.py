# Copyright (c) qbheat_det contributors. Apache-2.0.
"""``qbheat_det.load``: names, files, folders and addresses, and the way over Hugging Face."""

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import numpy as np
import PIL.Image
import pytest
import torch
from detectron2.structures import ImageList

import qbheat_det
from qbheat_det import api, model_zoo
from qbheat_det.api import Detector, Encoder
from qbheat_det.config import with_values
from qbheat_det.core.errors import UserError
from tests.checkpoint.tiny_models import replace_hub

NAME, REPO = "retinanet/285M_bccd", "someone/cells"


@pytest.fixture(scope="module")
def cells():
    """The zoo's detector of blood cells."""
    return qbheat_det.load(NAME, device="cpu")


def test_a_zoo_name_is_a_detector_or_an_encoder_and_says_what_it_is(cells, encoder):
    detector = cells
    assert isinstance(detector, Detector)
    assert detector.weights == "qbheat://retinanet/285M_bccd"
    for word in ("SyncRetinaNet", "RBC, WBC, Platelets", "5.2 M", "cpu", detector.weights):
        assert word in repr(detector)
    assert isinstance(encoder, Encoder)
    assert "MobileFormer" in repr(encoder)
    with pytest.raises(UserError, match="is an encoder"):
        encoder.predict("photo.jpg")


def test_weights_of_the_other_kind_are_refused(weights, encoder):
    assert isinstance(api.load_detector(weights, device="cpu"), Detector)
    assert isinstance(api.load_encoder(encoder.weights, device="cpu"), Encoder)
    with pytest.raises(UserError, match="not a detector"):
        api.load_detector(encoder.weights, device="cpu")
    with pytest.raises(UserError, match="is a detector"):
        api.load_encoder(weights, device="cpu")


def test_the_backbone_of_any_model_is_written_as_weights_of_an_encoder(cells, encoder, tmp_path):
    image = np.full((64, 96, 3), 90, np.uint8)
    for number, model in enumerate((cells, encoder)):
        path = tmp_path / f"{number}.safetensors"
        model.export_backbone(path)
        with pytest.raises(UserError, match=str(path)):
            model.export_backbone(path)
        outputs = api.load_encoder(path, device="cpu")(image)
        if model is encoder:
            torch.testing.assert_close(outputs, encoder(image), rtol=0, atol=0)


def test_timms_networks_are_encoders(monkeypatch, tmp_path):
    hub = replace_hub(monkeypatch, tmp_path)
    encoder = qbheat_det.load("timm://resnet18", device="cpu")
    assert isinstance(encoder, Encoder)
    image = torch.randint(256, (3, 64, 96), dtype=torch.uint8)
    outputs = encoder(image)
    assert [*outputs] == ["s2", "s4", "s8", "s16", "s32"]
    ((_, net),) = hub
    mean, std = (torch.tensor(net.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = net.eval().forward_features(((image / 255 - mean) / std)[None])
    torch.testing.assert_close(outputs["s32"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("retinanet/285M_bccc", "retinanet/285M_bccd"),  # suggested
        ("nowhere.safetensors", "nowhere"),
        ("nowhere.onnx", "nowhere"),
        ("timm://resnet18x", "resnet18x"),
        ("qbheat://nothing/here", "nothing/here"),
    ],
)
def test_what_is_not_there_is_named(name, named):
    with pytest.raises(UserError, match=named):
        qbheat_det.load(name)


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu", "meta"])
def test_a_device_that_is_not_there_is_named(device, weights, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=device):
        qbheat_det.load(weights, device=device)


FILES = {}


class Hub(BaseHTTPRequestHandler):
    """Answers what a download asks."""

    def _answer(self, content, **headers):
        self.send_response(200)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        content = FILES.get(self.path.rpartition("/")[2])
        revisions = (f"/{REPO}/resolve/main/", f"/{REPO}/resolve/v1/")
        if content is None or not self.path.startswith(revisions):
            self.send_error(404)
            return
        etag = hashlib.sha256(content).hexdigest()
        self._answer(content, ETag=f'"{etag}"', X_Repo_Commit="1" * 40)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    FILES.clear()
    yield
    server.shutdown()


def test_a_detector_comes_back_from_the_hub(hub, cells):
    FILES["model.safetensors"] = Path(model_zoo.get_checkpoint(cells.weights)).read_bytes()
    for name in (f"hf://{REPO}", f"hf://{REPO}@v1"):
        back = qbheat_det.load(name, device="cpu")
        assert isinstance(back, Detector)
        assert back.class_names == ["RBC", "WBC", "Platelets"]
        torch.testing.assert_close(
            back.model.state_dict(), cells.model.state_dict(), rtol=0, atol=0
        )
    with pytest.raises(UserError, match=f"{REPO}@v2"):
        qbheat_det.load(f"hf://{REPO}@v2", device="cpu")


@pytest.mark.parametrize("address", ["hf://nobody/nothing", "hf://../../etc", "hf://one"])
def test_what_the_hub_does_not_have_is_named(hub, address):
    with pytest.raises(UserError, match=address.removeprefix("hf://")):
        qbheat_det.load(address, device="cpu")


def test_maps_are_the_backbones_and_an_embedding_the_mean_of_the_coarsest(encoder, photos):
    path = photos / "0.png"
    pixels = torch.from_numpy(np.array(PIL.Image.open(path).convert("RGB")))
    mean, std = (torch.tensor(encoder.cfg.MODEL[key]) for key in ("PIXEL_MEAN", "PIXEL_STD"))
    divisor = encoder.model.size_divisibility
    batch = ImageList.from_tensors([((pixels - mean) / std).permute(2, 0, 1)], divisor)
    with torch.no_grad():
        expected = encoder.model(batch.tensor)
    torch.testing.assert_close(encoder(path), expected, rtol=1e-5, atol=1e-5)
    assert {len(output) for output in encoder([path, photos / "2.png"]).values()} == {2}

    images = [torch.rand(3, 64, 96), path]
    for vector, image in zip(encoder.embed(images), images, strict=True):
        maps = [x for x in encoder(image).values() if x.dim() == 4]
        coarsest = min(maps, key=lambda x: x.shape[-1])
        torch.testing.assert_close(vector, coarsest.mean(dim=(2, 3))[0], rtol=0, atol=0)
    with pytest.raises(UserError, match="empty"):
        encoder([])
    with pytest.raises(UserError, match="video"):
        encoder.embed(photos / "v.avi")


def test_an_encoder_of_bgr_gets_the_channels_in_reverse(encoder):
    image = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    rgb, bgr = (
        Encoder(encoder.model, with_values(encoder.cfg, {"INPUT.FORMAT": order}))
        for order in ("RGB", "BGR")
    )
    torch.testing.assert_close(bgr(image), rgb(image[..., ::-1].copy()), rtol=0, atol=0)
