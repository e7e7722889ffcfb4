"""The heads: shapes, sizes, masks, and float32 whatever the parameters are."""

from typing import get_args

import pytest
import torch

from spd.head import HeadName, build_head

HEADS = get_args(HeadName)


@pytest.mark.parametrize("name", HEADS)
def test_scores_have_a_row_a_candidate_and_a_column_a_position(name: HeadName) -> None:
    scores = build_head(name, 32, 7)(torch.randn(2, 5, 32), torch.ones(2, 5, dtype=torch.bool))

    assert scores.shape == (2, 5, 7)
    assert scores.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("linear", 1024 * 512 + 512 + 512 * 50 + 50),
        ("self_attention", 1024 * 512 + 512 + 2 * 2_102_784 + 1024 + 512 * 50 + 50),
        ("slot_query", 1024 * 512 + 512 + 50 * 512 + 2 * 2_102_784 + 1024),
    ],
)
def test_parameter_counts_at_the_papers_size(name: HeadName, count: int) -> None:
    assert sum(p.numel() for p in build_head(name, 1024, 50).parameters()) == count


@pytest.mark.parametrize("name", HEADS)
def test_padding_changes_no_real_candidates_scores(name: HeadName) -> None:
    torch.manual_seed(0)
    head = build_head(name, 32, 6)
    hidden = torch.randn(1, 3, 32)
    padded = torch.cat([hidden, 100 * torch.randn(1, 2, 32)], 1)

    alone = head(hidden, torch.ones(1, 3, dtype=torch.bool))
    together = head(padded, torch.tensor([[True, True, True, False, False]]))

    torch.testing.assert_close(together[:, :3], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_bf16_still_computes_in_float32(name: HeadName) -> None:
    torch.manual_seed(0)
    head = build_head(name, 32, 6).bfloat16()
    hidden, mask = torch.randn(1, 4, 32), torch.ones(1, 4, dtype=torch.bool)

    in_bf16 = head(hidden, mask)

    assert torch.equal(in_bf16, head.float()(hidden, mask))


@pytest.mark.parametrize("name", HEADS)
def test_turning_the_candidates_turns_the_rows(name: HeadName) -> None:
    torch.manual_seed(0)
    head = build_head(name, 32, 6)
    hidden, mask = torch.randn(1, 4, 32), torch.ones(1, 4, dtype=torch.bool)

    torch.testing.assert_close(head(hidden.flip(1), mask), head(hidden, mask).flip(1), atol=1e-5, rtol=1e-5)
