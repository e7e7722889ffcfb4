"""Ranking metrics of one slate, and their averages over slates with a bootstrap interval.

Every per-slate metric takes `order` (all N candidate indices, best first) and `relevance` (N labels or grades, None
where unjudged), and returns None where the slate doesn't define it: such slates are left out of an average and show in
its `n`. A positive is a candidate with relevance >= `positive_threshold`: `CLICK_THRESHOLD` is "any value above 0",
`GRADE_THRESHOLD` is "2 or 3 of the grades 0 to 3".
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from spd.errors import DataError
from spd.slate import Slate

CLICK_THRESHOLD = math.ulp(0.0)  # the smallest float above 0, so that `>=` says "above 0"
GRADE_THRESHOLD = 2.0
CUTOFFS = (1, 5, 10)
METRIC_NAMES = ("auc", *(f"r@{k}" for k in CUTOFFS), *(f"ndcg@{k}" for k in CUTOFFS), "mrr", "kendall_tau")
UNJUDGED = "unjudged_share"
BootstrapBy = Literal["slate", "query"]
INTERVAL_PERCENT = (2.5, 97.5)
DEFAULT_NUM_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over slates with its percentile bootstrap 95% interval; all None where no slate counted.

    n: how many slates counted, that is defined the metric.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int

    def to_json(self) -> dict[str, float | int | None]:
        """Return the four fields; None (null) where undefined, never NaN."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


def default_positive_threshold(relevances: Iterable[Sequence[float | None] | None]) -> float:
    """Return GRADE_THRESHOLD if any value of the data set is above 1 (grades), else CLICK_THRESHOLD (clicks)."""
    for relevance in relevances:
        if any(value is not None and value > 1 for value in relevance or ()):
            return GRADE_THRESHOLD
    return CLICK_THRESHOLD


def ndcg_at_k(order: Sequence[int], relevance: Sequence[float | None], k: int) -> float | None:
    """Return NDCG@k in 0..1: gain = relevance, discount 1/log2(1+rank), ideal within the slate; unjudged
    and negative count as 0.

    None where no candidate has a relevance above 0, so that the ideal is 0.
    """
    gains = np.maximum(np.nan_to_num(_in_order(order, relevance)), 0.0)
    ideal = _dcg(np.sort(gains)[::-1][:k])
    return _dcg(gains[:k]) / ideal if ideal > 0 else None


def recall_at_k(
    order: Sequence[int], relevance: Sequence[float | None], k: int, *, positive_threshold: float = CLICK_THRESHOLD
) -> float | None:
    """Return the share of the slate's positives within the top k; None without a positive."""
    positive = _in_order(order, relevance) >= positive_threshold
    return float(positive[:k].sum() / positive.sum()) if positive.any() else None


def auc(
    order: Sequence[int], relevance: Sequence[float | None], *, positive_threshold: float = CLICK_THRESHOLD
) -> float | None:
    """Return the share of (positive, negative) pairs in right order, without the unjudged; None unless both exist."""
    ranked = _in_order(order, relevance)
    positive = ranked[~np.isnan(ranked)] >= positive_threshold
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return None
    num_right = int(np.cumsum(positive)[~positive].sum())  # positives above each negative
    return num_right / (num_positive * num_negative)


def reciprocal_rank(
    order: Sequence[int], relevance: Sequence[float | None], *, positive_threshold: float = CLICK_THRESHOLD
) -> float | None:
    """Return 1/rank of the first positive, counted from 1; None without a positive."""
    positive = _in_order(order, relevance) >= positive_threshold
    return float(1 / (1 + np.argmax(positive))) if positive.any() else None


def kendall_tau(order: Sequence[int], teacher_ranking: Sequence[int]) -> float | None:
    """Return Kendall's tau in -1..1 over the m candidates that the teacher ranks; None where m < 2."""
    num_covered = len(teacher_ranking)
    if num_covered < 2:
        return None
    places = np.empty(len(order), dtype=np.int64)
    places[np.asarray(order)] = np.arange(len(order))
    covered = places[np.asarray(teacher_ranking)]
    num_right = int(np.triu(covered[:, None] < covered[None, :], k=1).sum())
    num_pairs = num_covered * (num_covered - 1) // 2
    return (2 * num_right - num_pairs) / num_pairs


