# Copyright (c) qbheat_det contributors. Apache-2.0.
"""LazyConfigs: each is what its YAML twin is, and Detectron2's own loop trains them."""

import math
import re
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.config import LazyCall as L
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import SimpleTrainer, hooks
from detectron2.modeling import build_model
from detectron2.structures import Instances
from omegaconf import DictConfig
from torch import nn

from qbheat_det.config import load_config
from qbheat_det.data import register_coco_json
from qbheat_det.data.datasets.sources import register_coco_images
from qbheat_det.engine.setup import use_classes_of
from qbheat_det.modeling.backbone import arch_of_rows
from qbheat_det.solver import build_lr_scheduler, build_optimizer, resolve_schedule

from .engine.gradient_cases import BLOCKS
from .engine.tiny_training import make_data
from .modeling.tiny_pretraining import make_inputs

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LAZY = sorted((CONFIGS / "lazy").rglob("*.py"))
TOYS = [path for path in LAZY if path.parent.name == "quick_schedules"]

# Of the toy recipes, those that are run, one of each family.
RUN = [path for path in TOYS if path.name.startswith(("retinanet", "qb_heat"))]
_ARCH = {"num_tokens": 2, "token_dim": 16, "stem": 8, "blocks": BLOCKS, "expanded": 32}
# What makes each model small: keys of the LazyConfig, and the same keys of the YAML config.
_SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "retinanet": (
        {
            "backbone.out_channels": 32,
            "head.conv_dims": [32],
            "test_score_thresh": 0.0,
            "max_detections_per_image": 5,
        },
        {"FPN.OUT_CHANNELS": 32, "RETINANET.NUM_CONVS": 1, "RETINANET.SCORE_THRESH_TEST": 0.0},
    ),
    "qb_heat": (
        {"predictor.dim": 16, "decoder.dim": 16, "decoder.grid_size": 4, "decoder.depth": 1},
        {"QB_HEAT.FEATURE_DIM": 16, "QB_HEAT.DECODER_DIM": 16, "QB_HEAT.DECODER_DEPTH": 1},
    ),
}


def name(path: Path) -> str:
    """Returns what a LazyConfig is called: the path of its twin, without ``.yaml``."""
    return path.relative_to(CONFIGS / "lazy").with_suffix("").as_posix()


def load_twins(path: Path) -> tuple[DictConfig, CfgNode]:
    """Returns a LazyConfig and the YAML config of the same name, with the toy set's classes."""
    twin = load_config(CONFIGS / f"{name(path)}.yaml", ["MODEL.DEVICE", "cpu"])
    if path in TOYS and twin.MODEL.META_ARCHITECTURE != "QBHeat":
        use_classes_of(twin, "qbheat_toy_train")
    return LazyConfig.load(str(path)), twin


def load_small_twins(path: Path) -> tuple[DictConfig, CfgNode]:
    """As ``load_twins``, of a toy recipe, with a small network."""
    lazy, twin = load_twins(path)
    kind = path.name.removesuffix("_285M_toy.py").removesuffix("_211")
    for root, keys in zip((lazy.model, twin.MODEL), _SMALL[kind], strict=True):
        for key, value in keys.items():
            *parents, leaf = key.split(".")
            reduce(getitem, parents, root)[leaf] = value
    bottom = lazy.model.backbone.get("bottom_up", lazy.model.backbone)
    bottom.arch = L(arch_of_rows)(**_ARCH)
    mobile_former = twin.MODEL.MOBILE_FORMER
    mobile_former.VARIANT, mobile_former.BLOCKS = "custom", BLOCKS
    mobile_former.STEM_CHANNELS, mobile_former.EXPANDED_CHANNELS = 8, 32
    mobile_former.NUM_TOKENS, mobile_former.TOKEN_DIM = 2, 16
    twin.TEST.DETECTIONS_PER_IMAGE = 5
    twin.INPUT.PRETRAIN.SIZE = 64
    return lazy, twin


DETECTORS = [path for path in RUN if not path.name.startswith("qb_heat")]
TRAIN, VAL, IMAGES = "lazy_train", "lazy_val", "lazy_images"


@pytest.fixture(scope="module", autouse=True)
def _tiny_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = make_data(tmp_path_factory.mktemp("lazy"))
    files = str(folder / "annotations.json"), str(folder / "images")
    for registered in (TRAIN, VAL):
        register_coco_json(registered, *files)
    register_coco_images(IMAGES, *files)
    yield
    for registered in (TRAIN, VAL, IMAGES):
        DatasetCatalog.remove(registered)
        MetadataCatalog.remove(registered)


def _on_meta(lazy: DictConfig, twin: CfgNode) -> tuple[nn.Module, nn.Module]:
    """Builds both without giving them memory: of names and shapes alone."""
    twin.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        return instantiate(lazy.model), build_model(twin)


def _resolved(path: Path, twin: CfgNode) -> CfgNode:
    images = re.search(r"epochs x ([\d,]+) images", " ".join(path.read_text("utf-8").split()))
    return resolve_schedule(twin, num_images=int(images[1].replace(",", "")) if images else 1)


@pytest.mark.parametrize("path", LAZY, ids=name)
def test_parameters_optimizer_and_schedule_are_those_of_the_yaml_twin(path: Path) -> None:
    lazy, twin = load_twins(path)
    _check_schedule(path, lazy, _resolved(path, twin))
    ours, theirs = _on_meta(lazy, twin)
    assert [*_shapes(ours).items()] == [*_shapes(theirs).items()]  # in the same order, too
    trained = [{key for key, p in m.named_parameters() if p.requires_grad} for m in (ours, theirs)]
    assert trained[0] == trained[1]
    lazy.optimizer.params.model = ours
    own, expected = instantiate(lazy.optimizer), build_optimizer(_resolved(path, twin), theirs)
    assert type(own) is type(expected)
    assert _settings(ours, own) == pytest.approx(_settings(theirs, expected))
    for key in ("betas", "momentum", "nesterov"):
        assert own.defaults.get(key) == expected.defaults.get(key)
    clipped = twin.SOLVER.CLIP_GRADIENTS.ENABLED and twin.SOLVER.CLIP_GRADIENTS.CLIP_VALUE
    assert lazy.optimizer.get("max_norm", 0.0) == float(clipped)


