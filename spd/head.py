"""The three heads: hidden states at the readout positions -> score matrix, candidate x rank position.

B slates, N candidates, K rank positions, D hidden, W = 512 head width. Heads compute in float32 whatever the dtype of
their parameters: a bf16 engine casts the head too, and near-tied scores would then rank by rounding.
Source: arXiv 2609.01807, ranking heads; DESIGN "The method", step 3.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HeadName = Literal["linear", "self_attention", "slot_query"]

WIDTH = 512
FEED_FORWARD = 1024
NUM_LAYERS = 2
NUM_ATTENTION_HEADS = 8


def build_head(name: HeadName, hidden_size: int, num_positions: int) -> nn.Module:
    """Return a fresh head `(hidden [B, N, D], candidate_mask bool [B, N]) -> float32 [B, N, K]`."""
    heads = {"linear": LinearHead, "self_attention": SelfAttentionHead, "slot_query": SlotQueryHead}
    return heads[name](hidden_size, num_positions)


class LinearHead(nn.Module):
    """D -> 512 -> K, each candidate by itself; about 0.55M parameters at D=1024, K=50."""

    def __init__(self, hidden_size: int, num_positions: int) -> None:
        super().__init__()
        self.input = _Linear32(hidden_size, WIDTH)
        self.output = _Linear32(WIDTH, num_positions)

    def forward(self, hidden_BND: Tensor, mask_BN: Tensor) -> Tensor:
        scores: Tensor = self.output(F.gelu(self.input(hidden_BND)))
        return scores


class SelfAttentionHead(nn.Module):
    """D -> 512, two encoder layers over the slate's candidates, 512 -> K; about 4.2M parameters beside D -> 512.

    Knows nothing of the candidates' order but what the backbone put into their hidden states.
    """

    def __init__(self, hidden_size: int, num_positions: int) -> None:
        super().__init__()
        self.input = _Linear32(hidden_size, WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(NUM_LAYERS))
        self.norm = _LayerNorm32(WIDTH)
        self.output = _Linear32(WIDTH, num_positions)

    def forward(self, hidden_BND: Tensor, mask_BN: Tensor) -> Tensor:
        items_BNW = self.input(hidden_BND)
        for layer in self.layers:
            items_BNW = layer(items_BNW, items_BNW, mask_BN)
        scores: Tensor = self.output(self.norm(items_BNW))
        return scores


class SlotQueryHead(nn.Module):
    """K learned position embeddings cross-attend over the items; a dot product with each item is its score."""

    def __init__(self, hidden_size: int, num_positions: int) -> None:
        super().__init__()
        self.input = _Linear32(hidden_size, WIDTH)
        self.slots = nn.Parameter(torch.randn(num_positions, WIDTH) * WIDTH**-0.5)
        self.layers = nn.ModuleList(_Block() for _ in range(NUM_LAYERS))
        self.norm = _LayerNorm32(WIDTH)

    def forward(self, hidden_BND: Tensor, mask_BN: Tensor) -> Tensor:
        items_BNW = self.input(hidden_BND)
        slots_BKW = self.slots.float().expand(items_BNW.shape[0], -1, -1)
        for layer in self.layers:
            slots_BKW = layer(slots_BKW, items_BNW, mask_BN)
        scores: Tensor = items_BNW @ self.norm(slots_BKW).transpose(1, 2) / math.sqrt(WIDTH)
        return scores


class _Block(nn.Module):
    """One pre-norm transformer layer: `target` attends to `source` (itself, or the items), then a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = _LayerNorm32(WIDTH)
        self.query = _Linear32(WIDTH, WIDTH)
        self.key_value = _Linear32(WIDTH, 2 * WIDTH)
        self.projection = _Linear32(WIDTH, WIDTH)
        self.feed_forward_norm = _LayerNorm32(WIDTH)
        self.expand = _Linear32(WIDTH, FEED_FORWARD)
        self.contract = _Linear32(FEED_FORWARD, WIDTH)

    def forward(self, target_BTW: Tensor, source_BNW: Tensor, mask_BN: Tensor) -> Tensor:
        target_BTW = target_BTW + self._attend(target_BTW, source_BNW, mask_BN)
        expanded = F.gelu(self.expand(self.feed_forward_norm(target_BTW)))
        contracted: Tensor = self.contract(expanded)
        return target_BTW + contracted

    def _attend(self, target_BTW: Tensor, source_BNW: Tensor, mask_BN: Tensor) -> Tensor:
        query = _split_heads(self.query(self.attention_norm(target_BTW)))
        key, value = (_split_heads(part) for part in self.key_value(self.attention_norm(source_BNW)).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_BN[:, None, None, :])
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


def _split_heads(x_BTW: Tensor) -> Tensor:
    batch, length, width = x_BTW.shape
    return x_BTW.view(batch, length, NUM_ATTENTION_HEADS, width // NUM_ATTENTION_HEADS).transpose(1, 2)


class _Linear32(nn.Linear):
    """A linear layer that computes in float32 whatever the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class _LayerNorm32(nn.LayerNorm):
    """A layer norm that computes in float32 whatever the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
