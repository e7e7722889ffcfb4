"""The ranking model: backbone plus head, one forward pass from token ids to score matrices.

B slates, N candidates, K rank positions, L tokens, D hidden.
"""

import torch
from torch import Tensor, nn


class RankerModel(nn.Module):
    """One prefill of the backbone, the hidden state at each candidate's readout position, the head over them."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, input_ids_BL: Tensor, readout_BN: Tensor, candidate_mask_BN: Tensor) -> Tensor:
        """Return scores, float32 [B, N, K].

        input_ids int64 [B, L], padded on the right; readout int64 [B, N]; candidate_mask bool [B, N], True = real.
        """
        hidden_BLD = self.backbone(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        index_BND = readout_BN[:, :, None].expand(-1, -1, hidden_BLD.shape[-1])
        scores: Tensor = self.head(hidden_BLD.gather(1, index_BND), candidate_mask_BN)
        return scores

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.parameters()).device


def parameter_counts(model: RankerModel) -> dict[str, int]:
    """Return the number of parameters of backbone, adapter and head, and of those that train."""
    head = sum(p.numel() for p in model.head.parameters())
    adapter = sum(p.numel() for name, p in model.backbone.named_parameters() if "lora_" in name)
    backbone = sum(p.numel() for p in model.backbone.parameters()) - adapter
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"backbone": backbone, "adapter": adapter, "head": head, "trainable": trainable}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
