"""Metrics against values worked out by hand, and the laws that any ranking metric keeps."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spd.errors import DataError
from spd.metrics import (
    CLICK_THRESHOLD,
    GRADE_THRESHOLD,
    METRIC_NAMES,
    auc,
    default_positive_threshold,
    estimate,
    evaluate_orders,
    kendall_tau,
    ndcg_at_k,
    paired_difference,
    recall_at_k,
    reciprocal_rank,
    slate_metrics,
)
from spd.slate import Candidate, Slate

relevances = st.lists(st.sampled_from([None, 0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=12)


def make_slate(
    relevance: tuple[float | None, ...] | None, teacher: tuple[int, ...] | None = None, size: int = 3
) -> Slate:
    return Slate(
        request_id="a",
        query="q",
        candidates=tuple(Candidate(str(i), f"text {i}") for i in range(size)),
        relevance=relevance,
        teacher_ranking=teacher,
    )


def test_ndcg_is_dcg_over_ideal_with_linear_gain():
    # (2 + 3/log2(3)) / (3 + 2/log2(3)) = 3.8928 / 4.2619
    assert ndcg_at_k((1, 0, 3, 2), (3.0, 2.0, 0.0, 1.0), 2) == pytest.approx(0.913402, abs=1e-6)


def test_ndcg_counts_unjudged_as_no_gain():
    assert ndcg_at_k((1, 0), (1.0, None), 1) == 0.0
    assert ndcg_at_k((1, 0), (1.0, None), 2) == pytest.approx(0.630930, abs=1e-6)  # 1/log2(3)


def test_ndcg_is_undefined_without_gain():
    assert ndcg_at_k((0, 1), (0.0, None), 2) is None


def test_recall_is_the_share_of_positives_in_the_top_k():
    assert recall_at_k((2, 0, 1), (1.0, 1.0, 0.0), 1) == 0.0
    assert recall_at_k((2, 0, 1), (1.0, 1.0, 0.0), 2) == 0.5
    assert recall_at_k((0, 1), (1.0, 2.0), 1, positive_threshold=GRADE_THRESHOLD) == 0.0
    assert recall_at_k((0, 1), (None, 0.0), 1) is None


def test_auc_is_the_share_of_pairs_in_right_order_without_the_unjudged():
    # positives 0 and 3, negatives 1 and 4: only the pair (3, 1) is wrong
    assert auc((0, 1, 2, 3, 4), (1.0, 0.0, None, 1.0, 0.0)) == 0.75


@pytest.mark.parametrize("relevance", [(1.0, 1.0), (0.0, 0.0), (1.0, None), (None, None)])
def test_auc_needs_both_kinds(relevance: tuple[float | None, ...]):
    assert auc((0, 1), relevance) is None


def test_reciprocal_rank_is_of_the_first_positive():
    assert reciprocal_rank((2, 1, 0), (1.0, 1.0, 0.0)) == 0.5
    assert reciprocal_rank((0, 1), (0.0, None)) is None


def test_kendall_tau_covers_only_what_the_teacher_ranks():
    # of the teacher's pairs (1, 0), (1, 3), (0, 3) the first is wrong: (2 - 1) / 3
    assert kendall_tau((0, 1, 2, 3), (1, 0, 3)) == pytest.approx(1 / 3)
    assert kendall_tau((0, 1), (1,)) is None


def test_thresholds_tell_clicks_from_grades():
    assert default_positive_threshold([(0.0, 1.0), None, (0.2, None)]) == CLICK_THRESHOLD
    assert default_positive_threshold([(0.0, 1.0), (0.0, 3.0)]) == GRADE_THRESHOLD
    assert recall_at_k((0,), (1e-9,), 1, positive_threshold=CLICK_THRESHOLD) == 1.0


def test_estimate_skips_the_undefined():
    # two values: resampled means are 1, 2 or 3 with probability 1/4, 1/2, 1/4
    result = estimate([1.0, None, 3.0], seed=0)

    assert (result.value, result.low, result.high, result.n) == (2.0, 1.0, 3.0, 2)


def test_estimate_of_nothing_is_null_in_json():
    assert json.loads(json.dumps(estimate([None], seed=0).to_json())) == {
        "value": None,
        "low": None,
        "high": None,
        "n": 0,
    }


def test_estimate_is_a_function_of_the_seed():
    values = [0.0, 0.1, 0.5, 0.7, 1.0]

    assert estimate(values, seed=1) == estimate(values, seed=1)
    assert estimate(values, seed=1) != estimate(values, seed=2)


def test_paired_difference_takes_slates_defined_on_both_sides():
    result = paired_difference([1.0, 0.5, None], [0.0, 0.5, 1.0], seed=0)

    assert (result.value, result.low, result.high, result.n) == (0.5, 0.0, 1.0, 2)


def test_paired_difference_refuses_unequal_lengths():
    with pytest.raises(DataError, match="1 values against 2"):
        paired_difference([1.0], [1.0, 0.0], seed=0)


def test_evaluate_orders_averages_and_counts():
    slates = [make_slate((1.0, 0.0, None), (0, 1, 2)), make_slate((0.0, 0.0, 0.0))]

    result = evaluate_orders(slates, [(0, 1, 2), (2, 1, 0)], seed=0, num_resamples=50)

    assert set(result) == {*METRIC_NAMES, "unjudged_share"}
    assert (result["auc"].value, result["auc"].n) == (1.0, 1)
    assert (result["kendall_tau"].value, result["kendall_tau"].n) == (1.0, 1)
    assert (result["unjudged_share"].value, result["unjudged_share"].n) == (pytest.approx(1 / 6), 2)


def test_one_cluster_has_no_spread():
    # all three values are drawn together, so that every resample has the mean of (1 + 2 + 6) / 3
    result = estimate([1.0, 2.0, 6.0], seed=0, num_resamples=100, clusters=["q", "q", "q"])

    assert (result.value, result.low, result.high, result.n) == (3.0, 3.0, 3.0, 3)


def test_clusters_are_drawn_whole():
    # a holds 0 and 2, b holds 7 (and an undefined value): the resamples aa, ab, bb have the means 1, 9/3 and 7
    result = estimate([0.0, 7.0, 2.0, None], seed=0, num_resamples=500, clusters=["a", "b", "a", "b"])
    means = {estimate([0.0, 7.0, 2.0], seed=seed, num_resamples=1, clusters="aba").low for seed in range(30)}

    assert (result.value, result.low, result.high, result.n) == (3.0, 1.0, 7.0, 3)
    assert means == {1.0, 3.0, 7.0}


def test_clusters_of_one_are_no_clusters():
    values = [0.1, 0.7, None, 0.4]

    assert estimate(values, seed=3) == estimate(values, seed=3, clusters=["a", "b", "c", "d"])


def test_a_paired_difference_resamples_queries():
    # differences 1, 1 (query a) and -1 (query b): the resamples aa, ab, bb have the means 1, 1/3 and -1
    result = paired_difference([2.0, 3.0, 0.0], [1.0, 2.0, 1.0], seed=0, num_resamples=500, clusters=["a", "a", "b"])

    assert (result.value, result.low, result.high) == (pytest.approx(1 / 3), -1.0, 1.0)


def test_evaluate_orders_resamples_queries_if_asked():
    slates = [make_slate((1.0, 0.0, 0.0)), make_slate((0.0, 0.0, 1.0))]  # of one query
    orders = [(0, 1, 2), (0, 1, 2)]

    by_slate = evaluate_orders(slates, orders, seed=0, num_resamples=200)["auc"]
    by_query = evaluate_orders(slates, orders, seed=0, num_resamples=200, bootstrap_by="query")["auc"]

    assert (by_slate.value, by_slate.low, by_slate.high) == (0.5, 0.0, 1.0)
    assert (by_query.value, by_query.low, by_query.high) == (0.5, 0.5, 0.5)


def test_clusters_must_be_as_many_as_values():
    with pytest.raises(DataError, match="1 clusters for 2 values"):
        estimate([0.0, 1.0], seed=0, clusters=["a"])


def test_slate_without_labels_is_wholly_unjudged():
    row = slate_metrics((0, 1, 2), make_slate(None), positive_threshold=CLICK_THRESHOLD)

    assert row["unjudged_share"] == 1.0
    assert {row[name] for name in METRIC_NAMES} == {None}


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3)])
def test_evaluate_orders_refuses_what_is_no_permutation(order: tuple[int, ...]):
    with pytest.raises(DataError, match=r"no permutation of 0\.\.2"):
        evaluate_orders([make_slate((1.0, 0.0, 0.0))], [order], seed=0)


@given(relevances)
@settings(deadline=None)
def test_the_ideal_order_scores_one_everywhere(relevance: list[float | None]):
    order = sorted(range(len(relevance)), key=lambda index: -(relevance[index] or 0.0))

    assert ndcg_at_k(order, relevance, 5) in (None, pytest.approx(1.0))
    assert auc(order, relevance) in (None, 1.0)
    assert reciprocal_rank(order, relevance) in (None, 1.0)


@given(relevances, st.randoms())
@settings(deadline=None)
def test_reversing_an_order_mirrors_auc_and_tau(relevance: list[float | None], random):
    order = random.sample(range(len(relevance)), len(relevance))
    teacher = random.sample(range(len(relevance)), len(relevance))
    value, tau = auc(order, relevance), kendall_tau(order, teacher)

    assert auc(order[::-1], relevance) == (None if value is None else pytest.approx(1 - value))
    assert kendall_tau(order[::-1], teacher) == (None if tau is None else pytest.approx(-tau))