def slate_metrics(order: Sequence[int], slate: Slate, *, positive_threshold: float) -> dict[str, float | None]:
    """Return each of METRIC_NAMES and `unjudged_share` for one slate; DataError if `order` is no full permutation.

    A slate without labels is wholly unjudged: its label metrics are None.
    """
    size = len(slate.candidates)
    if sorted(order) != list(range(size)):
        raise DataError(
            f"slate {slate.request_id!r}: order of {len(order)} places is no permutation of 0..{size - 1}: "
            "rank every candidate exactly once"
        )
    relevance = slate.relevance or (None,) * size
    teacher = slate.teacher_ranking
    return {
        "auc": auc(order, relevance, positive_threshold=positive_threshold),
        **{f"r@{k}": recall_at_k(order, relevance, k, positive_threshold=positive_threshold) for k in CUTOFFS},
        **{f"ndcg@{k}": ndcg_at_k(order, relevance, k) for k in CUTOFFS},
        "mrr": reciprocal_rank(order, relevance, positive_threshold=positive_threshold),
        "kendall_tau": None if teacher is None else kendall_tau(order, teacher),
        UNJUDGED: sum(value is None for value in relevance) / size,
    }


def evaluate_orders(
    slates: Sequence[Slate],
    orders: Sequence[Sequence[int]],
    *,
    seed: int,
    positive_threshold: float | None = None,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    bootstrap_by: BootstrapBy = "slate",
) -> dict[str, Estimate]:
    """Return the slate-averaged estimate of each of METRIC_NAMES and of `unjudged_share`.

    orders: one full permutation a slate, in the order of `slates`. bootstrap_by: see `clusters_of`.
    positive_threshold: None infers it from all slates, see `default_positive_threshold`.
    """
    if len(slates) != len(orders):
        raise DataError(f"orders has {len(orders)} rankings for {len(slates)} slates: give one each")
    if positive_threshold is None:
        positive_threshold = default_positive_threshold(slate.relevance for slate in slates)
    rows = [
        slate_metrics(order, slate, positive_threshold=positive_threshold)
        for slate, order in zip(slates, orders, strict=True)
    ]
    names = (*METRIC_NAMES, UNJUDGED)
    clusters = clusters_of(slates, bootstrap_by)
    return {
        name: estimate([row[name] for row in rows], seed=seed, num_resamples=num_resamples, clusters=clusters)
        for name in names
    }


def clusters_of(slates: Sequence[Slate], bootstrap_by: BootstrapBy) -> list[str] | None:
    """Return what a bootstrap resamples, by slate: its query, or None where each slate stands for itself.

    Several slates of one query (windows of one ranking) are not independent: resampled by slate, their interval is too
    narrow.
    """
    return [slate.query for slate in slates] if bootstrap_by == "query" else None


def estimate(
    values: Sequence[float | None],
    *,
    seed: int,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    clusters: Sequence[Hashable] | None = None,
) -> Estimate:
    """Return the mean of the defined values, with the interval from resampling clusters with replacement.

    clusters: one name a value; values of one name are drawn together. None takes the values as independent.
    """
    names = range(len(values)) if clusters is None else clusters
    if len(names) != len(values):
        raise DataError(f"{len(names)} clusters for {len(values)} values: name one each")
    defined = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    if not defined:
        return Estimate(value=None, low=None, high=None, n=0)
    place = {name: index for index, name in enumerate(dict.fromkeys(name for name, _ in defined))}
    cluster = np.array([place[name] for name, _ in defined])
    sums, counts = np.bincount(cluster, [value for _, value in defined]), np.bincount(cluster)
    rng = np.random.default_rng(seed)
    draws = (rng.integers(len(place), size=len(place)) for _ in range(num_resamples))
    low, high = np.percentile([sums[draw].sum() / counts[draw].sum() for draw in draws], INTERVAL_PERCENT)
    return Estimate(value=float(sums.sum() / counts.sum()), low=float(low), high=float(high), n=len(defined))


def paired_difference(
    first: Sequence[float | None],
    second: Sequence[float | None],
    *,
    seed: int,
    num_resamples: int = DEFAULT_NUM_RESAMPLES,
    clusters: Sequence[Hashable] | None = None,
) -> Estimate:
    """Return the mean of first minus second over the slates where both are defined, slates resampled as pairs.

    clusters: as in `estimate`.
    """
    if len(first) != len(second):
        raise DataError(f"{len(first)} values against {len(second)}: pair the metrics of the same slates")
    pairs = zip(first, second, strict=True)
    differences = [None if a is None or b is None else a - b for a, b in pairs]
    return estimate(differences, seed=seed, num_resamples=num_resamples, clusters=clusters)


def _in_order(order: Sequence[int], relevance: Sequence[float | None]) -> npt.NDArray[np.float64]:
    """Return float64 [N], the relevance best-ranked first, NaN where unjudged."""
    assert len(order) == len(relevance), "a metric needs the full permutation"
    return np.array([relevance[index] for index in order], dtype=np.float64)


def _dcg(gains: npt.NDArray[np.float64]) -> float:
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())
