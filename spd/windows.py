"""Slates larger than one pass can rank: ranked in windows, and the windows' answers put together.

one_round (students): interleaved windows that don't wait for each other, so all of them form one parallel round.
sliding (autoregressive teachers, arXiv 2304.09542): a window from the end of the slate to its front.
n candidates of a slate, w the window size, W = ceil(n / w) windows of one interleaving.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from spd.decode import non_increasing
from spd.errors import ConfigError
from spd.slate import Ranking, Slate

RankWindows = Callable[[Sequence[Slate]], Sequence[Ranking]]
"""Windows -> one ranking each, in the order given. A window is a slate of some of the candidates, same request_id."""
GainWindows = Callable[[Sequence[Slate]], Sequence[NDArray[np.float64]]]
"""Windows -> the expected gain (`spd.decode.expected_gain`) of each of its candidates, float64 [n] in 0..1."""

GAIN_DECIMALS = 6  # float32 Sinkhorn gives equal candidates gains that differ in the 7th


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowConfig:
    """How a slate that one pass cannot rank is cut into windows."""

    method: Literal["one_round", "sliding"] = "one_round"
    """one_round: interleaved windows, all in parallel. sliding: from the end to the front, one after the other."""
    size: int | None = None
    """Candidates of a window; null takes the most that the ranker can rank in one pass."""
    stride: int | None = None
    """sliding: places that the window moves; null takes half its size. The best size - stride move on with it."""
    rounds: int = 2
    """one_round: interleavings, each of which ranks every candidate once more."""

    def problems(self) -> list[str]:
        sizes = ("size", "stride", "rounds")
        found = [
            f"{name}={value} must be at least 1"
            for name in sizes
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.size is not None and self.stride is not None and self.stride > self.size:
            found.append(f"stride={self.stride} exceeds size={self.size} and would leave candidates out: lower it")
        return found

    def resolve(self, max_candidates: int) -> tuple[int, int]:
        """Return size and stride for a ranker of slates up to `max_candidates`; ConfigError if they do not fit it."""
        size = self.size or max_candidates
        stride = self.stride or max(1, size // 2)
        found = self.problems()
        if size > max_candidates:
            found.append(f"windows.size={size} exceeds {max_candidates}, the most that one pass ranks here: lower it")
        if self.size is None and stride > size:
            found.append(f"windows.stride={stride} exceeds the window of {size}, leaving candidates out: lower it")
        if found:
            raise ConfigError("; ".join(found))
        return size, stride


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedRanking:
    """One slate's ranking and what it took.

    num_passes: windows ranked. num_rounds: how many of them had to wait for one another, 1 where all ran side by side.
    """

    ranking: Ranking
    num_passes: int
    num_rounds: int


def rank_in_windows(
    slates: Sequence[Slate],
    config: WindowConfig,
    max_candidates: int,
    rank_windows: RankWindows,
    gain_windows: GainWindows,
) -> list[WindowedRanking]:
    """Return one ranking a slate by the configured method, for a ranker of slates up to `max_candidates`."""
    size, stride = config.resolve(max_candidates)
    if config.method == "sliding":
        return rank_sliding(slates, size, stride, rank_windows)
    return rank_one_round(slates, size, config.rounds, rank_windows, gain_windows)


def rank_one_round(
    slates: Sequence[Slate], size: int, rounds: int, rank_windows: RankWindows, gain_windows: GainWindows
) -> list[WindowedRanking]:
    """Return one ranking a slate from windows that are all independent: one call, in which they can run in parallel.

    A slate of at most `size` candidates goes to `rank_windows` as it is. Of a larger one, each of `rounds`
    interleavings makes windows (see `interleaved_windows`); a candidate's score is the mean of its expected gains in
    them, and the order sorts by it, ties by input order. The gains must be raw: isotonic ones say less about a
    candidate than about its neighbours. They compare across windows because each window holds a like share of the
    upstream ranking's every stretch, and because the sizes differ by at most one: the gains of a window of n add up to
    sum_k 1/log2(1+k) whatever it holds, so that a smaller window is worth more on average.
    """
    fitting = [index for index, slate in enumerate(slates) if len(slate.candidates) <= size]
    large = [index for index, slate in enumerate(slates) if len(slate.candidates) > size]
    done = {}
    if fitting:
        rankings = rank_windows([slates[index] for index in fitting])
        done = {
            i: WindowedRanking(ranking=r, num_passes=1, num_rounds=1) for i, r in zip(fitting, rankings, strict=True)
        }
    plans = {index: interleaved_windows(slates[index], size, rounds) for index in large}
    windows = [(index, window) for index in large for window in plans[index]]
    gains = gain_windows([slates[index].reordered(window) for index, window in windows]) if windows else []
    sums = {index: np.zeros(len(slates[index].candidates)) for index in large}
    for (index, window), gain in zip(windows, gains, strict=True):
        sums[index][window] += gain
    for index in large:
        ranking = _by_gain(sums[index] / rounds)
        done[index] = WindowedRanking(ranking=ranking, num_passes=len(plans[index]), num_rounds=1)
    return [done[index] for index in range(len(slates))]


def interleaved_windows(slate: Slate, size: int, rounds: int) -> list[list[int]]:
    """Return candidate indices of rounds x W windows of n // W or n // W + 1 candidates, each in input order.

    The first interleaving gives window j the upstream ranks j, j + W, j + 2W, ...; each further one deals every
    stretch of W neighbours out at random, seeded by request_id, so that a candidate meets others.
    """
    num_candidates = len(slate.candidates)
    num_windows = -(-num_candidates // size)
    num_stretches = -(-num_candidates // num_windows)
    rng = np.random.default_rng(crc32(slate.request_id.encode()))
    windows: list[list[int]] = []
    for number in range(rounds):
        deals = np.tile(np.arange(num_windows), (num_stretches, 1))
        if number:
            deals = rng.permuted(deals, axis=1)
        window_of = deals.ravel()[:num_candidates]
        windows.extend(np.flatnonzero(window_of == window).tolist() for window in range(num_windows))
    return windows


def rank_sliding(slates: Sequence[Slate], size: int, stride: int, rank_windows: RankWindows) -> list[WindowedRanking]:
    """Return one ranking a slate by a window that moves from the end of the upstream order to its front.

    All slates move in lockstep, so that each step's windows form one batch. The best `size - stride` candidates of a
    window are in the next one too: with a perfect window ranker the true best `size - stride` end up in front. A
    candidate's score is the one of its last window, made non-increasing over the slate by isotonic regression.
    """
    slides = [_Slide(slate, size, stride) for slate in slates]
    while moving := [slide for slide in slides if slide.starts]:
        rankings = rank_windows([slide.window() for slide in moving])
        for slide, ranking in zip(moving, rankings, strict=True):
            slide.take(ranking)
    return [slide.result() for slide in slides]


def window_starts(num_candidates: int, size: int, stride: int) -> list[int]:
    """Return where each window of a slide starts, from the last to 0: 9 windows for 100 candidates, 20 by 10."""
    return [*range(num_candidates - size, 0, -stride), 0]


def ranking_of_order(order: Sequence[int]) -> Ranking:
    """Return the ranking of an order that comes without scores: each place gets its gain 1/log2(1 + rank)."""
    gains = 1.0 / np.log2(np.arange(2, len(order) + 2))
    return Ranking(order=tuple(order), relevance_score=tuple(gains.tolist()))


class _Slide:
    """One slate under a sliding window: its order so far, and where windows are still to come."""

    def __init__(self, slate: Slate, size: int, stride: int) -> None:
        self._slate = slate
        self._size = size
        self._order = list(range(len(slate.candidates)))
        self._scores = np.zeros(len(slate.candidates))
        self._is_degenerate = True
        self.starts = window_starts(len(slate.candidates), size, stride)
        self._num_passes = len(self.starts)

    def window(self) -> Slate:
        """Return the next window's candidates, in the order so far."""
        return self._slate.reordered(self._order[self._part()])

    def take(self, ranking: Ranking) -> None:
        """Put the next window's candidates in their new order."""
        part = self._part()
        inside = self._order[part]
        assert sorted(ranking.order) == list(range(len(inside))), "a window's ranking is a permutation of the window"
        self._order[part] = [inside[place] for place in ranking.order]
        self._scores[part] = ranking.relevance_score
        self._is_degenerate &= ranking.is_degenerate
        self.starts = self.starts[1:]

    def result(self) -> WindowedRanking:
        """Return the ranking after the last window."""
        scores = self._scores if self._num_passes == 1 else non_increasing(self._scores)
        ranking = Ranking(
            order=tuple(self._order), relevance_score=tuple(scores.tolist()), is_degenerate=self._is_degenerate
        )
        return WindowedRanking(ranking=ranking, num_passes=self._num_passes, num_rounds=self._num_passes)

    def _part(self) -> slice:
        return slice(self.starts[0], self.starts[0] + self._size)


def _by_gain(gain: NDArray[np.float64]) -> Ranking:
    """Return the ranking by falling gain, float64 [n]; ties go to the input order."""
    rounded = gain.round(GAIN_DECIMALS)
    order = np.argsort(-rounded, kind="stable")
    return Ranking(
        order=tuple(order.tolist()),
        relevance_score=tuple(rounded[order].tolist()),
        is_degenerate=bool(np.ptp(rounded) == 0.0),
    )
