"""Training data: orders that seed, epoch and id decide, shares of a batch, and targets that follow the shuffle."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobs.train_config import TrainConfig
from jobs.train_data import epoch_order, micro_batches, prefetch, shuffled
from jobs.train_objectives import Objective, build_objective
from spd.artifact import RankerSpec
from spd.backbone import BackboneConfig, load_tokenizer
from spd.prompt import Encoder, PromptConfig
from spd.slate import Slate
from tests.conftest import make_slate


def labelled(number: int, size: int = 5) -> Slate:
    return replace(make_slate(size, f"r{number}"), teacher_ranking=tuple(reversed(range(size))))


@given(st.integers(0, 5), st.integers(0, 3))
def test_shuffling_moves_targets_with_their_candidates(seed: int, epoch: int) -> None:
    slate = replace(labelled(1), relevance=(0.0, 1.0, 2.0, 3.0, 4.0))

    mixed = shuffled(slate, seed, epoch)

    assert mixed.teacher_ranking is not None and mixed.relevance is not None
    assert [mixed.candidates[i] for i in mixed.teacher_ranking] == [slate.candidates[i] for i in (4, 3, 2, 1, 0)]
    assert {c.id: r for c, r in zip(mixed.candidates, mixed.relevance, strict=True)} == {
        f"c{i}": float(i) for i in range(5)
    }


def test_orders_depend_on_seed_epoch_and_id_alone() -> None:
    slates = [labelled(i) for i in range(30)]

    def ids(order: list[Slate], window: int, seed: int, epoch: int) -> list[str]:
        return [slate.request_id for slate in epoch_order(iter(order), window, seed, epoch)]

    first = ids(slates, 100, 0, 0)
    assert first == ids(slates[::-1], 100, 0, 0)
    assert sorted(first) == sorted(slate.request_id for slate in slates)
    assert first != ids(slates, 100, 0, 1) and first != ids(slates, 100, 1, 0)
    large = labelled(0, size=20)
    assert shuffled(large, 0, 0) == shuffled(large, 0, 0) != shuffled(large, 0, 1)


@pytest.mark.parametrize("num_slates", [8, 9, 10])
def test_each_slate_keeps_its_share_through_the_epochs(num_slates: int) -> None:
    slates = [labelled(i) for i in range(num_slates)]

    epochs = [[s.request_id for s in epoch_order(iter(slates), 100, 0, epoch, num_shares=3)] for epoch in range(3)]

    shares = [{name: place % 3 for place, name in enumerate(order)} for order in epochs]
    assert shares[0] == shares[1] == shares[2] and len(shares[0]) == num_slates
    assert epochs[0] != epochs[1]


def test_a_stream_larger_than_the_window_loses_nothing() -> None:
    slates = [labelled(i) for i in range(25)]

    ids = [slate.request_id for slate in epoch_order(iter(slates), 10, 0, 0)]

    assert sorted(ids) == sorted(slate.request_id for slate in slates)
    assert set(ids[:10]) == {f"r{i}" for i in range(10)}


@pytest.mark.parametrize(("num_slates", "world_size"), [(8, 2), (7, 2), (1, 2), (5, 1), (8, 1)])
def test_ranks_share_a_batch_with_weights_that_sum_to_one(
    tiny_backbone: Path, num_slates: int, world_size: int
) -> None:
    make = objective(tiny_backbone).micro_batch
    slates = [labelled(i, 3 + i % 3) for i in range(num_slates)]
    num_micro = 8 // (2 * world_size)

    shares = [
        micro_batches(slates, make, range(num_slates), rank, world_size, 2, num_micro) for rank in range(world_size)
    ]

    assert all(len(share) == num_micro for share in shares)
    weights = torch.cat([micro.weight for share in shares for micro in share])
    assert weights.sum().item() == pytest.approx(1)
    assert int((weights > 0).sum()) == num_slates


def objective(backbone: Path) -> Objective:
    config = TrainConfig(train="t", output="o", backbone=BackboneConfig(source=str(backbone)))
    spec = RankerSpec(backbone=config.backbone, backbone_sha256="", num_positions=8, max_trained_candidates=8)
    return build_objective(config, spec, Encoder(load_tokenizer(backbone), PromptConfig()))


def test_few_candidates_keep_the_positives() -> None:
    slate = replace(labelled(1, 9), relevance=(0.0,) * 8 + (1.0,))

    drawn = [shuffled(slate, 0, epoch, max_candidates=3) for epoch in range(6)]

    assert all(len(one.candidates) == 3 and sum(one.relevance or ()) == 1.0 for one in drawn)
    assert all(one.teacher_ranking is not None and sorted(one.teacher_ranking) == [0, 1, 2] for one in drawn)
    assert len({one.candidates for one in drawn}) > 1


def test_few_candidates_put_the_positives_anywhere() -> None:
    slate = replace(labelled(1, 20), relevance=(0.0,) * 19 + (1.0,))

    places = [(shuffled(slate, 0, epoch, max_candidates=5).relevance or ()).index(1.0) for epoch in range(1000)]

    counts = [places.count(place) for place in range(5)]
    assert all(abs(count - 200) < 5 * (1000 * 0.2 * 0.8) ** 0.5 for count in counts)  # five standard deviations


def test_prefetch_keeps_order_and_passes_errors_on() -> None:
    def items() -> object:
        yield from ([1], [2], [3])
        raise ValueError("broken")

    found: list[object] = []
    with pytest.raises(ValueError, match="broken"):
        for item in prefetch(items()):
            found.append(item)
    assert found == [[1], [2], [3]]
    assert list(islice(prefetch(iter([[1]])), 5)) == [[1]]
