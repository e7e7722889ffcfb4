"""Score matrix -> ranking: the three decoders, and the relevance score that goes with each place.

`scores` is float32 [n, n], candidate x rank position, of one slate: the caller cuts M[:n, :n] first.
Source: arXiv 2609.01807, decoding; DESIGN "The method", step 5, and "What to know before building on it".
"""

from functools import lru_cache
from typing import Literal

import lap
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from spd.errors import DataError
from spd.sinkhorn import DEFAULT_ITERATIONS, log_sinkhorn
from spd.slate import Ranking

DecoderName = Literal["lap", "greedy", "expected"]
DECODERS: tuple[DecoderName, ...] = ("lap", "greedy", "expected")

FLOAT32_RESOLUTION = 2.0**-24
MAX_COST = 1e4


def decode_scores(
    scores: NDArray[np.float32],
    decoder: DecoderName = "lap",
    tau: float = 1.0,
    num_iterations: int = DEFAULT_ITERATIONS,
) -> Ranking:
    """Return the ranking of one slate's scores, always a permutation; ties go to the input order.

    lap: the assignment of greatest total score, the mode (a tie is a total within float32 resolution of the best).
    greedy: best candidate for position 0, then for position 1 among the rest, and so on.
    expected: sort by expected gain under the Sinkhorn matrix, the order that maximises expected DCG.
    Raises DataError on NaN or infinity: LAPJV would return some permutation of them.
    """
    check_finite(scores)
    gain = expected_gain(scores, tau, num_iterations)
    degenerate = is_degenerate(scores)
    if degenerate:
        order = np.arange(len(scores))
    elif decoder == "lap":
        order = lap_order(scores)
    elif decoder == "greedy":
        order = greedy_order(scores)
    else:
        order = np.argsort(-gain, kind="stable")
    return Ranking(
        order=tuple(order.tolist()),
        relevance_score=tuple(non_increasing(gain[order]).tolist()),
        is_degenerate=degenerate,
    )


def check_finite(scores: NDArray[np.float32]) -> None:
    """Raise DataError on NaN or infinity."""
    if not np.isfinite(scores).all():
        raise DataError("the score matrix holds NaN or infinity: the artifact is broken or its dtype overflowed")


def lap_order(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return int64 [n], the candidate at each place of the maximum-weight assignment (LAPJV, on float64)."""
    value = scores.astype(np.float64)
    scale = float(np.abs(value).max())
    value -= value.max(axis=1, keepdims=True)  # a row's or column's constant changes no assignment, but costs LAPJV
    value -= value.max(axis=0, keepdims=True)  # digits, and beyond its own "large" of 1e6 the optimum
    cost = scale * FLOAT32_RESOLUTION * _displacement(len(scores)) - value
    _, _, candidate_of_position = lap.lapjv(cost * min(1.0, MAX_COST / max(float(cost.max()), 1e-300)))
    order: NDArray[np.int64] = candidate_of_position.astype(np.int64)
    return order


def greedy_order(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return int64 [n]: each position in turn takes its best candidate not yet taken."""
    remaining = scores.astype(np.float64)
    order = np.empty(len(scores), dtype=np.int64)
    for position in range(len(scores)):
        order[position] = remaining[:, position].argmax()
        remaining[order[position]] = -np.inf
    return order


def expected_gain(
    scores: NDArray[np.float32], tau: float = 1.0, num_iterations: int = DEFAULT_ITERATIONS
) -> NDArray[np.float64]:
    """Return float64 [n] in 0..1: each candidate's mean gain 1/log2(1+rank) under the Sinkhorn matrix S.

    S approximates the marginals of the assignment distribution. DCG's gain x discount has rank one, so sorting by this
    maximises expected DCG.
    """
    mask = torch.ones(1, len(scores), dtype=torch.bool)
    log_s = log_sinkhorn(torch.from_numpy(scores)[None], mask, tau, num_iterations)[0]
    discount = 1.0 / np.log2(np.arange(2, len(scores) + 2))
    return np.clip(log_s.double().exp().numpy() @ discount, 0.0, 1.0)


def non_increasing(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the closest non-increasing sequence (isotonic regression, least squares)."""
    fitted: NDArray[np.float64] = isotonic_regression(values, increasing=False).x
    return fitted


def is_degenerate(scores: NDArray[np.float32]) -> bool:
    """Return whether all rows are equal but for a constant each: all n! assignments then tie.

    Equal means within 1e-6 of the largest score.
    """
    value = scores.astype(np.float64)
    spread = np.ptp(value - value.mean(axis=1, keepdims=True), axis=0).max()
    return len(scores) > 1 and bool(spread <= 1e-6 * np.abs(value).max())


@lru_cache(maxsize=512)
def _displacement(size: int) -> NDArray[np.float64]:
    """Return float64 [n, n] in 0..1/n: squared distance from the input place: ties go to the input order."""
    places = np.arange(size, dtype=np.float64)
    cost = (places[:, None] - places[None, :]) ** 2 / max(size, 1) ** 3
    cost.setflags(write=False)
    return cost
