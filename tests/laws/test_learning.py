"""A correct student overfits a handful of slates: if it cannot, no result of training means anything."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.train_config import LossConfig
from jobs.train_data import teacher_positions
from jobs.train_loop import slate_losses
from spd.backbone import AdapterConfig, add_adapter, load_backbone, load_tokenizer
from spd.batch import collate
from spd.decode import decode_scores
from spd.head import HeadName, build_head
from spd.metrics import kendall_tau
from spd.model import RankerModel, trainable_parameters
from spd.prompt import Encoder, PromptConfig
from spd.ranker import score_batch
from spd.slate import Slate
from tests.conftest import make_slate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("head", ["linear", "self_attention", "slot_query"])
def test_a_student_overfits_eight_slates(tiny_backbone: Path, head: HeadName) -> None:
    rng = np.random.default_rng(0)
    slates = [
        replace(make_slate(n, f"r{i}", "abcdefgh"[i] * 4), teacher_ranking=tuple(rng.permutation(n).tolist()))
        for i, n in enumerate((5, 6, 7, 8, 5, 6, 7, 8))
    ]
    torch.manual_seed(0)
    backbone = add_adapter(load_backbone(tiny_backbone, None, torch.float32), AdapterConfig(rank=8, alpha=16))
    model = RankerModel(backbone, build_head(head, 32, 8))

    train(model, slates, tiny_backbone)

    assert np.mean(taus(model, slates, tiny_backbone)) > 0.95


def train(model: RankerModel, slates: list[Slate], folder: Path, num_steps: int = 300) -> None:
    encoder = Encoder(load_tokenizer(folder), PromptConfig())
    batch = collate([encoder.encode(slate) for slate in slates])
    position = teacher_positions(slates, batch.readout.shape[1])
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=2e-3)
    for _ in range(num_steps):
        scores = model(batch.input_ids, batch.readout, batch.candidate_mask)
        loss = slate_losses(scores, position, batch.candidate_mask, LossConfig()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def taus(model: RankerModel, slates: list[Slate], folder: Path) -> list[float]:
    encoder = Encoder(load_tokenizer(folder), PromptConfig())
    scores = score_batch(model.eval(), collate([encoder.encode(slate) for slate in slates]))
    found = [
        kendall_tau(decode_scores(matrix).order, slate.teacher_ranking or ())
        for matrix, slate in zip(scores, slates, strict=True)
    ]
    return [tau for tau in found if tau is not None]
