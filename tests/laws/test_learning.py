"""A correct student overfits a handful of slates: if it cannot, no result of training means anything."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.train_config import LossConfig
from jobs.train_objectives import slate_losses
from spd.backbone import AdapterConfig, add_adapter, load_backbone, load_tokenizer
from spd.batch import Batch, collate
from spd.decode import decode_scores
from spd.head import HeadName, LinearHead, build_head
from spd.metrics import kendall_tau
from spd.model import RankerModel, trainable_parameters
from spd.prompt import Encoder, PromptConfig
from spd.ranker import score_batch
from spd.slate import Slate
from spd.targets import target_matrix
from tests.conftest import make_slate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("head", "prompt"),
    [
        ("linear", PromptConfig()),
        ("self_attention", PromptConfig()),
        ("slot_query", PromptConfig()),
        ("self_attention", PromptConfig(attention="independent")),
        ("self_attention", PromptConfig(identifiers="markers")),
        ("self_attention", PromptConfig(identifiers="markers", readout="tail")),
    ],
    ids=["linear", "self_attention", "slot_query", "independent", "markers", "tail"],
)
def test_a_student_overfits_eight_slates(tiny_backbone: Path, head: HeadName, prompt: PromptConfig) -> None:
    rng = np.random.default_rng(0)
    slates = [
        replace(make_slate(n, f"r{i}", "abcdefgh"[i] * 4), teacher_ranking=tuple(rng.permutation(n).tolist()))
        for i, n in enumerate((5, 6, 7, 8, 5, 6, 7, 8))
    ]
    torch.manual_seed(0)
    backbone = add_adapter(load_backbone(tiny_backbone, None, torch.float32), AdapterConfig(rank=8, alpha=16))
    model = RankerModel(backbone, build_head(head, 32, 8), prompt.attention)

    assert train_until_overfit(model, slates, Encoder(load_tokenizer(tiny_backbone), prompt)) > 0.95


def train_until_overfit(model: RankerModel, slates: list[Slate], encoder: Encoder, max_steps: int = 300) -> float:
    """Train on the slates until their mean Kendall tau exceeds 0.95, or for `max_steps`; returns it."""
    encoded = [encoder.encode(slate) for slate in slates]
    placed = [slate.reordered(one.order.tolist()) for slate, one in zip(slates, encoded, strict=True)]
    batch = collate(encoded)
    target = target_matrix(placed, batch.readout.shape[1])
    parameters = trainable_parameters(model).values()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3 if isinstance(model.head, LinearHead) else 5e-4)
    tau = 0.0
    for step in range(1, max_steps + 1):
        scores = model.train()(batch)
        loss = slate_losses(scores, target, batch.candidate_mask, LossConfig()).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 20 == 0 and (tau := float(np.mean(taus(model, batch, placed)))) > 0.95:
            break
    return tau


def taus(model: RankerModel, batch: Batch, slates: list[Slate]) -> list[float]:
    scores = score_batch(model.eval(), batch)
    found = [
        kendall_tau(decode_scores(matrix).order, slate.teacher_ranking or ())
        for matrix, slate in zip(scores, slates, strict=True)
    ]
    return [tau for tau in found if tau is not None]
