"""The contenders of an evaluation: each one's order of every slate, and what it cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from jobs.progress import progress
from spd.answer import Answer
from spd.artifact import build_untrained_model
from spd.autoregressive import ArRanker, Decoding
from spd.backbone import Precision, default_device
from spd.decode import DECODERS
from spd.ranker import Ranker
from spd.slate import Ranking, Slate
from spd.windows import WindowConfig, WindowedRanking, rank_sliding, ranking_of_order

Orders = Sequence[Sequence[int]]
RankOrders = Callable[[Sequence[Slate]], Orders]
"""Slates -> one full order each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankerOptions:
    """How the rankers of an evaluation run: see EvaluateConfig."""

    windows: WindowConfig
    batch_tokens: int
    compare_untrained: bool = True
    precision: Precision | None = None
    backbone: str | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Contenders:
    """Rows of the table, and what is known of them besides.

    orders: row name -> one order a slate. rank: the student's, for slates in another candidate order.
    passes: row name -> forward passes of a slate. validity: of free decoding, see `validity_of`.
    """

    version: str
    rank: RankOrders
    orders: dict[str, Orders]
    passes: dict[str, dict[str, float]] = field(default_factory=dict)
    validity: dict[str, float] | None = None


def student_contenders(ranker: Ranker, slates: Sequence[Slate], options: RankerOptions) -> Contenders:
    """Return the rows of a single-pass ranker, and of its backbone under a fresh head.

    Where one pass holds every slate, each decoder has a row of its own, all reading the same matrices.
    """
    size, _ = options.windows.resolve(ranker.spec.max_candidates)
    rank = _window_orders if any(len(slate.candidates) > size for slate in slates) else _decoder_orders
    orders, passes = rank(ranker, slates, options, "student")
    if options.compare_untrained:
        model = build_untrained_model(ranker.spec, default_device(), options.seed, options.precision, options.backbone)
        untrained = Ranker(ranker.spec, ranker.encoder, model, "untrained")
        found, taken = rank(untrained, slates, options, "untrained")
        orders["untrained"], passes["untrained"] = found["untrained"], taken["untrained"]

    def again(shuffled: Sequence[Slate]) -> Orders:
        return [ranking.order for ranking in ranker.rank_slates(shuffled, options.batch_tokens, options.windows)]

    return Contenders(version=ranker.version, rank=again, orders=orders, passes=passes)


