"""Decoders against brute force, their ties, and matrices that have no ranking."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from spd.decode import DECODERS, DecoderName, decode_scores, expected_gain, greedy_order, lap_order, non_increasing
from spd.errors import DataError

MATRICES = st.integers(1, 6).flatmap(
    lambda n: arrays(np.float32, (n, n), elements=st.floats(-1000, 1000, width=32, allow_subnormal=False))
)


def total(scores: np.ndarray, order: tuple[int, ...]) -> float:
    return float(scores.astype(np.float64)[list(order), range(len(order))].sum())


@given(MATRICES)
def test_lap_has_the_greatest_total(scores: np.ndarray) -> None:
    best = max(total(scores, order) for order in permutations(range(len(scores))))
    resolution = max(np.abs(scores).max(), 1.0) * 2**-23

    assert total(scores, tuple(lap_order(scores).tolist())) >= best - resolution


@given(MATRICES, st.sampled_from(DECODERS))
def test_every_decoder_gives_a_permutation_with_scores_that_never_rise(
    scores: np.ndarray, decoder: DecoderName
) -> None:
    ranking = decode_scores(scores, decoder)

    assert sorted(ranking.order) == list(range(len(scores)))
    assert all(0 <= score <= 1 for score in ranking.relevance_score)
    assert all(a >= b for a, b in zip(ranking.relevance_score, ranking.relevance_score[1:], strict=False))


def test_lap_and_greedy_differ_where_greed_costs() -> None:
    scores = np.array([[5, 4.5], [4, 0]], dtype=np.float32)  # greedy 5 + 0, assignment 4 + 4.5

    assert greedy_order(scores).tolist() == [0, 1]
    assert lap_order(scores).tolist() == [1, 0]


def test_expected_maximises_expected_dcg() -> None:
    scores = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    gain, discount = expected_gain(scores), 1 / np.log2(np.arange(2, 7))

    best = max(permutations(range(5)), key=lambda order: float(gain[list(order)] @ discount))

    assert decode_scores(scores, "expected").order == best


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [1, 7, 50])
def test_ties_go_to_the_input_order_and_are_told(decoder: DecoderName, size: int) -> None:
    row = np.random.default_rng(1).normal(size=size).astype(np.float32)

    ranking = decode_scores(np.tile(row, (size, 1)), decoder)

    assert ranking.order == tuple(range(size))
    assert ranking.is_degenerate == (size > 1)


@pytest.mark.parametrize("axis", [0, 1])
def test_large_constants_of_rows_and_columns_cost_no_optimum(axis: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        exact = rng.integers(-50, 50, (6, 6)).astype(np.float64)
        shift = np.expand_dims(rng.integers(-(2**20), 2**20, 6) * 4.0, axis)  # sums stay whole numbers below 2**24

        scores = (exact + shift).astype(np.float32)

        rows, columns = linear_sum_assignment(exact, maximize=True)
        assert total(exact, tuple(lap_order(scores).tolist())) == exact[rows, columns].sum()


def test_rows_equal_but_for_a_constant_are_degenerate() -> None:
    scores = np.arange(5, dtype=np.float32) + np.array([[0], [3], [-2], [7], [1]], dtype=np.float32)

    ranking = decode_scores(scores)

    assert ranking.is_degenerate and ranking.order == (0, 1, 2, 3, 4)


def test_small_scores_are_scores_too() -> None:
    scores = 1e-8 * np.random.default_rng(4).normal(size=(8, 8)).astype(np.float32)

    assert not decode_scores(scores).is_degenerate
    assert lap_order(scores).tolist() == lap_order(scores * np.float32(2**30)).tolist()


def test_two_tied_candidates_keep_their_input_order() -> None:
    scores = np.array([[0, 0, 9], [3, 1, 0], [3, 1, 0]], dtype=np.float32)

    assert lap_order(scores).tolist() == [1, 2, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(value: float) -> None:
    scores = np.eye(3, dtype=np.float32)
    scores[1, 2] = value

    with pytest.raises(DataError, match="NaN or infinity"):
        decode_scores(scores)


def test_a_confident_matrix_scores_each_place_by_its_gain() -> None:
    ranking = decode_scores(50 * np.eye(3, dtype=np.float32))

    assert ranking.relevance_score == pytest.approx((1.0, 1 / np.log2(3), 0.5))


def test_non_increasing_pools_what_rises() -> None:
    assert non_increasing(np.array([0.9, 0.2, 0.4, 0.1])).tolist() == pytest.approx([0.9, 0.3, 0.3, 0.1])
