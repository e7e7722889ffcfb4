"""Losses: values derived by hand, slates smaller than K, and inputs that overflow a naive version."""

import math

import pytest
import torch

from spd.sinkhorn import (
    expected_rank,
    first_place_cross_entropy,
    log_sinkhorn,
    pairwise_logistic,
    sinkhorn_cross_entropy,
    target_places,
)


def target(positions: list[list[int]]) -> torch.Tensor:
    """Return the target matrix of the place of each candidate, -1 where it has none."""
    matrix = torch.zeros(len(positions), len(positions[0]), len(positions[0]))
    for row, places in enumerate(positions):
        for candidate, place in enumerate(places):
            if place >= 0:
                matrix[row, candidate, place] = 1.0
    return matrix


def mask(*sizes: int) -> torch.Tensor:
    return torch.arange(max(sizes))[None] < torch.tensor(sizes)[:, None]


def test_the_sinkhorn_matrix_is_doubly_stochastic() -> None:
    scores = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))

    s = log_sinkhorn(scores, mask(6, 4), num_iterations=100).exp()

    torch.testing.assert_close(s[0].sum(0), torch.ones(6))
    torch.testing.assert_close(s[0].sum(1), torch.ones(6))
    torch.testing.assert_close(s[1, :4, :4].sum(0), torch.ones(4))
    assert s[1, :4, 4:].sum() == 0


def test_two_by_two_by_hand() -> None:
    # S of [[a, 0], [0, a]] is symmetric: S[0, 0] = e^(a/2) / (e^(a/2) + 1/e^(a/2)) ... = sigmoid(a)
    scores = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])

    s = log_sinkhorn(scores, mask(2)).exp()

    assert s[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1.0)), abs=1e-6)


def test_row_and_column_constants_change_nothing_once_converged() -> None:
    scores = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(1))
    shifted = scores + torch.tensor([[[3.0], [0.0], [-2.0], [1.0]]]) + torch.tensor([[[1.0, -4.0, 0.0, 2.0]]])

    both = [log_sinkhorn(x, mask(4), num_iterations=200) for x in (scores, shifted)]

    torch.testing.assert_close(both[0], both[1], atol=1e-4, rtol=1e-4)


def test_equal_scores_lose_ln_n_whatever_k_and_padding() -> None:
    position = target([[2, 0, 1, -1], [1, 0, -1, -1]])

    loss = sinkhorn_cross_entropy(torch.zeros(2, 4, 7), position, mask(4, 2))

    assert loss.tolist() == pytest.approx([math.log(4), math.log(2)], abs=1e-6)


def test_a_small_slate_in_a_large_batch_loses_what_it_loses_alone() -> None:
    scores = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    position = target([[4, 1, 0, 3, 2], [2, 0, 1, -1, -1]])

    together = sinkhorn_cross_entropy(scores, position, mask(5, 3))
    alone = sinkhorn_cross_entropy(scores[1:, :3], position[1:, :3, :3], mask(3))

    assert together[1].item() == pytest.approx(alone.item(), abs=1e-6)


def test_a_perfect_matrix_loses_nothing_and_a_prefix_scores_its_own_places() -> None:
    scores = 50 * torch.eye(4)[None]
    full, prefix = target([[0, 1, 2, 3]]), target([[0, 1, -1, -1]])
    wrong_tail = scores[:, [0, 1, 3, 2]]

    assert sinkhorn_cross_entropy(scores, full, mask(4)).item() == pytest.approx(0, abs=1e-6)
    assert sinkhorn_cross_entropy(wrong_tail, prefix, mask(4)).item() == pytest.approx(0, abs=1e-6)
    assert sinkhorn_cross_entropy(wrong_tail, full, mask(4)).item() > 10


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_large_scores_give_finite_losses_and_gradients(size: float) -> None:
    scores = (size * torch.eye(5)[None]).repeat(2, 1, 1).requires_grad_()
    position = target([[4, 3, 2, 1, 0], [1, 0, -1, -1, -1]])

    loss = sinkhorn_cross_entropy(scores, position, mask(5, 2)) + pairwise_logistic(scores, position, mask(5, 2))
    loss.sum().backward()

    assert torch.isfinite(loss).all()
    assert scores.grad is not None and torch.isfinite(scores.grad).all()


def test_one_candidate_and_a_row_of_padding_lose_nothing() -> None:
    scores = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(3))
    valid = torch.tensor([[True], [False]])
    position = target([[0], [-1]])

    assert sinkhorn_cross_entropy(scores, position, valid).tolist() == [0.0, 0.0]
    assert pairwise_logistic(scores, position, valid).tolist() == [0.0, 0.0]


def test_expected_rank_by_hand() -> None:
    scores = torch.log(torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]))

    assert expected_rank(scores, mask(2))[0].tolist() == pytest.approx([0.75, 0.5])


def test_pairwise_loss_by_hand() -> None:
    # expected ranks 0 and 1, right order: softplus(0 - 1); wrong order: softplus(1 - 0)
    scores = torch.tensor([[[100.0, 0.0], [0.0, 100.0]]])

    right = pairwise_logistic(scores, target([[0, 1]]), mask(2)).item()
    wrong = pairwise_logistic(scores, target([[1, 0]]), mask(2)).item()

    assert right == pytest.approx(math.log1p(math.exp(-1)))
    assert wrong == pytest.approx(math.log1p(math.exp(1)))


def test_dcg_weights_by_hand() -> None:
    # equal scores: every place loses ln 3, whatever the weights; a wrong last place costs its weight's share
    uniform = torch.zeros(1, 3, 3)
    scores = 50 * torch.eye(3)[None][:, [0, 2, 1]]
    order = target([[0, 1, 2]])

    assert sinkhorn_cross_entropy(uniform, order, mask(3), rank_weights="dcg").item() == pytest.approx(math.log(3))
    flat, weighted = (sinkhorn_cross_entropy(scores, order, mask(3), rank_weights=w).item() for w in ("uniform", "dcg"))
    second, third = 1 / math.log2(3), 1 / 2
    assert flat / weighted == pytest.approx((2 / 3) / ((second + third) / (1 + second + third)), rel=1e-4)


def test_a_soft_target_is_the_mean_of_its_teachers() -> None:
    scores = torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(5))
    one, two = target([[0, 1, 2]]), target([[1, 0, 2]])

    soft = sinkhorn_cross_entropy(scores, (one + two) / 2, mask(3))

    apart = (sinkhorn_cross_entropy(scores, one, mask(3)) + sinkhorn_cross_entropy(scores, two, mask(3))) / 2
    torch.testing.assert_close(soft, apart)
    assert target_places((one + two) / 2).tolist() == [[0.5, 0.5, 2.0]]  # the first two are no pair


def test_first_place_loss_reads_one_column_of_the_real_candidates() -> None:
    scores = torch.full((1, 3, 3), 9.0)
    scores[0, :, 0] = torch.tensor([math.log(3), 0.0, 77.0])

    loss = first_place_cross_entropy(scores, target([[0, 1, -1]]), torch.tensor([[True, True, False]]))

    assert loss.item() == pytest.approx(-math.log(3 / 4))
