"""Slate -> token ids with one readout position a candidate.

    instruction, query, then per candidate:  text  <separator>     (the readout position is the separator)

Every piece of text is tokenised by itself, so a candidate's tokens never depend on its neighbours, and special tokens
spelled in user text stay text. A prompt over budget shortens the longest candidates first and drops none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spd.errors import ConfigError, DataError
from spd.slate import Slate


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """How a slate is written out for the backbone."""

    instruction: str = "Rank the candidates by how well they suit the query.\nQuery:"
    """Text before the query."""
    introduction: str = "\nCandidates:"
    """Text between the query and the first candidate."""
    separator: str | None = None
    """Token that closes each candidate; null takes the tokenizer's end-of-sequence token."""
    max_tokens: int = 4096
    """Longest prompt, in tokens; candidates are shortened to fit."""
    max_query_tokens: int = 512
    """A longer query loses its end."""
    max_candidate_tokens: int = 256
    """A longer candidate loses its end."""

    def problems(self) -> list[str]:
        return [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("max_tokens", "max_query_tokens", "max_candidate_tokens")
            if getattr(self, name) < 1
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSlate:
    """One slate as the backbone reads it.

    input_ids: int32 [L]. readout: int32 [N], the position in the prompt where candidate n's hidden state is read.
    num_truncated: candidates that lost tokens. query_truncated: whether the query did.
    """

    input_ids: NDArray[np.int32]
    readout: NDArray[np.int32]
    num_truncated: int
    query_truncated: bool


class Encoder:
    """Turns slates into prompts; the one place that touches the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.separator_id = _separator_id(tokenizer, config.separator)
        self._instruction_ids, self._introduction_ids = self._tokenize([config.instruction, config.introduction])

    def encode(self, slate: Slate) -> EncodedSlate:
        """Return the slate's prompt; raises DataError when not even one token a candidate fits the budget."""
        query_ids, *candidate_ids = self._tokenize([f" {slate.query}", *(f" {c.text}" for c in slate.candidates)])
        short_query_ids = query_ids[: self.config.max_query_tokens]
        head = [*self._instruction_ids, *short_query_ids, *self._introduction_ids, self.separator_id]
        lengths = [min(len(ids), self.config.max_candidate_tokens) for ids in candidate_ids]
        budget = self.config.max_tokens - len(head) - len(candidate_ids)
        cap = fair_cap(lengths, budget)
        if cap < 1:
            raise DataError(
                f"slate {slate.request_id!r}: {len(candidate_ids)} candidates and a query of {len(short_query_ids)} "
                f"tokens do not fit prompt.max_tokens={self.config.max_tokens}: send fewer candidates or raise it"
            )
        input_ids, readout = list(head), []
        for ids, length in zip(candidate_ids, lengths, strict=True):
            input_ids.extend(ids[: min(length, cap)])
            readout.append(len(input_ids))
            input_ids.append(self.separator_id)
        return EncodedSlate(
            input_ids=np.array(input_ids, dtype=np.int32),
            readout=np.array(readout, dtype=np.int32),
            num_truncated=sum(len(ids) > min(length, cap) for ids, length in zip(candidate_ids, lengths, strict=True)),
            query_truncated=len(query_ids) > len(short_query_ids),
        )

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
