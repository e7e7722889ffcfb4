"""The autoregressive ranker: spelling, the KV cache against plain forwards, constrained and free decoding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from jobs.train_config import TargetConfig, TrainConfig
from jobs.train_objectives import AnswerBatch, build_objective
from spd.answer import parse_ordinals, repair
from spd.artifact import RankerSpec
from spd.autoregressive import AnswerSpelling, AnswerState, ArRanker, build_ar_model
from spd.backbone import BackboneConfig, load_backbone, load_tokenizer
from spd.errors import ArtifactError
from spd.prompt import Encoder, Identifiers, PromptConfig
from tests.conftest import make_slate

CPU = torch.device("cpu")


def build_ranker(backbone: Path, identifiers: Identifiers) -> ArRanker:
    prompt = PromptConfig(identifiers=identifiers)
    spec = RankerSpec(
        objective="ar",
        backbone=BackboneConfig(source=str(backbone), precision="fp32"),
        backbone_sha256="",
        prompt=prompt,
        num_positions=12,
        max_trained_candidates=12,
    )
    model = build_ar_model(load_backbone(backbone, None, torch.float32), backbone).eval()
    return ArRanker(spec, Encoder(load_tokenizer(backbone), prompt), model, "test")


def spelling(ranker: ArRanker, size: int) -> AnswerSpelling:
    return AnswerSpelling(ranker.encoder, ranker.encoder.identifiers(size))


@given(st.lists(st.integers(-3, 12), max_size=20), st.integers(1, 10))
def test_a_repaired_answer_is_a_permutation_and_counts_what_was_wrong(named: list[int], size: int) -> None:
    answer = repair(named, size)

    assert sorted(answer.order) == list(range(size))
    assert len(named) == size - answer.num_missing + answer.num_repeated + answer.num_out_of_range
    assert answer.is_valid == (sorted(named) == list(range(size)))


def test_an_answer_by_hand() -> None:
    answer = parse_ordinals("Sure: [2] > [1] > [2] > [7] >[4]", 4)

    assert answer.order == (1, 0, 3, 2)
    assert (answer.num_repeated, answer.num_missing, answer.num_out_of_range) == (1, 1, 1)


@pytest.mark.parametrize("identifiers", ["markers", "ordinals"])
def test_constrained_decoding_emits_a_permutation_at_the_cost_of_its_tokens(
    tiny_backbone: Path, identifiers: Identifiers
) -> None:
    ranker = build_ranker(tiny_backbone, identifiers)
    slates = [make_slate(size, f"r{size}", "space " * size) for size in (1, 3, 12, 7)]

    rankings = ranker.rank_slates(slates)

    for slate, ranking in zip(slates, rankings, strict=True):
        size = len(slate.candidates)
        assert sorted(ranking.answer.order) == list(range(size)) and ranking.answer.is_valid
        assert ranking.num_passes == spelling(ranker, size).num_tokens
        assert identifiers == "ordinals" or ranking.num_passes == size


@pytest.mark.parametrize("identifiers", ["markers", "ordinals"])
def test_cached_steps_say_what_plain_forwards_say(tiny_backbone: Path, identifiers: Identifiers) -> None:
    ranker = build_ranker(tiny_backbone, identifiers)
    slates = [make_slate(size, f"r{size}", "space " * size) for size in (4, 12)]

    together = ranker.rank_slates(slates)

    for slate, ranking in zip(slates, together, strict=True):
        question = ranker.encoder.encode_question(slate)
        state = AnswerState(spelling(ranker, len(slate.candidates)), len(slate.candidates))
        while not state.is_complete:
            ids = torch.tensor([[*question, *state.tokens]])
            logits = ranker.model(ids, torch.tensor([[ids.shape[1] - 1]]))[0, 0]
            allowed = state.allowed()
            state.add(allowed[int(logits[allowed].argmax())])
        assert tuple(state.named) == ranking.answer.order


def test_free_decoding_is_counted_and_repaired(tiny_backbone: Path) -> None:
    ranker = build_ranker(tiny_backbone, "markers")

    (ranking,) = ranker.rank_slates([make_slate(12)], decoding="free")

    assert sorted(ranking.answer.order) == list(range(12))
    assert not ranking.answer.is_valid  # a random model repeats itself
    assert ranking.num_passes <= 12


def test_a_constrained_name_may_be_a_prefix_of_another(tiny_backbone: Path) -> None:
    ranker = build_ranker(tiny_backbone, "ordinals")
    state = AnswerState(spelling(ranker, 12), 12)

    for token in spelling(ranker, 12).spell([11, 0]):  # [12] > [1]
        assert token in state.allowed()
        state.add(token)

    assert state.named == [11, 0]


def test_an_untied_backbone_needs_its_output_embedding(tiny_backbone: Path, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_backbone, None, torch.float32)
    backbone.config.tie_word_embeddings = False

    with pytest.raises(ArtifactError, match=r"holds no lm_head\.weight"):
        build_ar_model(backbone, tmp_path)
    save_file({"lm_head.weight": torch.ones(320, 32)}, tmp_path / "model.safetensors")
    assert build_ar_model(backbone, tmp_path).logits(torch.ones(1, 32)).tolist() == [[32.0] * 320]


@pytest.mark.parametrize("draw_names", [True, False])
def test_training_answers_name_candidates_by_what_their_prompt_calls_them(
    tiny_backbone: Path, draw_names: bool
) -> None:
    ranker = build_ranker(tiny_backbone, "markers")
    encoder = ranker.encoder
    target = TargetConfig(draw_names=draw_names)
    config = TrainConfig(objective="ar", train="t", output="o", prompt=encoder.config, target=target)
    objective = build_objective(config, ranker.spec, encoder)
    slate = replace(make_slate(4), teacher_ranking=(2, 0, 3, 1))

    batches = [objective.micro_batch([slate], [1.0], [seed]) for seed in range(3)]

    for batch in batches:
        assert isinstance(batch, AnswerBatch)
        ids, wanted = batch.input_ids[0].tolist(), batch.wanted[0].tolist()
        assert wanted[:4] == [ids[place] for place in encoder.encode(slate).readout[[2, 0, 3, 1]].tolist()]
        assert wanted[4] == encoder.tokenizer.eos_token_id
    assert len({tuple(batch.wanted[0].tolist()) for batch in batches if isinstance(batch, AnswerBatch)}) == (
        3 if draw_names else 1
    )
