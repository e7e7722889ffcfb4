"""Encoded slates -> padded batches, grouped by length under a token budget.

B slates, N candidates, L tokens, F features. Padding stands on the right: under a causal mask no real token ever sees
it, so a batch needs no attention mask and its scores do not depend on what it was batched with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spd.prompt import EncodedSlate


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Slates side by side; candidates in the order of the prompt (EncodedSlate.order).

    input_ids: int64 [B, L]. readout: int64 [B, N]. candidate_mask: bool [B, N], True = a real candidate.
    features: float32 [B, N, F]. prefix_tokens: int64 [B], tokens before the first candidate.
    """

    input_ids: Tensor
    readout: Tensor
    candidate_mask: Tensor
    features: Tensor
    prefix_tokens: Tensor

    @property
    def num_candidates(self) -> list[int]:
        """Each slate's own N."""
        sizes: list[int] = self.candidate_mask.sum(1).tolist()
        return sizes

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        return Batch(
            input_ids=self.input_ids.to(device),
            readout=self.readout.to(device),
            candidate_mask=self.candidate_mask.to(device),
            features=self.features.to(device),
            prefix_tokens=self.prefix_tokens.to(device),
        )


def collate(slates: Sequence[EncodedSlate]) -> Batch:
    """Return the slates as one right-padded batch."""
    size = max(len(slate.readout) for slate in slates)
    readout = np.zeros((len(slates), size), dtype=np.int64)
    mask = np.zeros((len(slates), size), dtype=bool)
    features = np.zeros((len(slates), size, slates[0].features.shape[1]), dtype=np.float32)
    for row, slate in enumerate(slates):
        readout[row, : len(slate.readout)] = slate.readout
        mask[row, : len(slate.readout)] = True
        features[row, : len(slate.readout)] = slate.features
    return Batch(
        input_ids=pad_ids([slate.input_ids for slate in slates]),
        readout=torch.from_numpy(readout),
        candidate_mask=torch.from_numpy(mask),
        features=torch.from_numpy(features),
        prefix_tokens=torch.tensor([slate.prefix_tokens for slate in slates], dtype=torch.int64),
    )


def pad_ids(rows: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    """Return int64 [B, L], the rows padded on the right."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return torch.from_numpy(padded)


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return indices of slates grouped by similar length, each group's padded size at most `max_tokens`.

    A slate longer than `max_tokens` stands alone. Longest first, so that a memory shortage shows at the start.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
