"""Windows over large slates: laws with a perfect window ranker, and the tiny ranker beyond its K."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spd.errors import ConfigError
from spd.ranker import Ranker
from spd.slate import Ranking, Slate
from spd.windows import (
    WindowConfig,
    interleaved_windows,
    rank_one_round,
    rank_sliding,
    ranking_of_order,
    window_starts,
)
from tests.conftest import make_slate

sizes = st.integers(1, 25).flatmap(lambda size: st.tuples(st.integers(1, 300), st.just(size), st.integers(1, size)))


def slate_of(merits: Sequence[int], request_id: str = "r") -> Slate:
    """Return a slate whose candidates' ids are their merits."""
    plain = make_slate(len(merits), request_id)
    named = [type(c)(str(merit), c.text) for c, merit in zip(plain.candidates, merits, strict=True)]
    return Slate(request_id=request_id, query="q", candidates=tuple(named))


def merits_of(slate: Slate) -> list[int]:
    return [int(candidate.id) for candidate in slate.candidates]


def perfect(windows: Sequence[Slate]) -> list[Ranking]:
    return [ranking_of_order(np.argsort(merits_of(window))[::-1].tolist()) for window in windows]


def perfect_gain(windows: Sequence[Slate]) -> list[NDArray[np.float64]]:
    ranks = [np.argsort(np.argsort(merits_of(window))[::-1]) for window in windows]
    return [1.0 / np.log2(2 + rank) for rank in ranks]


def assert_is_ranking(ranking: Ranking, size: int) -> None:
    scores = np.array(ranking.relevance_score)
    assert sorted(ranking.order) == list(range(size))
    assert len(scores) == size and scores.min() >= 0 and scores.max() <= 1 and (np.diff(scores) <= 0).all()


@given(sizes, st.randoms())
@settings(deadline=None, max_examples=60)
def test_sliding_puts_the_best_in_front(shape: tuple[int, int, int], random) -> None:
    num_candidates, size, stride = shape
    merits = random.sample(range(num_candidates), num_candidates)

    (found,) = rank_sliding([slate_of(merits)], size, stride, perfect)

    assert_is_ranking(found.ranking, num_candidates)
    carried = size if num_candidates <= size else size - stride  # at least `stride` wherever 2 x stride <= size
    best = [merits[index] for index in found.ranking.order[:carried]]
    assert best == sorted(merits, reverse=True)[:carried]
    assert found.num_passes == found.num_rounds == len(window_starts(num_candidates, size, stride))


