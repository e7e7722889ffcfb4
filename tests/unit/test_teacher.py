"""Item-KNN against scores worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spd.errors import DataError
from spd.teacher import ItemKnn

HISTORIES = [[0, 1], [0, 1], [0, 2], [3]]  # popularity 3, 2, 1, 1; together: (0, 1) twice, (0, 2) once


def test_score_is_the_cosine_by_default():
    scores = ItemKnn.fit(HISTORIES, 4).score([0], [1, 2, 3])

    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, [2 / 6**0.5, 1 / 3**0.5, 0.0])


def test_exponents_damp_each_side():
    undamped = ItemKnn.fit(HISTORIES, 4, history_exponent=0, candidate_exponent=0)
    by_candidate = ItemKnn.fit(HISTORIES, 4, history_exponent=0, candidate_exponent=1)

    np.testing.assert_allclose(undamped.score([0], [1, 2, 3]), [2, 1, 0])
    np.testing.assert_allclose(by_candidate.score([0], [1, 2, 3]), [1, 1, 0])


def test_older_items_weigh_less_and_the_oldest_nothing():
    histories = [[0, 2], [1, 3]]

    np.testing.assert_allclose(ItemKnn.fit(histories, 4, decay=0.8).score([0, 1], [2, 3]), [0.8, 1.0])
    np.testing.assert_allclose(ItemKnn.fit(histories, 4, num_recent=1).score([0, 1], [2, 3]), [0.0, 1.0])


def test_own_row_is_taken_out():
    # without [0, 1] once: together once, popularity 2 and 1
    np.testing.assert_allclose(ItemKnn.fit(HISTORIES, 4).score([0], [1], own_row=[0, 1]), [1 / 2**0.5])


def test_rank_breaks_ties_by_popularity_then_input_order():
    teacher = ItemKnn.fit([[0, 1], [2], [3], [3]], 6)

    assert teacher.rank([0], [4, 2, 5, 3, 1]) == (4, 3, 1, 0, 2)


def test_an_empty_history_ranks_by_popularity():
    assert ItemKnn.fit(HISTORIES, 4).rank([], [3, 1, 0]) == (2, 1, 0)


def test_a_repeat_in_one_history_counts_once():
    assert ItemKnn.fit([[0, 1, 0, 1]], 2).popularity.tolist() == [1, 1]


@pytest.mark.parametrize("item", [-1, 4])
def test_unknown_items_are_refused(item: int):
    with pytest.raises(DataError, match=r"outside 0\.\.3"):
        ItemKnn.fit([[0, item]], 4)


@pytest.mark.parametrize("histories", [[], [[]], [[0], [1]]])
def test_histories_without_pairs_score_nothing(histories: list[list[int]]):
    np.testing.assert_allclose(ItemKnn.fit(histories, 3).score([0, 1], [2]), [0.0])


@given(st.lists(st.lists(st.integers(0, 5), unique=True), min_size=1, max_size=8))
def test_taking_out_a_row_equals_fitting_without_it(histories: list[list[int]]):
    own, others = histories[0], histories[1:]
    left_out = ItemKnn.fit(histories, 6).score([0, 1, 2], [3, 4, 5, 0], own_row=own)

    np.testing.assert_allclose(left_out, ItemKnn.fit(others, 6).score([0, 1, 2], [3, 4, 5, 0]))


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=4))
def test_rank_is_a_permutation(candidates: list[int], history: list[int]):
    ranking = ItemKnn.fit(HISTORIES, 6).rank(history, candidates)

    assert sorted(ranking) == list(range(6))
