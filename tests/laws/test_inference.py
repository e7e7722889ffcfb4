"""Laws of the inference path: what a ranking may depend on, and what it may not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spd.batch import collate
from spd.decode import DECODERS
from spd.prompt import PromptConfig
from spd.ranker import Ranker, score_batch
from spd.slate import Candidate, Slate
from tests.conftest import build_tiny_artifact, make_slate

TEXTS = st.lists(st.text(st.characters(exclude_categories=[])), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(query=st.text(), documents=TEXTS)
def test_any_text_is_ranked_to_a_permutation(tiny_ranker: Ranker, query: str, documents: list[str]) -> None:
    ranked = tiny_ranker.rank(query, documents)

    assert sorted(place.index for place in ranked) == list(range(len(documents)))


def test_padding_and_batch_size_change_no_ranking(tiny_ranker: Ranker) -> None:
    slates = [make_slate(size, f"r{size}", query="space " * size) for size in range(1, 25)]

    alone = [tiny_ranker.decode(tiny_ranker.score(tiny_ranker.encode([slate]))[0]) for slate in slates]
    together = [tiny_ranker.decode(scores) for scores in tiny_ranker.score(tiny_ranker.encode(slates))]
    bucketed = tiny_ranker.rank_slates(slates, batch_tokens=600)

    assert [ranking.order for ranking in together] == [ranking.order for ranking in alone]
    assert [ranking.order for ranking in bucketed] == [ranking.order for ranking in alone]


def test_scores_agree_across_batches_to_float32_resolution(tiny_ranker: Ranker) -> None:
    slates = [make_slate(size, f"r{size}") for size in (3, 20)]

    alone = tiny_ranker.score(tiny_ranker.encode(slates[:1]))[0]
    together = tiny_ranker.score(tiny_ranker.encode(slates))[0]

    np.testing.assert_allclose(together, alone, atol=2e-6)


def test_merged_lora_equals_unmerged(tiny_backbone: Path, tmp_path: Path) -> None:
    unmerged = build_tiny_artifact(tiny_backbone, tmp_path / "artifact", seed=7)
    ranker = Ranker.from_pretrained(tmp_path / "artifact", device=torch.device("cpu"))
    batch = ranker.encode([make_slate(6), make_slate(11, "r2")])

    merged = ranker.score(batch)

    for one, two in zip(merged, score_batch(unmerged, batch), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
def test_bf16_swaps_only_near_ties(tiny_artifact: Path, tiny_ranker: Ranker, decoder: str) -> None:
    in_bf16 = Ranker.from_pretrained(tiny_artifact, device=torch.device("cpu"), precision="bf16")
    batch = tiny_ranker.encode([make_slate(12)])

    exact, rounded = tiny_ranker.score(batch)[0], in_bf16.score(batch)[0]

    assert np.abs(exact - rounded).max() < 0.05  # the tolerance stated in docs/method.md
    order = in_bf16.decode(rounded, decoder=decoder).order
    total = exact[list(order), range(12)].sum()
    best = exact[list(tiny_ranker.decode(exact, decoder=decoder).order), range(12)].sum()
    assert total >= best - 2 * 12 * 0.05


def test_a_causal_ranker_reads_the_candidates_in_order(tiny_ranker: Ranker) -> None:
    first = Slate(request_id="a", query="q", candidates=(Candidate("0", "x"), Candidate("1", "y")))
    second = Slate(request_id="b", query="q", candidates=(Candidate("0", "x"), Candidate("1", "other")))
    one, two = (tiny_ranker.encoder.encode(slate) for slate in (first, second))

    hidden = [
        tiny_ranker.model.backbone(input_ids=collate([e]).input_ids).last_hidden_state[0, e.readout] for e in (one, two)
    ]

    torch.testing.assert_close(hidden[0][0], hidden[1][0])  # the first candidate never sees the second
    assert not torch.allclose(hidden[0][1], hidden[1][1])


def test_an_independent_ranker_knows_no_input_order(tiny_backbone: Path, tmp_path: Path) -> None:
    build_tiny_artifact(tiny_backbone, tmp_path / "artifact", prompt=PromptConfig(attention="independent"))
    ranker = Ranker.from_pretrained(tmp_path / "artifact", device=torch.device("cpu"))
    slate = make_slate(24)
    orders = [np.random.default_rng(seed).permutation(24).tolist() for seed in range(8)]

    rankings = ranker.rank_slates([slate.reordered(order) for order in orders])

    named = [[order[i] for i in ranking.order] for order, ranking in zip(orders, rankings, strict=True)]
    assert all(one == named[0] for one in named)
    assert len({ranking.relevance_score for ranking in rankings}) == 1


def test_an_independent_candidate_sees_the_query_and_itself_only(tiny_backbone: Path, tmp_path: Path) -> None:
    build_tiny_artifact(tiny_backbone, tmp_path / "artifact", prompt=PromptConfig(attention="independent"))
    ranker = Ranker.from_pretrained(tmp_path / "artifact", device=torch.device("cpu"))
    slate, alone = make_slate(6), make_slate(1)

    together = ranker.model.read(ranker.encode([slate]))[0]

    place = ranker.encode_one(slate).order.tolist().index(0)
    torch.testing.assert_close(together[place], ranker.model.read(ranker.encode([alone]))[0, 0], atol=1e-6, rtol=1e-5)


def test_a_tail_readout_has_seen_every_candidate(tiny_backbone: Path, tmp_path: Path) -> None:
    prompt = PromptConfig(identifiers="markers", readout="tail")
    build_tiny_artifact(tiny_backbone, tmp_path / "artifact", prompt=prompt)
    ranker = Ranker.from_pretrained(tmp_path / "artifact", device=torch.device("cpu"))
    slates = [
        Slate(request_id=text, query="q", candidates=(Candidate("0", "x"), Candidate("1", text))) for text in ("y", "z")
    ]

    first, second = (ranker.model.read(ranker.encode([slate]))[0, 0] for slate in slates)

    assert not torch.allclose(first, second)
    assert sorted(ranker.rank_slates(slates)[0].order) == [0, 1]
