# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models in their fastest equal form on a device."""

from .deploy import Deployed, deploy
from .predictor_key import deploy_by_config, honours_deploy_key
from .report import DeployReport, Step

__all__ = ["DeployReport", "Deployed", "Step", "deploy", "deploy_by_config", "honours_deploy_key"]
