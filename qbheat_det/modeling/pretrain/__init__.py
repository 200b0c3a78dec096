# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parts of pre-training objectives."""

from .area_pairs import AreaPairs
from .batch_shuffle import draw_order, embed_in_groups, embed_shuffled, gather_over_processes
from .decoder_block import DecoderBlock, hidden_positions, take
from .dependency_loss import DependencyLoss, dual_distance
from .feature_queue import FeatureQueue
from .heat_predictor import DIRECTIONS, HeatPredictor, LinearModels, extend
from .hidden_features import InterpolatedFeatures, MaskToken
from .info_nce import info_nce, similarity_logits
from .lipschitz_critic import LipschitzCritic
from .momentum_copy import MomentumCopy
from .pretraining_model import PretrainingModel, check_equal_shares, find_map
from .projection_head import ProjectionHead, embedding_from_config
from .reconstruction_decoder import ReconstructionDecoder, patchify, unpatchify
from .reconstruction_loss import ReconstructionLoss
from .reconstruction_model import Reconstruction, ReconstructionModel
from .scattered_mask import RandomMask
from .visible_quarter import CORNERS, PLACES, PLACES_OF, VisibleQuarters, visible_positions

__all__ = [
    "CORNERS",
    "DIRECTIONS",
    "PLACES",
    "PLACES_OF",
    "AreaPairs",
    "DecoderBlock",
    "DependencyLoss",
    "FeatureQueue",
    "HeatPredictor",
    "InterpolatedFeatures",
    "LinearModels",
    "LipschitzCritic",
    "MaskToken",
    "MomentumCopy",
    "PretrainingModel",
    "ProjectionHead",
    "RandomMask",
    "Reconstruction",
    "ReconstructionDecoder",
    "ReconstructionLoss",
    "ReconstructionModel",
    "VisibleQuarters",
    "check_equal_shares",
    "draw_order",
    "dual_distance",
    "embed_in_groups",
    "embed_shuffled",
    "embedding_from_config",
    "extend",
    "find_map",
    "gather_over_processes",
    "hidden_positions",
    "info_nce",
    "patchify",
    "similarity_logits",
    "take",
    "unpatchify",
    "visible_positions",
]
