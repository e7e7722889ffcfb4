"""What is trained: a single-pass ranker under a Sinkhorn loss, or an autoregressive one under cross-entropy.

Each objective makes the model, turns slates into micro-batches, and gives the loss of each slate of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from jobs.train_config import LossConfig, TrainConfig
from spd.artifact import RankerSpec, build_spec_head, load_trained_state
from spd.autoregressive import AnswerSpelling, ArModel, ArRanker, build_ar_model
from spd.backbone import add_adapter, load_backbone, resolve_backbone
from spd.batch import Batch, collate, pad_ids
from spd.model import RankerModel
from spd.prompt import Encoder
from spd.ranker import Ranker
from spd.sinkhorn import first_place_cross_entropy, pairwise_logistic, sinkhorn_cross_entropy
from spd.slate import Slate
from spd.targets import answer_target, target_matrix

NO_TARGET = -100


class MicroBatch(Protocol):
    """One forward's slates with their targets; weight: float32 [B], each slate's share of the step's mean loss.

    A slate of weight 0 is a filler that only keeps ranks in step.
    """

    @property
    def weight(self) -> Tensor: ...


Rank = Callable[[Sequence[Slate]], list[tuple[int, ...]]]


class Objective(Protocol):
    """One way to train a ranker."""

    def build_model(self) -> nn.Module:
        """Return the float32 model with its adapter (and head); the backbone itself is frozen."""

    def micro_batch(self, slates: Sequence[Slate], weights: Sequence[float], seeds: Sequence[int]) -> MicroBatch:
        """Return the slates with their targets; a slate's seed decides whatever of its target is random."""

    def losses(self, model: nn.Module, micro: MicroBatch, step: int, device: torch.device) -> Tensor:
        """Return float32 [B], the loss of each slate."""

    def rank(self, model: nn.Module, slates: Sequence[Slate]) -> list[tuple[int, ...]]:
        """Return the order that the model gives each slate, best first."""


def build_objective(config: TrainConfig, spec: RankerSpec, encoder: Encoder) -> Objective:
    """Return the config's objective."""
    if config.objective == "ar":
        return ArObjective(config, spec, encoder)
    return SpdObjective(config, spec, encoder)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBatch:
    """Slates with target matrices, float32 [B, N, N]."""

    request_ids: tuple[str, ...]
    batch: Batch
    target: Tensor
    weight: Tensor