@given(sizes, st.integers(1, 4), st.randoms())
@settings(deadline=None, max_examples=60)
def test_one_round_is_a_ranking_from_windows_of_like_size(shape: tuple[int, int, int], rounds: int, random) -> None:
    num_candidates, size, _ = shape
    slate = slate_of(random.sample(range(num_candidates), num_candidates))
    windows = interleaved_windows(slate, size, rounds)

    (found,) = rank_one_round([slate], size, rounds, perfect, perfect_gain)

    assert_is_ranking(found.ranking, num_candidates)
    assert {len(window) for window in windows} <= {num_candidates // (len(windows) // rounds) + k for k in (0, 1)}
    assert max(map(len, windows)) <= size
    assert sorted(index for window in windows for index in window) == sorted([*range(num_candidates)] * rounds)
    assert found.num_passes == (1 if num_candidates <= size else len(windows))


def test_interleavings_by_hand() -> None:
    windows = interleaved_windows(make_slate(7), 3, 3)

    assert windows[:3] == [[0, 3, 6], [1, 4], [2, 5]]
    for window in windows:  # one of each stretch 0-2, 3-5, and at most the 6
        assert [index // 3 for index in window] in ([0, 1], [0, 1, 2])
    assert windows[3:6] != windows[:3] and windows == interleaved_windows(make_slate(7), 3, 3)
    assert windows != interleaved_windows(make_slate(7, "another"), 3, 3)


def test_gains_are_averaged_and_ties_go_to_the_input_order() -> None:
    # windows of round one: {0, 2} and {1, 3}; 0 and 1 win theirs with gain 1, 2 and 3 get 1/log2(3)
    (found,) = rank_one_round([slate_of([9, 2, 8, 1])], 2, 1, perfect, perfect_gain)

    assert found.ranking.order == (0, 1, 2, 3)
    assert found.ranking.relevance_score == pytest.approx((1.0, 1.0, 0.63093, 0.63093), abs=1e-6)
    assert (found.num_passes, found.num_rounds) == (2, 1)


def test_one_round_ranks_the_best_first_and_nearly_sorts() -> None:
    merits = np.random.default_rng(0).permutation(100).tolist()

    (found,) = rank_one_round([slate_of(merits)], 20, 4, perfect, perfect_gain)

    ranked = [merits[index] for index in found.ranking.order]
    assert ranked[0] == 99 and set(ranked[:5]) <= set(range(85, 100))
    assert np.corrcoef(ranked, range(99, -1, -1))[0, 1] > 0.9


def test_windows_of_all_slates_move_in_lockstep() -> None:
    seen: list[list[int]] = []

    def rank(windows: Sequence[Slate]) -> list[Ranking]:
        seen.append([len(window.candidates) for window in windows])
        return perfect(windows)

    found = rank_sliding([slate_of(range(size), f"r{size}") for size in (9, 3, 25)], 10, 5, rank)

    assert seen == [[9, 3, 10], [10], [10], [10]]
    assert [one.num_passes for one in found] == [1, 1, 4]


def test_a_sliding_score_is_the_last_windows_made_non_increasing() -> None:
    # windows [1, 3) then [0, 2): merits 0 1 2 -> 0 2 1 -> 2 0 1; place 2 keeps its .63 of the first window
    (found,) = rank_sliding([slate_of([0, 1, 2])], 2, 1, perfect)

    assert found.ranking.order == (2, 0, 1)
    assert found.ranking.relevance_score == pytest.approx((1.0, 0.63093, 0.63093), abs=1e-5)


def test_rankgpts_windows() -> None:
    assert window_starts(100, 20, 10) == [80, 70, 60, 50, 40, 30, 20, 10, 0]
    assert window_starts(45, 20, 10) == [25, 15, 5, 0]
    assert window_starts(7, 20, 10) == [0]


@pytest.mark.parametrize("config", [WindowConfig(size=33), WindowConfig(size=4, stride=5), WindowConfig(rounds=0)])
def test_windows_that_do_not_fit_are_refused(config: WindowConfig) -> None:
    with pytest.raises(ConfigError, match=r"size=33 exceeds 32|stride=5 exceeds|rounds=0 must be at least 1"):
        config.resolve(32)


@pytest.mark.parametrize(
    ("windows", "passes"),
    [
        (WindowConfig(), 2 * 4),  # ceil(100 / 32) windows, twice
        (WindowConfig(size=20, rounds=3), 3 * 5),
        (WindowConfig(method="sliding", size=20), 9),
        (WindowConfig(method="sliding"), 6),  # 68, 52, 36, 20, 4, 0
    ],
)
def test_a_ranker_ranks_more_than_one_pass_holds(tiny_ranker: Ranker, windows: WindowConfig, passes: int) -> None:
    slates = [make_slate(100, "large"), make_slate(9, "small")]

    large, small = tiny_ranker.rank_in_windows(slates, windows=windows)

    assert_is_ranking(large.ranking, 100)
    assert (large.num_passes, small.num_passes) == (passes, 1)
    assert small.ranking.order == tiny_ranker.rank_slates([slates[1]])[0].order
    assert tiny_ranker.rank_slates(slates, windows=windows) == [large.ranking, small.ranking]


@pytest.mark.parametrize("method", ["one_round", "sliding"])
def test_one_window_is_the_plain_ranking(tiny_ranker: Ranker, method: str) -> None:
    slate = make_slate(32)
    (scored,) = tiny_ranker.score_slates([slate])
    plain = tiny_ranker.decode(scored[2], scored[1].order)

    config = WindowConfig(method="sliding") if method == "sliding" else WindowConfig()

    assert tiny_ranker.rank_slates([slate], windows=config) == [plain]


def test_rank_takes_a_hundred_documents(tiny_ranker: Ranker) -> None:
    ranked = tiny_ranker.rank("space", [f"movie {i}" for i in range(100)])

    assert sorted(place.index for place in ranked) == list(range(100))
    assert len(tiny_ranker.rank("space", [f"movie {i}" for i in range(100)], top_n=3)) == 3
