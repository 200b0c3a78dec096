# Copyright (c) qbheat_det contributors. Apache-2.0.
"""DETR's matching and losses a second time, in Python loops: the oracle of their tests.

Letters: Q queries, K classes; label K means "no object". Boxes are (cx, cy, w, h) in [0, 1] of
the unpadded image. A target is labels (T,) and boxes (T, 4) of one image.
"""

import itertools
import math

import torch
from scipy.optimize import linear_sum_assignment

CLASS_WEIGHT, L1_WEIGHT, GIOU_WEIGHT = 1.0, 5.0, 2.0


def generalized_iou(first, second):
    """Of two single boxes."""
    left1, top1 = first[0] - first[2] / 2, first[1] - first[3] / 2
    right1, bottom1 = first[0] + first[2] / 2, first[1] + first[3] / 2
    left2, top2 = second[0] - second[2] / 2, second[1] - second[3] / 2
    right2, bottom2 = second[0] + second[2] / 2, second[1] + second[3] / 2
    width = (torch.minimum(right1, right2) - torch.maximum(left1, left2)).clamp(min=0)
    height = (torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2)).clamp(min=0)
    shared = width * height
    union = first[2] * first[3] + second[2] * second[3] - shared
    hull = (torch.maximum(right1, right2) - torch.minimum(left1, left2)) * (
        torch.maximum(bottom1, bottom2) - torch.minimum(top1, top2)
    )
    return shared / union - (hull - union) / hull


def matching_cost(logits, boxes, target):
    """(Q, T): what it costs to give a box to a query."""
    labels, true_boxes = target
    table = []
    for query in range(len(logits)):
        powers = [math.exp(value - float(logits[query].max())) for value in logits[query].tolist()]
        row = []
        for label, true_box in zip(labels.tolist(), true_boxes, strict=True):
            distance = sum(
                abs(a - b) for a, b in zip(boxes[query].tolist(), true_box.tolist(), strict=True)
            )
            row.append(
                -CLASS_WEIGHT * powers[label] / sum(powers)
                + L1_WEIGHT * distance
                - GIOU_WEIGHT * float(generalized_iou(boxes[query].detach(), true_box))
            )
        table.append(row)
    return table


def match_by_trying_all(cost, boxes):
    """(query, box) pairs of the cheapest among all ordered choices of one query a box."""
    choices = itertools.permutations(range(len(cost)), boxes)
    cheapest = min(choices, key=lambda chosen: sum(cost[q][t] for t, q in enumerate(chosen)))
    return [(query, box) for box, query in enumerate(cheapest)]


def match(logits, boxes, target):
    """(query, box) pairs: by trying all choices where they are few, else by scipy."""
    count = len(target[0])
    if count == 0:
        return []
    cost = matching_cost(logits.detach(), boxes.detach(), target)
    if 0 < math.perm(len(cost), count) <= 3000:
        return match_by_trying_all(cost, count)
    return [(int(query), int(box)) for query, box in zip(*linear_sum_assignment(cost), strict=True)]


def losses_of_one_prediction(logits, boxes, targets, no_object_weight):
    """Weighted losses of logits (N, Q, K + 1) and boxes (N, Q, 4)."""
    no_object = logits.shape[2] - 1
    total_boxes = max(sum(len(labels) for labels, _ in targets), 1)
    cross_entropy, sum_of_weights = logits.new_zeros(()), 0.0
    distance, giou_loss = 0 * boxes.sum(), 0 * boxes.sum()  # with a gradient, if a zero one
    for image, (labels, true_boxes) in enumerate(targets):
        pairs = match(logits[image], boxes[image], targets[image])
        label_of_query = {query: int(labels[box]) for query, box in pairs}
        for query in range(logits.shape[1]):
            label = label_of_query.get(query, no_object)
            weight = no_object_weight if label == no_object else 1.0
            scores = logits[image, query]
            cross_entropy = cross_entropy - weight * (scores[label] - scores.logsumexp(0))
            sum_of_weights += weight
        for query, box in pairs:
            guess, truth = boxes[image, query], true_boxes[box]
            distance = distance + (guess - truth).abs().sum()
            giou_loss = giou_loss + 1 - generalized_iou(guess, truth)
    return {
        "loss_ce": CLASS_WEIGHT * cross_entropy / sum_of_weights,
        "loss_bbox": L1_WEIGHT * distance / total_boxes,
        "loss_giou": GIOU_WEIGHT * giou_loss / total_boxes,
    }


def set_criterion(predictions, targets, no_object_weight):
    """Losses of every block's prediction, each matched anew; ``_0``, ``_1``... but for the last."""
    losses = {}
    for number, prediction in enumerate(predictions):
        suffix = "" if number == len(predictions) - 1 else f"_{number}"
        own = losses_of_one_prediction(
            prediction["pred_logits"], prediction["pred_boxes"], targets, no_object_weight
        )
        losses.update({name + suffix: value for name, value in own.items()})
    return losses
