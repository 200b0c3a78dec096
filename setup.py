# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Packaging: requirements, extras, the command, and what the wheel has inside."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"


class BuildWithFolders(build_py):
    """Puts ``configs/`` and ``tools/``, which lie beside the package, into the wheel inside it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout reads its own folder
            return
        for name in ("configs", "tools"):
            target = Path(self.build_lib) / "qbheat_det" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    name="qbheat_det",
    version="0.2.0",
    description="Mobile-Former, MF-DETR and QB-Heat for Detectron2",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="qbheat_det contributors",
    keywords="object detection, self-supervised learning, Mobile-Former, QB-Heat, DETR, Detectron2",
    project_urls={  # no address of the repository until it has one
        "QB-Heat": "https://arxiv.org/abs/2211.13228",
        "Mobile-Former": "https://arxiv.org/abs/2108.05895",
    },
    packages=find_packages(include=["qbheat_det", "qbheat_det.*"]),
    package_data={
        "qbheat_det": ["py.typed"],
        "qbheat_det.analysis": ["page.html.j2", "theme.mplstyle"],
        "qbheat_det.data.datasets": ["cells/*.json", "cells/*.txt", "cells/*/*.jpg"],
        "qbheat_det.labelling": ["*.html.j2"],
        "qbheat_det.model_zoo": ["*.json", "weights/*.safetensors"],
    },
    cmdclass={"build_py": BuildWithFolders},
    scripts=["tools/qbheat"],
    python_requires=">=3.10",
    # The lowest versions here, on Python 3.10, are those that the tests were last run with, beside
    # the newest. torch.load reads no pickled code by default since 2.6.
    # Detectron2 is missing on purpose: the index has none under its own name, and a user's own
    # build must not be replaced. tools/install_detectron2.py brings it; importing says so.
    install_requires=[
        "torch>=2.6",
        "torchvision>=0.21",
        "charset-normalizer>=3.1",  # encodings of label files
        "filelock>=3.13",
        "fsspec>=2023.5",  # object stores; huggingface-hub needs it as well
        "fvcore>=0.1.5.post20221221",
        "huggingface-hub>=0.30",  # timm needs it as well
        "Jinja2>=3.1",  # the page of reports
        "matplotlib>=3.8",
        "numpy>=1.24",
        "Pillow>=9.4",
        "pycocotools>=2.0.6",
        "PyYAML>=6.0.1",
        "safetensors>=0.4",
        "scipy>=1.10",
        "tabulate>=0.9",  # tables in Markdown
        "timm>=1.0.31",  # cuts what lies behind the last map that is asked for
        "tqdm>=4.64",
    ],
    extras_require={
        # Detectron2's Visualizer imports cv2 and leaves the choice of the build to its users.
        "opencv": ["opencv-python-headless>=4.7"],
        "eval": ["faster-coco-eval>=1.6"],
        "bench": ["transformers>=5.20"],  # DETR-R50
        # The lowest that the tests were run with, beside torch 2.15, whose exporter asks an
        # onnxscript 0.5 for what it has not.
        "export": ["onnx>=1.18", "onnxruntime>=1.22", "onnxscript>=0.6"],
        # The page of `qbheat app`: Gradio as it was tested, and the Pillow that it takes.
        "serve": [
            "fastapi>=0.115",
            "uvicorn>=0.30",
        ],  # minima not tested
        "app": ["gradio>=6.31,<7", "Pillow<13"],
        "openvino": ["openvino>=2025.2"],  # minimum not tested
        "ray": ["ray[data]>=2.51"],  # --engine ray; minimum not tested
        "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"],
        "dev": [
            "httpx2",  # requests of tests to the server
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "setuptools>=70.1",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
)