def autoregressive_contenders(
    ranker: ArRanker, artifact: Path, slates: Sequence[Slate], options: RankerOptions
) -> Contenders:
    """Return the rows of an autoregressive ranker: constrained and free decoding, and its backbone as it came.

    Slates above the window size are ranked by sliding windows, whatever `windows.method` says.
    """
    student = ArRun(ranker, options, "constrained").rank(slates, "student")
    free = ArRun(ranker, options, "free").rank(slates, "student, free")
    runs = {"student": student, "student (free)": free}
    if options.compare_untrained:
        untrained = ArRanker.from_pretrained(
            artifact, precision=options.precision, backbone_source=options.backbone, untrained=True
        )
        runs["untrained"] = ArRun(untrained, options, "constrained").rank(slates, "untrained")

    def again(shuffled: Sequence[Slate]) -> Orders:
        return ArRun(ranker, options, "constrained").rank(shuffled, "student, shuffled").orders

    return Contenders(
        version=ranker.version,
        rank=again,
        orders={name: run.orders for name, run in runs.items()},
        passes={name: _passes(run.num_passes) for name, run in runs.items()},
        validity=validity_of(free.answers, free.num_passes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ArOutcome:
    """Orders and forward passes by slate, and every answer (one a window)."""

    orders: Orders
    num_passes: list[int]
    answers: list[Answer]


class ArRun:
    """One decoding of an autoregressive ranker over slates, its answers and passes noted as windows go by."""

    def __init__(self, ranker: ArRanker, options: RankerOptions, decoding: Decoding) -> None:
        self._ranker = ranker
        self._batch_tokens = options.batch_tokens
        self._decoding = decoding
        self._size, self._stride = replace(options.windows, method="sliding").resolve(ranker.spec.max_candidates)
        self._answers: list[Answer] = []
        self._num_passes: dict[str, int] = {}

    def rank(self, slates: Sequence[Slate], what: str) -> ArOutcome:
        """Return the orders of the slates; their request_ids must be unique."""
        self._answers, self._num_passes = [], dict.fromkeys((slate.request_id for slate in slates), 0)
        print(f"evaluate: write out the orders ({what})", flush=True)
        found = rank_sliding(slates, self._size, self._stride, self._rank_windows)
        return ArOutcome(
            orders=[one.ranking.order for one in found],
            num_passes=list(self._num_passes.values()),
            answers=self._answers,
        )

    def _rank_windows(self, windows: Sequence[Slate]) -> list[Ranking]:
        found = self._ranker.rank_slates(windows, self._decoding, self._batch_tokens)
        for window, one in zip(windows, found, strict=True):
            self._num_passes[window.request_id] += one.num_passes
            self._answers.append(one.answer)
        return [ranking_of_order(one.answer.order) for one in found]


def validity_of(answers: Sequence[Answer], num_passes: Sequence[int]) -> dict[str, float]:
    """Return how often free answers were permutations as they stood, what was mended (means over answers), and the
    mean forward passes of a slate."""
    return {
        "num_answers": len(answers),
        "valid_share": fmean(answer.is_valid for answer in answers),
        "mean_repeated": fmean(answer.num_repeated for answer in answers),
        "mean_missing": fmean(answer.num_missing for answer in answers),
        "mean_out_of_range": fmean(answer.num_out_of_range for answer in answers),
        "mean_passes": fmean(num_passes),
    }


def baseline_orders(slates: Sequence[Slate], seed: int) -> dict[str, Orders]:
    """Return the rows that take no model: the teacher and the upstream score where every slate has them, input order,
    chance."""
    rng = np.random.default_rng(seed)
    rows: dict[str, Orders] = {}
    if all(slate.teacher_ranking is not None for slate in slates):
        rows["teacher"] = [_completed(slate) for slate in slates]
    if all(slate.score is not None for slate in slates):
        rows["upstream_score"] = [upstream_order(slate) for slate in slates]
    rows["input_order"] = [range(len(slate.candidates)) for slate in slates]
    rows["random"] = [rng.permutation(len(slate.candidates)).tolist() for slate in slates]
    return rows


def upstream_order(slate: Slate) -> list[int]:
    """Return the candidates by falling upstream score, unknown ones last, ties in input order."""
    scores = slate.score or (None,) * len(slate.candidates)
    return sorted(range(len(scores)), key=lambda i: (scores[i] is None, -(scores[i] or 0.0)))


def _completed(slate: Slate) -> list[int]:
    """Return the teacher's order; the candidates that a prefix leaves out follow in input order."""
    ranking = list(slate.teacher_ranking or ())
    named = set(ranking)
    return ranking + [index for index in range(len(slate.candidates)) if index not in named]


Rows = tuple[dict[str, Orders], dict[str, dict[str, float]]]


def _decoder_orders(ranker: Ranker, slates: Sequence[Slate], options: RankerOptions, what: str) -> Rows:
    scored = _score(ranker, slates, options.batch_tokens, what)
    print(f"evaluate: the {what} decodes by {ranker.spec.decoder!r}, other decoders read the same matrices")
    orders: dict[str, Orders] = {what: [ranker.decode(*one).order for one in scored]}
    for decoder in (name for name in DECODERS if name != ranker.spec.decoder):
        orders[f"{what} ({decoder})"] = [ranker.decode(*one, decoder).order for one in scored]
    return orders, {what: _passes([1] * len(slates))}


def _window_orders(ranker: Ranker, slates: Sequence[Slate], options: RankerOptions, what: str) -> Rows:
    print(
        f"evaluate: some slates need windows, {options.windows.method} ({what}); no rows of other decoders", flush=True
    )
    found: list[WindowedRanking] = ranker.rank_in_windows(slates, options.batch_tokens, options.windows)
    passes = _passes([one.num_passes for one in found], [one.num_rounds for one in found])
    return {what: [one.ranking.order for one in found]}, {what: passes}


def _passes(num_passes: Sequence[int], num_rounds: Sequence[int] | None = None) -> dict[str, float]:
    """Return the mean and most forward passes of a slate, and how many of them waited for one another."""
    rounds = num_passes if num_rounds is None else num_rounds
    return {"mean": fmean(num_passes), "max": max(num_passes), "mean_sequential": fmean(rounds)}


def _score(
    ranker: Ranker, slates: Sequence[Slate], batch_tokens: int, what: str
) -> list[tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Return each slate's score matrix with the order of its prompt, in the order given."""
    scored = progress(ranker.score_slates(slates, batch_tokens), len(slates), f"evaluate: score the slates ({what})")
    found = {index: (matrix, encoded.order) for index, encoded, matrix in scored}
    return [found[index] for index in range(len(slates))]
