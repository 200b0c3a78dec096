# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Deploys trained models: converts them to the fastest equivalent form on a device."""

from .deploy import DeployedModel, DeployReport, deploy, deploy_by_config

__all__ = ["DeployReport", "DeployedModel", "deploy", "deploy_by_config"]
