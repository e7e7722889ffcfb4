"""Batches: right padding, masks, and groups under a token budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spd.batch import collate, plan_batches
from spd.prompt import EncodedSlate


def encoded(length: int, readout: list[int]) -> EncodedSlate:
    return EncodedSlate(
        input_ids=np.arange(1, length + 1, dtype=np.int32),
        readout=np.array(readout, dtype=np.int32),
        order=np.arange(len(readout), dtype=np.int32),
        features=np.full((len(readout), 2), 0.5, dtype=np.float32),
        prefix_tokens=1,
    )


def test_collate_pads_on_the_right() -> None:
    batch = collate([encoded(3, [2]), encoded(5, [1, 4])])

    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert batch.readout.tolist() == [[2, 0], [1, 4]]
    assert batch.candidate_mask.tolist() == [[True, False], [True, True]]
    assert batch.num_candidates == [1, 2]
    assert batch.features.tolist() == [[[0.5, 0.5], [0.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]]]


def test_a_row_keeps_the_whole_prompt() -> None:
    slate = encoded(5, [1, 4])

    again = EncodedSlate.from_row(slate.to_row())

    for name in ("input_ids", "readout", "order", "features"):
        np.testing.assert_array_equal(getattr(again, name), getattr(slate, name))
    assert again.prefix_tokens == 1


def test_groups_hold_similar_lengths_longest_first() -> None:
    assert plan_batches([10, 2, 9, 3], max_tokens=20) == [[0, 2], [3, 1]]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_slate_is_in_one_group_within_budget(lengths: list[int], budget: int) -> None:
    groups = plan_batches(lengths, budget)

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or max(lengths[i] for i in group) * len(group) <= budget for group in groups)