def _check_schedule(path: Path, lazy: DictConfig, cfg: CfgNode) -> None:
    train, solver = lazy.train, cfg.SOLVER
    assert train.max_iter == solver.MAX_ITER
    assert lazy.dataloader.train.total_batch_size == solver.IMS_PER_BATCH
    if path not in TOYS:
        assert train.checkpointer.period == solver.CHECKPOINT_PERIOD
        assert train.eval_period in (cfg.TEST.EVAL_PERIOD, 0)
        assert (lazy.dataloader.train.dataset.names,) == cfg.DATASETS.TRAIN
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = build_lr_scheduler(cfg, optimizer)._multiplier
    ours = instantiate(lazy.lr_multiplier)
    for step in (0, 1, 9, 10, 500, 1000, *solver.STEPS, solver.MAX_ITER - 1):
        for near in (step - 1, step, step + 1):
            where = min(max(near, 0), solver.MAX_ITER - 1) / solver.MAX_ITER
            assert ours(where) == pytest.approx(expected(where))


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in model.state_dict().items()}


def _settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {parameter: key for key, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}: {key}": float(group[key])
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key in ("lr", "weight_decay")
    }


def _assert_same(ours: Instances, theirs: Instances) -> None:
    assert ours.image_size == theirs.image_size
    assert ours.get_fields().keys() == theirs.get_fields().keys()
    for key, value in ours.get_fields().items():
        values = [getattr(each, "tensor", each) for each in (value, theirs.get(key))]
        torch.testing.assert_close(*values, rtol=0, atol=0)


@pytest.mark.parametrize("path", RUN, ids=name)
def test_weights_of_the_yaml_twin_give_the_same_outputs(path: Path) -> None:
    lazy, twin = load_small_twins(path)
    theirs = build_model(twin).eval()
    ours = instantiate(lazy.model).eval()
    ours.load_state_dict(theirs.state_dict())
    batch = make_inputs(2)
    with torch.no_grad():
        results = [model(batch) for model in (ours, theirs)]
    for own, expected in zip(*results, strict=True):
        if "instances" in own:
            assert len(own["instances"])
            _assert_same(own["instances"], expected["instances"])
        else:
            assert own.pop("place") == expected.pop("place")
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


def _small_run(path: Path, output: Path) -> DictConfig:
    """Returns a small toy recipe on twelve images, as overrides on the command line make it."""
    cfg, _ = load_small_twins(path)
    data = cfg.dataloader
    data.train.total_batch_size = 2
    data.train.dataset.names = TRAIN
    if "size" in data.train.mapper:
        data.train.dataset.names, data.train.mapper.size = IMAGES, 64
    if "test" in data:
        data.test.dataset.names = VAL
    cfg.train.output_dir = str(output)
    cfg.train.max_iter = 2
    return LazyConfig.apply_overrides(cfg, ["train.checkpointer.period=1"])


def _train(cfg: DictConfig, *, resume: bool = False) -> SimpleTrainer:
    """Trains with the calls of Detectron2's ``lazyconfig_train_net.py``, without its writers."""
    model = instantiate(cfg.model).to(cfg.train.device)
    cfg.optimizer.params.model = model
    trainer = SimpleTrainer(model, instantiate(cfg.dataloader.train), instantiate(cfg.optimizer))
    checkpointer = DetectionCheckpointer(model, cfg.train.output_dir, trainer=trainer)
    scheduler = hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier))
    saving = hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer)
    trainer.register_hooks([hooks.IterationTimer(), scheduler, saving])
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=resume)
    trainer.train(trainer.iter + 1 if resume else 0, cfg.train.max_iter)
    return trainer


@pytest.mark.parametrize("path", RUN, ids=name)
def test_detectron2s_own_loop_trains_and_resumes_it(path: Path, tmp_path: Path) -> None:
    cfg = _small_run(path, tmp_path)
    LazyConfig.save(cfg, str(tmp_path / "config.yaml"))  # as default_setup does
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]  # not cloudpickle's
    assert _train(cfg).iter == 2
    if path not in DETECTORS:  # one of SGD and AdamW
        return
    # A resumed run reads the optimizer's state, too, by tensors and plain values alone.
    saved = LazyConfig.load(str(tmp_path / "config.yaml"))
    saved.train.max_iter = 3
    resumed = _train(saved, resume=True)
    assert (resumed.start_iter, resumed.iter) == (2, 3)
    content = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert math.isfinite(sum(float(value.sum()) for value in content["model"].values()))


def test_the_page_on_lazy_configs_lists_them_and_its_example_runs() -> None:
    page = (CONFIGS.parent / "docs" / "interop.md").read_text(encoding="utf-8")
    page = page[page.index("LazyConfigs") :]
    named = set(re.findall(r"`((?:coco|quick_schedules|ImageNet-\w+)/\w+\.py)`", page))
    assert named == {f"{name(path)}.py" for path in LAZY}
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(example, "interop.md", "exec"), scope)
    with torch.device("meta"):
        model = instantiate(scope["cfg"].model)
    assert model.head.cls_score.out_channels == 9 * 20
    assert model.backbone.bottom_up.output_shape()["s16"].channels == 480
