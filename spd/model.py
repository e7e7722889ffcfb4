"""The ranking model: backbone plus head, one forward pass from token ids to score matrices.

B slates, N candidates, K rank positions, L tokens, D hidden, F features.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from spd.batch import Batch

Attention = Literal["causal", "independent"]


class RankerModel(nn.Module):
    """One prefill of the backbone, the hidden state at each candidate's readout position, the head over them."""

    def __init__(self, backbone: nn.Module, head: nn.Module, attention: Attention = "causal") -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.attention = attention

    def forward(self, batch: Batch, hidden_BND: Tensor | None = None) -> Tensor:
        """Return scores, float32 [B, N, K]; `hidden` spares the prefill where `read` was asked before."""
        if hidden_BND is None:
            hidden_BND = self.read(batch)
        inputs_BND = torch.cat([hidden_BND.float(), batch.features], dim=-1)
        scores: Tensor = self.head(inputs_BND, batch.candidate_mask)
        return scores

    def read(self, batch: Batch) -> Tensor:
        """Return the hidden states at the readout positions, [B, N, D], in the backbone's dtype."""
        extra = {} if self.attention == "causal" else independent_inputs(batch)
        hidden_BLD = self.backbone(input_ids=batch.input_ids, use_cache=False, **extra).last_hidden_state
        read_BND: Tensor = hidden_BLD.gather(1, batch.readout[:, :, None].expand(-1, -1, hidden_BLD.shape[-1]))
        return read_BND

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.parameters()).device


def independent_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return the mask (bool [B, 1, L, L], True = seen) and position ids [B, L] of attention="independent".

    A candidate's tokens see the prefix and their own candidate's earlier tokens, and count their positions from the
    prefix's end: none knows of another candidate, or of its place among them.
    """
    token_L = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    ended_BLN = (batch.readout[:, None, :] < token_L[None, :, None]) & batch.candidate_mask[:, None, :]
    in_prefix_BL = token_L[None, :] < batch.prefix_tokens[:, None]
    segment_BL = torch.where(in_prefix_BL, 0, 1 + ended_BLN.sum(2))
    start_BL = torch.where(ended_BLN, batch.readout[:, None, :] + 1, batch.prefix_tokens[:, None, None]).amax(2)
    position_BL = torch.where(in_prefix_BL, token_L, token_L - start_BL + batch.prefix_tokens[:, None])
    same_BLL = segment_BL[:, :, None] == segment_BL[:, None, :]
    seen_BLL = (same_BLL | (segment_BL[:, None, :] == 0)) & (token_L[:, None] >= token_L[None, :])
    return {"attention_mask": seen_BLL[:, None], "position_ids": position_BL}


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of backbone, adapter and head (if any), and of those that train."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    adapter = sum(size for name, size in sizes.items() if "lora_" in name)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "backbone": sum(sizes.values()) - head - adapter,
        "adapter": adapter,
        "head": head,
        "trainable": trainable,
    }


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