class SpdObjective:
    """Sinkhorn cross-entropy of the score matrix, plus the auxiliary term."""

    def __init__(self, config: TrainConfig, spec: RankerSpec, encoder: Encoder) -> None:
        self._config = config
        self._spec = spec
        self._encoder = encoder
        self._hidden: dict[str, Tensor] = {}

    def build_model(self) -> RankerModel:
        torch.manual_seed(self._config.seed)
        backbone = _backbone(self._config)
        hidden_size = int(backbone.config.hidden_size)
        adapted = add_adapter(backbone, self._config.adapter)
        model = RankerModel(adapted, build_spec_head(self._spec, hidden_size), self._config.prompt.attention)
        if self._config.init_from:
            load_trained_state(Path(self._config.init_from), model.backbone, model.head)
        return model

    def micro_batch(self, slates: Sequence[Slate], weights: Sequence[float], seeds: Sequence[int]) -> RankBatch:
        encoded = [self._encoder.encode(slate) for slate in slates]
        placed = [slate.reordered(one.order.tolist()) for slate, one in zip(slates, encoded, strict=True)]
        batch = collate(encoded)
        size = batch.readout.shape[1]
        return RankBatch(
            request_ids=tuple(slate.request_id for slate in slates),
            batch=batch,
            target=target_matrix(placed, size, self._config.target.kind, self._config.loss.top_m),
            weight=torch.tensor(weights, dtype=torch.float32),
        )

    def losses(self, model: nn.Module, micro: MicroBatch, step: int, device: torch.device) -> Tensor:
        assert isinstance(micro, RankBatch)
        batch = micro.batch.to(device)
        hidden = self._cached_hidden(model, batch, micro.request_ids) if self._config.caches_hidden else None
        scores = model(batch, hidden)
        return slate_losses(scores, micro.target.to(device), batch.candidate_mask, self._config.loss, step)

    def rank(self, model: nn.Module, slates: Sequence[Slate]) -> list[tuple[int, ...]]:
        assert isinstance(model, RankerModel)
        ranker = Ranker(self._spec, self._encoder, model, "in training")
        return [ranking.order for ranking in ranker.rank_slates(slates)]

    def _cached_hidden(self, model: nn.Module, batch: Batch, request_ids: Sequence[str]) -> Tensor:
        """Return the hidden states [B, N, D]; each slate's are computed once and kept (N x D numbers) on the CPU."""
        if not all(name in self._hidden for name in request_ids):
            ranker_model = model.get_submodule("module")  # inside DeepSpeed's engine
            assert isinstance(ranker_model, RankerModel)
            with torch.no_grad():
                read = ranker_model.read(batch).cpu()
            for name, states, size in zip(request_ids, read, batch.num_candidates, strict=True):
                self._hidden[name] = states[:size].clone()
        return nn.utils.rnn.pad_sequence([self._hidden[name] for name in request_ids], batch_first=True).to(
            batch.input_ids.device
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerBatch:
    """Slates with their answers spelled out behind the prompt.

    input_ids: int64 [B, L]. positions: int64 [B, T], where each scored token is predicted. wanted: int64 [B, T], that
    token, NO_TARGET where a row has fewer.
    """

    input_ids: Tensor
    positions: Tensor
    wanted: Tensor
    weight: Tensor


class ArObjective:
    """Cross-entropy of the answer's tokens over the whole vocabulary, as the mean over a slate's scored tokens."""

    def __init__(self, config: TrainConfig, spec: RankerSpec, encoder: Encoder) -> None:
        self._config = config
        self._spec = spec
        self._encoder = encoder

    def build_model(self) -> ArModel:
        torch.manual_seed(self._config.seed)
        adapted = add_adapter(_backbone(self._config), self._config.adapter)
        model = build_ar_model(adapted, resolve_backbone(self._config.backbone.source))
        if self._config.init_from:
            load_trained_state(Path(self._config.init_from), model.backbone, None)
        return model

    def micro_batch(self, slates: Sequence[Slate], weights: Sequence[float], seeds: Sequence[int]) -> AnswerBatch:
        rows = [self._spell(slate, seed) for slate, seed in zip(slates, seeds, strict=True)]
        width = max(len(wanted) for _, _, wanted in rows)
        positions = torch.zeros((len(rows), width), dtype=torch.int64)
        targets = torch.full((len(rows), width), NO_TARGET, dtype=torch.int64)
        for row, (_, start, wanted) in enumerate(rows):
            positions[row, : len(wanted)] = torch.arange(start, start + len(wanted))
            targets[row, : len(wanted)] = torch.tensor(wanted)
        return AnswerBatch(
            input_ids=pad_ids([ids for ids, _, _ in rows]),
            positions=positions,
            wanted=targets,
            weight=torch.tensor(weights, dtype=torch.float32),
        )

    def losses(self, model: nn.Module, micro: MicroBatch, step: int, device: torch.device) -> Tensor:
        assert isinstance(micro, AnswerBatch)
        wanted_BT = micro.wanted.to(device)
        logits_BTV = model(micro.input_ids.to(device), micro.positions.to(device))
        loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2), wanted_BT, ignore_index=NO_TARGET, reduction="none")
        losses: Tensor = loss_BT.sum(1) / (wanted_BT != NO_TARGET).sum(1)
        return losses

    def rank(self, model: nn.Module, slates: Sequence[Slate]) -> list[tuple[int, ...]]:
        assert isinstance(model, ArModel)
        ranker = ArRanker(self._spec, self._encoder, model, "in training")
        return [ranking.answer.order for ranking in ranker.rank_slates(slates)]

    def _spell(self, slate: Slate, seed: int) -> tuple[list[int], int, list[int]]:
        """Return (tokens fed, position that predicts the first scored token, tokens wanted from there on)."""
        target = self._config.target
        rng = np.random.default_rng(seed)
        emitted, wanted = answer_target(slate, target.kind, target.answer_tail, rng)
        emitted, wanted = emitted[: self._config.loss.top_m], wanted[: self._config.loss.top_m]
        names = self._names(len(slate.candidates), rng)
        spelling = AnswerSpelling(self._encoder, names)
        question = self._encoder.encode_question(slate, names)
        answer, tokens = spelling.spell(emitted), spelling.spell(wanted)
        if len(emitted) == len(slate.candidates) and emitted == wanted:
            tokens.append(self._encoder.tokenizer.eos_token_id)  # a whole answer ends
        else:
            answer = answer[: len(tokens) - 1]
        return [*question, *answer], len(question) - 1, tokens

    def _names(self, size: int, rng: np.random.Generator) -> list[list[int]]:
        """Return an identifier a candidate: drawn from a pool, or (ordinals, target.draw_names=false) the first."""
        if not self._config.target.draw_names or self._config.prompt.identifiers == "ordinals":
            return self._encoder.identifiers(size)
        pool = self._encoder.identifier_pool(self._spec.num_positions)
        return [pool[index] for index in rng.permutation(len(pool))[:size]]


def slate_losses(scores_BNK: Tensor, target_BNN: Tensor, mask_BN: Tensor, config: LossConfig, step: int = 0) -> Tensor:
    """Return float32 [B]: Sinkhorn cross-entropy plus, while `step` is within its schedule, the auxiliary term."""
    losses = sinkhorn_cross_entropy(
        scores_BNK, target_BNN, mask_BN, config.tau, config.sinkhorn_iterations, config.rank_weights
    )
    if config.auxiliary == "none" or (config.auxiliary_steps is not None and step >= config.auxiliary_steps):
        return losses
    if config.auxiliary == "pairwise":
        return losses + config.auxiliary_weight * pairwise_logistic(scores_BNK, target_BNN, mask_BN)
    return losses + config.auxiliary_weight * first_place_cross_entropy(scores_BNK, target_BNN, mask_BN, config.tau)


def _backbone(config: TrainConfig) -> PreTrainedModel:
    folder = resolve_backbone(config.backbone.source)
    return load_backbone(folder, config.backbone.num_layers, torch.float32)
