# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models in their fastest equal form on a device."""

from .deploy import deploy, deploy_by_config
from .deployed_model import DeployedModel, DeployReport, Step

__all__ = ["DeployReport", "DeployedModel", "Step", "deploy", "deploy_by_config"]
