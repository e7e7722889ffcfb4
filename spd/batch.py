"""Encoded slates -> padded batches, grouped by length under a token budget.

B slates, N candidates, L tokens. Padding stands on the right: under a causal mask no real token ever sees it, so a
batch needs no attention mask and its scores do not depend on what it was batched with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spd.prompt import EncodedSlate


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Slates side by side.

    input_ids: int64 [B, L]. readout: int64 [B, N]. candidate_mask: bool [B, N], True = a real candidate.
    """

    input_ids: Tensor
    readout: Tensor
    candidate_mask: Tensor

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
        )


def collate(slates: Sequence[EncodedSlate]) -> Batch:
    """Return the slates as one right-padded batch."""
    length = max(len(slate.input_ids) for slate in slates)
    size = max(len(slate.readout) for slate in slates)
    input_ids = np.zeros((len(slates), length), dtype=np.int64)
    readout = np.zeros((len(slates), size), dtype=np.int64)
    mask = np.zeros((len(slates), size), dtype=bool)
    for row, slate in enumerate(slates):
        input_ids[row, : len(slate.input_ids)] = slate.input_ids
        readout[row, : len(slate.readout)] = slate.readout
        mask[row, : len(slate.readout)] = True
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        readout=torch.from_numpy(readout),
        candidate_mask=torch.from_numpy(mask),
    )


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
