"""The autoregressive ranker: the same backbone and slate, the order written out name by name. The teacher of a student,
and what single pass decoding is measured against.

B slates, L tokens, T answer tokens, V vocabulary, D hidden. An answer names candidates by their identifiers in the
prompt: markers of one token (` C A B`, N passes; the default of training, see docs/decisions.md) or ordinals as text
(` [3] > [1] > [2]`, about 5N passes).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from spd.answer import Answer, parse_ordinals, repair
from spd.artifact import RankerSpec, check_backbone, load_encoder, load_merged_backbone, load_spec, model_version
from spd.backbone import Precision, cast_parameters, default_device, resolve_dtype
from spd.batch import pad_ids, plan_batches
from spd.errors import ArtifactError
from spd.prompt import Encoder
from spd.slate import Slate

Decoding = Literal["constrained", "free"]

BETWEEN_ORDINALS = " >"
OUTPUT_WEIGHT = "lm_head.weight"
DEFAULT_BATCH_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class ArRanking:
    """One slate's answer and the forward passes that it took: its prefill, then one a token after the first."""

    answer: Answer
    num_passes: int


class ArModel(nn.Module):
    """Backbone plus output embedding: logits at the positions asked for, and greedy decoding with a KV cache."""

    def __init__(self, backbone: nn.Module, embedding: nn.Module, output_VD: Tensor | None = None) -> None:
        """Take the output embedding, or None where the backbone ties it to its input `embedding`."""
        super().__init__()
        self.backbone = backbone
        self._tied = (embedding,)  # in a tuple: it is the backbone's, and must not be counted or moved twice
        self.output = None if output_VD is None else nn.Parameter(output_VD, requires_grad=False)

    def forward(self, input_ids_BL: Tensor, positions_BT: Tensor) -> Tensor:
        """Return logits, float32 [B, T, V], of the token after each position; inputs padded on the right."""
        hidden_BLD = self.backbone(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        read_BTD = hidden_BLD.gather(1, positions_BT[:, :, None].expand(-1, -1, hidden_BLD.shape[-1]))
        return self.logits(read_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [..., V] of hidden states [..., D]."""
        weight_VD = self._tied[0].get_parameter("weight") if self.output is None else self.output
        return F.linear(hidden, weight_VD.to(hidden.dtype)).float()

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.parameters()).device


class AnswerSpelling:
    """How answers are spelled: the tokens of each candidate's name, first in an answer or behind another."""

    def __init__(self, encoder: Encoder, names: list[list[int]]) -> None:
        self.first = names
        self.next = names
        if encoder.config.identifiers == "ordinals":
            between = encoder.tokenizer(BETWEEN_ORDINALS, add_special_tokens=False)["input_ids"]
            self.next = [[*between, *ids] for ids in names]
        self.num_tokens = sum(map(len, self.next)) - len(self.next[0]) + len(self.first[0])

    def spell(self, order: Sequence[int]) -> list[int]:
        """Return the tokens of an answer that names the candidates in this order."""
        names = [(self.first if place == 0 else self.next)[index] for place, index in enumerate(order)]
        return [token for name in names for token in name]


class AnswerState:
    """One slate's answer as it grows: what was named, and where in the next name's spelling it stands."""

    def __init__(self, spelling: AnswerSpelling, size: int) -> None:
        self._spelling = spelling
        self._size = size
        self.named: list[int] = []
        self.tokens: list[int] = []
        self._partial: list[int] = []

    def allowed(self) -> list[int]:
        """Return the tokens that can go on with the name of a candidate not named yet."""
        start = len(self._partial)
        return sorted({name[start] for name in self._open().values()})

    def add(self, token: int) -> None:
        """Append a token; a name that it completes is noted."""
        self.tokens.append(token)
        self._partial.append(token)
        for index, name in self._open().items():
            if name == self._partial:
                self.named.append(index)
                self._partial = []
                return

    def _open(self) -> dict[int, list[int]]:
        """Return the candidates that can still be meant, with the spelling of their name at this place."""
        names = self._spelling.next if self.named else self._spelling.first
        done, start = set(self.named), len(self._partial)
        return {
            index: names[index]
            for index in range(self._size)
            if index not in done and names[index][:start] == self._partial
        }

    @property
    def is_complete(self) -> bool:
        """Whether all candidates are named."""
        return len(self.named) == self._size


class ArRanker:
    """A loaded autoregressive ranker: encoder and model of one artifact (objective "ar")."""

    def __init__(self, spec: RankerSpec, encoder: Encoder, model: ArModel, version: str) -> None:
        self.spec = spec
        self.encoder = encoder
        self.model = model
        self.version = version

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: torch.device | None = None,
        precision: Precision | None = None,
        backbone_source: str | None = None,
        untrained: bool = False,
    ) -> "ArRanker":
        """Return the ranker of an artifact folder, or (untrained) its backbone as it came, under the same prompt.

        Raises ArtifactError when anything in it does not match, or when it is a single-pass ranker.
        """
        folder = Path(path)
        spec = load_spec(folder)
        if spec.objective != "ar":
            raise ArtifactError(f"artifact {str(folder)!r} is a single-pass ranker (objective='spd'): use Ranker")
        backbone = load_merged_backbone(None if untrained else folder, spec, backbone_source)
        model = build_ar_model(backbone, check_backbone(spec, backbone_source))
        where = device or default_device()
        cast_parameters(model, resolve_dtype(precision or spec.backbone.precision, where))
        return cls(spec, load_encoder(folder, spec), model.to(where).eval(), model_version(folder))

    def rank_slates(
        self,
        slates: Sequence[Slate],
        decoding: Decoding = "constrained",
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
    ) -> list[ArRanking]:
        """Return one answer a slate, greedily decoded; batches hold at most `batch_tokens` padded tokens.

        constrained: only tokens that go on with a candidate not named yet. free: whatever the model says, until it has
        named n candidates, ended, or used up the tokens of a whole answer; then counted and repaired.
        Raises DataError for a slate that does not fit the prompt.
        """
        questions = [self.encoder.encode_question(slate) for slate in slates]
        sizes = [len(slate.candidates) for slate in slates]
        rankings: dict[int, ArRanking] = {}
        lengths = [len(question) + size for question, size in zip(questions, sizes, strict=True)]
        for group in plan_batches(lengths, batch_tokens):
            found = self._decode([questions[i] for i in group], [sizes[i] for i in group], decoding)
            rankings.update(zip(group, found, strict=True))
        return [rankings[index] for index in range(len(slates))]

    @torch.inference_mode()
    def _decode(self, questions: list[list[int]], sizes: list[int], decoding: Decoding) -> list[ArRanking]:
        spellings = [AnswerSpelling(self.encoder, self.encoder.identifiers(size)) for size in sizes]
        states = [AnswerState(spelling, size) for spelling, size in zip(spellings, sizes, strict=True)]
        budgets = [spelling.num_tokens for spelling in spellings]
        done = [False] * len(states)
        step = _CachedSteps(self.model, questions)
        logits_BV = step.prefill()
        while True:
            tokens = self._pick(logits_BV, states, done, decoding)
            for row, (state, token) in enumerate(zip(states, tokens, strict=True)):
                if done[row]:
                    continue
                ended = decoding == "free" and token == self.encoder.tokenizer.eos_token_id
                if not ended:
                    state.add(token)
                done[row] = ended or state.is_complete or len(state.tokens) >= budgets[row]
            if all(done):
                break
            logits_BV = step.next(tokens)
        return [
            ArRanking(answer=self._answer(state, size), num_passes=max(1, len(state.tokens)))
            for state, size in zip(states, sizes, strict=True)
        ]

    def _pick(
        self, logits_BV: Tensor, states: Sequence[AnswerState], done: Sequence[bool], decoding: Decoding
    ) -> list[int]:
        if decoding == "free":
            tokens: list[int] = logits_BV.argmax(1).tolist()
            return tokens
        logits = logits_BV.cpu()
        picked = []
        for row, state in enumerate(states):
            allowed = [0] if done[row] else state.allowed()
            picked.append(allowed[int(logits[row, allowed].argmax())])
        return picked

    def _answer(self, state: AnswerState, size: int) -> Answer:
        if self.encoder.config.identifiers == "ordinals":
            return parse_ordinals(str(self.encoder.tokenizer.decode(state.tokens)), size)
        limit = max(size, self.spec.num_positions)
        index_of = {ids[0]: index for index, ids in enumerate(self.encoder.identifiers(limit))}
        return repair([index_of.get(token, limit) for token in state.tokens], size)


class _CachedSteps:
    """Forward passes over one batch with a KV cache: prompts padded on the right, then a token a row and pass."""

    def __init__(self, model: ArModel, questions: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._input_ids = pad_ids(questions).to(model.device)
        self._length_B = torch.tensor([len(question) for question in questions], device=model.device)
        place_L = torch.arange(self._input_ids.shape[1], device=model.device)
        self._seen_BL = place_L[None, :] < self._length_B[:, None]
        self._cache = DynamicCache()
        self._num_answered = 0

    def prefill(self) -> Tensor:
        """Return logits [B, V] of each answer's first token."""
        hidden_BLD = self._model.backbone(
            input_ids=self._input_ids, past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        rows = torch.arange(len(hidden_BLD), device=hidden_BLD.device)
        return self._model.logits(hidden_BLD[rows, self._length_B - 1])

    def next(self, tokens: Sequence[int]) -> Tensor:
        """Return logits [B, V] of the token after these."""
        self._seen_BL = F.pad(self._seen_BL, (0, 1), value=True)
        hidden_BLD = self._model.backbone(
            input_ids=torch.tensor(tokens, device=self._model.device)[:, None],
            attention_mask=self._seen_BL,
            position_ids=(self._length_B + self._num_answered)[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        self._num_answered += 1
        return self._model.logits(hidden_BLD[:, -1])


def build_ar_model(backbone: nn.Module, folder: Path) -> ArModel:
    """Return the model over a backbone (adapted or not), with the output embedding of its folder.

    Raises ArtifactError if there is none.
    """
    base = backbone.get_base_model() if isinstance(backbone, PeftModel) else backbone
    assert isinstance(base, PreTrainedModel)
    embedding = base.get_input_embeddings()
    if base.config.tie_word_embeddings:
        return ArModel(backbone, embedding)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if OUTPUT_WEIGHT in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                return ArModel(backbone, embedding, tensors.get_tensor(OUTPUT_WEIGHT).float())
    raise ArtifactError(
        f"backbone folder {str(folder)!r} ties no embeddings and holds no {OUTPUT_WEIGHT}: an autoregressive ranker "
        "needs a checkpoint with its output embedding"
    )
