"""Prompts: readout positions, the token budget, and user text that spells special tokens."""

import itertools
from pathlib import Path

import pytest

from spd.backbone import load_tokenizer
from spd.errors import ConfigError, DataError
from spd.prompt import Encoder, PromptConfig, fair_cap
from spd.slate import Candidate, Slate
from tests.conftest import make_slate


def build_encoder(folder: Path, **settings: object) -> Encoder:
    return Encoder(load_tokenizer(folder), PromptConfig(**settings))


def test_every_readout_position_holds_the_separator(tiny_backbone: Path) -> None:
    encoder = build_encoder(tiny_backbone)

    encoded = encoder.encode(make_slate(5))

    assert (encoded.input_ids[encoded.readout] == encoder.separator_id).all()
    assert encoded.readout[-1] == len(encoded.input_ids) - 1
    assert (encoded.input_ids == encoder.separator_id).sum() == 6  # one before the first candidate
    assert encoded.num_truncated == 0 and not encoded.query_truncated


@pytest.mark.parametrize("identifiers", ["markers", "ordinals"])
def test_a_closing_identifier_stands_where_the_separator_stood(tiny_backbone: Path, identifiers: str) -> None:
    plain = build_encoder(tiny_backbone).encode(make_slate(5))
    encoder = build_encoder(tiny_backbone, identifiers=identifiers, identifier_place="close")

    encoded = encoder.encode(make_slate(5))

    names = encoder.identifiers(5)
    for end, name in zip(encoded.readout.tolist(), names, strict=True):
        assert encoded.input_ids[end + 1 - len(name) : end + 1].tolist() == name
    assert (encoded.input_ids == encoder.separator_id).sum() == 1  # before the first candidate
    assert len(encoded.input_ids) == len(plain.input_ids) + sum(len(name) - 1 for name in names)
    assert encoder.encode_question(make_slate(5))[: len(encoded.input_ids)] == encoded.input_ids.tolist()


def test_a_candidates_tokens_do_not_depend_on_its_neighbours(tiny_backbone: Path) -> None:
    encoder = build_encoder(tiny_backbone)
    slate = make_slate(4)
    turned = Slate(request_id="r", query=slate.query, candidates=slate.candidates[::-1])

    def pieces(slate: Slate) -> list[list[int]]:
        ends = encoder.encode(slate).readout.tolist()
        ids = encoder.encode(slate).input_ids
        return [ids[start + 1 : end].tolist() for start, end in itertools.pairwise(ends)]

    assert pieces(slate)[0] == pieces(turned)[1]  # the second candidate, seen from either side


@pytest.mark.parametrize("text", ["<|end|>", "<|start|> x <|end|><|end|>"])
def test_special_tokens_in_user_text_stay_text(tiny_backbone: Path, text: str) -> None:
    encoder = build_encoder(tiny_backbone)
    slate = Slate(request_id="r", query=text, candidates=(Candidate("a", text), Candidate("b", "x")))

    encoded = encoder.encode(slate)

    assert (encoded.input_ids == encoder.separator_id).sum() == 3
    assert encoder.tokenizer.bos_token_id not in encoded.input_ids


def test_lone_surrogates_and_empty_texts_are_ranked_like_any_text(tiny_backbone: Path) -> None:
    candidates = (Candidate("a", "\ud800"), Candidate("b", ""), Candidate("c", "\x00"))

    encoded = build_encoder(tiny_backbone).encode(Slate(request_id="r", query="\udfff", candidates=candidates))

    assert len(encoded.readout) == 3


def test_the_longest_candidates_give_way_first_and_none_is_dropped(tiny_backbone: Path) -> None:
    candidates = (Candidate("a", "x" * 100), Candidate("b", "y"), Candidate("c", "z" * 50))
    slate = Slate(request_id="r", query="q", candidates=candidates)
    full = build_encoder(tiny_backbone).encode(slate)

    encoded = build_encoder(tiny_backbone, max_tokens=len(full.input_ids) - 60).encode(slate)

    assert len(encoded.input_ids) <= len(full.input_ids) - 60
    assert len(encoded.readout) == 3
    assert encoded.num_truncated == 2


def test_limits_of_query_and_candidate_are_reported(tiny_backbone: Path) -> None:
    slate = Slate(request_id="r", query="q" * 50, candidates=(Candidate("a", "x" * 50), Candidate("b", "y")))

    encoded = build_encoder(tiny_backbone, max_query_tokens=5, max_candidate_tokens=5).encode(slate)

    assert encoded.query_truncated
    assert encoded.num_truncated == 1


def test_a_slate_that_cannot_fit_is_an_error(tiny_backbone: Path) -> None:
    with pytest.raises(DataError, match=r"slate 'r1': 9 candidates .* do not fit prompt.max_tokens=40"):
        build_encoder(tiny_backbone, max_tokens=40).encode(make_slate(9))


def test_a_separator_must_be_one_token(tiny_backbone: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompt\.separator='<sep>' is no single token"):
        build_encoder(tiny_backbone, separator="<sep>")


@pytest.mark.parametrize(
    ("lengths", "budget", "cap"),
    [([3, 5], 10, 5), ([3, 5], 8, 5), ([3, 5], 7, 4), ([10, 1, 10], 9, 4), ([2, 2, 2], 3, 1), ([2, 2, 2], 2, 0)],
)
def test_fair_cap_by_hand(lengths: list[int], budget: int, cap: int) -> None:
    assert fair_cap(lengths, budget) == cap
