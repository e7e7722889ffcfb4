"""Training losses on score matrices: Sinkhorn normalisation, its cross-entropy, and a pairwise term.

B slates, N candidates, K rank positions (N <= K). `scores_BNK` is float32; of a slate with n candidates only
`scores[:n, :n]` counts. `target_BNN` is float32, candidate x rank position: P_teacher, a row of zeros where it places
a candidate nowhere (spd.targets makes it).
Source: arXiv 2609.01807, training objective; DESIGN "The method", step 4.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

RankWeights = Literal["uniform", "dcg"]

DEFAULT_ITERATIONS = 20
MAX_ITERATIONS = 10_000


def sinkhorn_problems(tau: float, num_iterations: int) -> list[str]:
    """Return what is wrong with these settings, for a config's own check."""
    found = [] if 1e-6 <= tau < math.inf else [f"tau={tau} must be a finite number of at least 1e-6"]
    if not 1 <= num_iterations <= MAX_ITERATIONS:
        found.append(f"sinkhorn_iterations={num_iterations} must be between 1 and {MAX_ITERATIONS}")
    return found


def square_scores(scores_BNK: Tensor, mask_BN: Tensor) -> Tensor:
    """Return float32 [B, N, N] with each slate's own n x n block kept and an identity block in the padding.

    Padded entries are -inf off the diagonal and 0 on it, so that row and column normalisation leave them alone.
    """
    size = mask_BN.shape[1]
    scores_BNN = scores_BNK[:, :, :size].float()
    valid_BNN = mask_BN[:, :, None] & mask_BN[:, None, :]
    identity_NN = torch.eye(size, dtype=torch.bool, device=scores_BNN.device)
    padding_BNN = torch.where(identity_NN, 0.0, -torch.inf).expand_as(scores_BNN)
    return torch.where(valid_BNN, scores_BNN, padding_BNN)


def log_sinkhorn(
    scores_BNK: Tensor, mask_BN: Tensor, tau: float = 1.0, num_iterations: int = DEFAULT_ITERATIONS
) -> Tensor:
    """Return log S, float32 [B, N, N]: candidate x rank position, near doubly stochastic on each slate's own block.

    Each iteration normalises columns (positions), then rows (candidates), in log space; rows come last, so each row is
    exactly a distribution over positions, while columns sum to 1 only in the limit.
    """
    log_BNN = square_scores(scores_BNK / tau, mask_BN)
    for _ in range(num_iterations):
        log_BNN = log_BNN - torch.logsumexp(log_BNN, dim=1, keepdim=True)
        log_BNN = log_BNN - torch.logsumexp(log_BNN, dim=2, keepdim=True)
    return log_BNN


def sinkhorn_cross_entropy(
    scores_BNK: Tensor,
    target_BNN: Tensor,
    mask_BN: Tensor,
    tau: float = 1.0,
    num_iterations: int = DEFAULT_ITERATIONS,
    rank_weights: RankWeights = "uniform",
) -> Tensor:
    """Return float32 [B]: -sum P_teacher * log S, as the mean over what the target places.

    A teacher's prefix (top m) scores its m candidates only. At the start, with equal scores, the loss is ln n.
    rank_weights "dcg" weighs place k by 1 / log2(1 + k), k from 1: the tail of a teacher's order counts less.
    """
    log_BNN = log_sinkhorn(scores_BNK, mask_BN, tau, num_iterations)
    weight_BNN = target_BNN
    if rank_weights == "dcg":
        place_N = torch.arange(target_BNN.shape[2], device=target_BNN.device, dtype=torch.float32)
        weight_BNN = target_BNN / torch.log2(place_N + 2)
    total_B = torch.where(weight_BNN > 0, -log_BNN * weight_BNN, 0.0).sum((1, 2))
    return total_B / weight_BNN.sum((1, 2)).clamp(min=1e-9)


def expected_rank(scores_BNK: Tensor, mask_BN: Tensor) -> Tensor:
    """Return float32 [B, N]: the mean position of each candidate under a row softmax of its scores, 0 = first."""
    probability_BNN = torch.softmax(square_scores(scores_BNK, mask_BN), dim=2)
    position_N = torch.arange(mask_BN.shape[1], device=scores_BNK.device, dtype=torch.float32)
    return probability_BNN @ position_N


def pairwise_logistic(scores_BNK: Tensor, target_BNN: Tensor, mask_BN: Tensor) -> Tensor:
    """Return float32 [B]: RankNet's loss on expected ranks, the mean over pairs whose order the target knows.

    It leaves the plateau (loss ln n) at which Sinkhorn cross-entropy alone can sit. A candidate that the target does
    not place stands behind those it does; two such candidates are no pair.
    """
    rank_BN = expected_rank(scores_BNK, mask_BN)
    place_BN = target_places(target_BNN)
    real_BNN = mask_BN[:, :, None] & mask_BN[:, None, :]
    pair_BNN = real_BNN & (place_BN[:, :, None] < place_BN[:, None, :])
    loss_BNN = F.softplus(rank_BN[:, :, None] - rank_BN[:, None, :])
    return torch.where(pair_BNN, loss_BNN, 0.0).sum((1, 2)) / pair_BNN.sum((1, 2)).clamp(min=1)


def first_place_cross_entropy(scores_BNK: Tensor, target_BNN: Tensor, mask_BN: Tensor, tau: float = 1.0) -> Tensor:
    """Return float32 [B]: cross-entropy of a softmax over the candidates of column 0 against the target's first place.

    ln n at the start, and no saddle: one column alone has a gradient at once.
    """
    log_BN = torch.log_softmax(torch.where(mask_BN, scores_BNK[:, :, 0].float() / tau, -torch.inf), dim=1)
    first_BN = target_BNN[:, :, 0]
    return torch.where(first_BN > 0, -log_BN * first_BN, 0.0).sum(1)


def target_places(target_BNN: Tensor) -> Tensor:
    """Return float32 [B, N]: the mean place that the target gives each candidate, infinity where it gives none."""
    share_BN = target_BNN.sum(2)
    place_N = torch.arange(target_BNN.shape[2], device=target_BNN.device, dtype=torch.float32)
    return torch.where(share_BN > 0, (target_BNN @ place_N) / share_BN.clamp(min=1e-9), torch.inf)
