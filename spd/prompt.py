"""Slate -> token ids with one readout position a candidate.

    instruction, query, then per candidate:  text  <separator>, or with identifiers  text  [identifier]
    readout = "end":   the state at each candidate's last token (arXiv 2609.01807: the last token of the description)
    readout = "tail":  after the list, each identifier once more: that state has seen every candidate

Every piece of text is tokenised by itself, so a candidate's tokens never depend on its neighbours, and special tokens
spelled in user text stay text. A prompt over budget shortens the longest candidates first and drops none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spd.errors import ConfigError, DataError
from spd.slate import Slate

Identifiers = Literal["none", "ordinals", "markers"]
NUM_SCORE_FEATURES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """How a slate is laid out for the model."""

    instruction: str = "Rank the candidates by how well they suit the query.\nQuery:"
    """Text before the query."""
    introduction: str = "\nCandidates:"
    """Text between the query and the first candidate."""
    answer_introduction: str = "\nRanking:"
    """Text between the last candidate and an autoregressive answer, or the identifiers of readout="tail"."""
    separator: str | None = None
    """Token that closes each candidate; null takes the tokenizer's end-of-sequence token."""
    identifiers: Identifiers = "none"
    """What names each candidate: nothing, an ordinal such as [3], or a marker of one token."""
    identifier_place: Literal["open", "close"] = "close"
    """Where it stands: before the text, or behind it in the separator's stead. Under causal attention only a closing
    identifier's state knows the text that it names, so that an answer can choose among them."""
    readout: Literal["end", "tail"] = "end"
    """Where a candidate's state is read: at its last token, or at its marker repeated after the whole list."""
    attention: Literal["causal", "independent"] = "causal"
    """What a candidate sees: all before it, or the query and itself only (the input order then changes nothing)."""
    use_score: bool = False
    """Give the head each candidate's upstream score (standardised within the slate) beside its hidden state."""
    max_tokens: int = 4096
    """Longest prompt, in tokens; candidates are shortened to fit."""
    max_query_tokens: int = 512
    """A longer query loses its end."""
    max_candidate_tokens: int = 256
    """A longer candidate loses its end."""

    def problems(self) -> list[str]:
        found = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("max_tokens", "max_query_tokens", "max_candidate_tokens")
            if getattr(self, name) < 1
        ]
        if self.readout == "tail" and (self.identifiers, self.attention) != ("markers", "causal"):
            found.append(
                "readout='tail' repeats markers that see every candidate: set identifiers='markers' and "
                "attention='causal' with it"
            )
        if self.attention == "independent" and self.identifiers != "none":
            found.append("attention='independent' knows no order to number: set identifiers='none'")
        return found

    @property
    def num_features(self) -> int:
        """Numbers a candidate that the head reads beside the hidden state."""
        return NUM_SCORE_FEATURES if self.use_score else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSlate:
    """One slate as the model reads it.

    input_ids: int32 [L]. readout: int32 [N], the position in the prompt where the state of place p is read.
    order: int32 [N], the slate's candidate at each place of the prompt (the input order, but for
    attention="independent": there by content, so that no input order can change a sum).
    features: float32 [N, F], by place. prefix_tokens: tokens before the first candidate.
    num_truncated: candidates that lost tokens. query_truncated: whether the query did.
    """

    input_ids: NDArray[np.int32]
    readout: NDArray[np.int32]
    order: NDArray[np.int32]
    features: NDArray[np.float32]
    prefix_tokens: int
    num_truncated: int = 0
    query_truncated: bool = False

    def to_row(self) -> dict[str, object]:
        """Return the fields as one table row; the features flat."""
        return {
            "input_ids": self.input_ids,
            "readout": self.readout,
            "order": self.order,
            "features": self.features.ravel(),
            "prefix_tokens": self.prefix_tokens,
            "num_truncated": self.num_truncated,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, object]) -> "EncodedSlate":
        """Return the slate of a row that `to_row` made."""
        order = np.array(row["order"], dtype=np.int32)
        prefix_tokens = row["prefix_tokens"]
        assert isinstance(prefix_tokens, int)
        return cls(
            input_ids=np.array(row["input_ids"], dtype=np.int32),
            readout=np.array(row["readout"], dtype=np.int32),
            order=order,
            features=np.array(row["features"], dtype=np.float32).reshape(len(order), -1),
            prefix_tokens=prefix_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """A slate's tokens before they are joined: the prefix, and each candidate's, in the prompt's order."""

    prefix: list[int]
    order: list[int]
    candidates: list[list[int]]
    num_truncated: int
    query_truncated: bool


class Encoder:
    """Turns slates into prompts; the one place that touches the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.separator_id = _separator_id(tokenizer, config.separator)
        texts = [config.instruction, config.introduction, config.answer_introduction]
        self._instruction_ids, self._introduction_ids, self._answer_ids = self._tokenize(texts)
        self._names: list[list[int]] = []

    def encode(self, slate: Slate) -> EncodedSlate:
        """Return the slate's prompt; raises DataError when not even one token a candidate fits the budget."""
        layout = self._lay_out(slate)
        input_ids, readout = list(layout.prefix), []
        for ids in layout.candidates:
            input_ids.extend(ids)
            readout.append(len(input_ids) - 1)
        if self.config.readout == "tail":
            input_ids.extend(self._answer_ids)
            readout = list(range(len(input_ids), len(input_ids) + len(layout.order)))
            input_ids.extend(ids[0] for ids in self.identifiers(len(layout.order)))
        return EncodedSlate(
            input_ids=np.array(input_ids, dtype=np.int32),
            readout=np.array(readout, dtype=np.int32),
            order=np.array(layout.order, dtype=np.int32),
            features=self._features(slate, layout.order),
            prefix_tokens=len(layout.prefix),
            num_truncated=layout.num_truncated,
            query_truncated=layout.query_truncated,
        )

    def encode_question(self, slate: Slate, names: Sequence[list[int]] | None = None) -> list[int]:
        """Return the prompt that an autoregressive ranker answers: the slate with identifiers, then the introduction.

        names: token ids of each candidate's identifier; None takes the first ones. Raises DataError as `encode` does.
        """
        layout = self._lay_out(slate, names)
        return [*layout.prefix, *(token for ids in layout.candidates for token in ids), *self._answer_ids]

    def identifiers(self, size: int) -> list[list[int]]:
        """Return the token ids of the first `size` identifiers; one id each for markers.

        Raises ConfigError if the tokenizer has fewer markers of one token.
        """
        return self.identifier_pool(size)[:size]

    def identifier_pool(self, size: int) -> list[list[int]]:
        """Return at least `size` identifiers, twice as many where the tokenizer has them; raises as `identifiers`."""
        if self.config.identifiers == "ordinals":
            if len(self._names) < 2 * size:
                self._names = self._tokenize([f" [{number}]" for number in range(1, 2 * size + 1)])
            return self._names[: 2 * size]
        if not self._names:
            self._names = self._single_tokens()
        if len(self._names) < size:
            raise ConfigError(
                f"prompt.identifiers='markers': this tokenizer has {len(self._names)} markers of one token for "
                f"{size} candidates: use 'ordinals', or smaller slates"
            )
        return self._names[: 2 * size]

    def _single_tokens(self) -> list[list[int]]:
        """Return all markers: A, B, ..., then two letters, whatever the tokenizer has as one token."""
        pairs = ["".join(p) for p in product(ascii_uppercase, ascii_lowercase + ascii_uppercase)]
        names = [*ascii_uppercase, *ascii_lowercase, *pairs, *("".join(p) for p in product(ascii_uppercase, digits))]
        spelled = (self._tokenize([f"{space}{name}" for name in names]) for space in (" ", ""))
        return max(([ids for ids in rows if len(ids) == 1] for rows in spelled), key=len)

    def _lay_out(self, slate: Slate, names: Sequence[list[int]] | None = None) -> _Layout:
        config, size = self.config, len(slate.candidates)
        query_ids, *candidate_ids = self._tokenize([f" {slate.query}", *(f" {c.text}" for c in slate.candidates)])
        short_query_ids = query_ids[: config.max_query_tokens]
        prefix = [*self._instruction_ids, *short_query_ids, *self._introduction_ids, self.separator_id]
        opening: Sequence[list[int]] = [[]] * size
        closing: Sequence[list[int]] = [[self.separator_id]] * size
        if config.identifiers != "none":
            identifiers = names or self.identifiers(size)
            if config.identifier_place == "open":
                opening = identifiers
            else:
                closing = identifiers
        fixed = len(prefix) + sum(map(len, [*opening, *closing]))
        if config.identifiers != "none":
            fixed += len(self._answer_ids) + size
        lengths = [min(len(ids), config.max_candidate_tokens) for ids in candidate_ids]
        cap = fair_cap(lengths, config.max_tokens - fixed)
        if cap < 1:
            raise DataError(
                f"slate {slate.request_id!r}: {size} candidates and a query of {len(short_query_ids)} "
                f"tokens do not fit prompt.max_tokens={config.max_tokens}: send fewer candidates or raise it"
            )
        kept = [ids[: min(length, cap)] for ids, length in zip(candidate_ids, lengths, strict=True)]
        order = list(range(size))
        if config.attention == "independent":
            scores = slate.score or (None,) * size
            order.sort(key=lambda i: (kept[i], scores[i] is None, scores[i] or 0.0))
        return _Layout(
            prefix=prefix,
            order=order,
            candidates=[[*opening[p], *kept[i], *closing[p]] for p, i in enumerate(order)],
            num_truncated=sum(len(full) > len(short) for full, short in zip(candidate_ids, kept, strict=True)),
            query_truncated=len(query_ids) > len(short_query_ids),
        )

    def _features(self, slate: Slate, order: Sequence[int]) -> NDArray[np.float32]:
        """Return float32 [N, F]: the upstream score standardised over the slate (0 if unknown), and whether known."""
        if not self.config.use_score:
            return np.zeros((len(order), 0), dtype=np.float32)
        scores = slate.score or (None,) * len(order)
        values = np.array([scores[i] for i in order], dtype=np.float64)
        known = ~np.isnan(values)
        spread = values[known].std() if known.any() else 0.0
        centred = np.where(known, values - (values[known].mean() if known.any() else 0.0), 0.0)
        return np.stack([centred / spread if spread > 0 else 0.0 * centred, known], axis=1).astype(np.float32)

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        encoded = self.tokenizer(clean, add_special_tokens=False, split_special_tokens=True)
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def fair_cap(lengths: Sequence[int], budget: int) -> int:
    """Return the largest cap c with sum(min(length, c)) <= budget: the longest give way first (water filling).

    Returns 0 when not even one token each fits. Lengths and budget are in tokens.
    """
    if sum(lengths) <= budget:
        return max([1, *lengths])
    remaining = budget
    for place, length in enumerate(sorted(lengths)):
        share = remaining // (len(lengths) - place)
        if length > share:
            return max(share, 0)
        remaining -= length
    raise AssertionError("some length exceeds its share when the sum exceeds the budget")


def _separator_id(tokenizer: PreTrainedTokenizerBase, separator: str | None) -> int:
    token = separator or tokenizer.eos_token
    if token is None:
        raise ConfigError("prompt.separator is null and the tokenizer has no end-of-sequence token: name one")
    token_id = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != token:
        raise ConfigError(f"prompt.separator={token!r} is no single token of this tokenizer: choose a special token")
    return token_id
