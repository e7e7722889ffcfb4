"""Settings of a training run."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from jobs.cluster import WorkerConfig
from jobs.tracking import TrackingConfig
from spd.artifact import Objective
from spd.backbone import AdapterConfig, BackboneConfig
from spd.decode import DecoderName
from spd.head import HeadName
from spd.prompt import PromptConfig
from spd.sinkhorn import DEFAULT_ITERATIONS, RankWeights, sinkhorn_problems
from spd.targets import AnswerTail, TargetName


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """The head and its width in rank positions."""

    name: HeadName = "self_attention"
    """linear, self_attention or slot_query."""
    num_positions: int = 50
    """K: the largest slate that the head can rank."""

    def problems(self) -> list[str]:
        return [f"num_positions={self.num_positions} must be at least 1"] if self.num_positions < 1 else []


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Sinkhorn cross-entropy, what of the target it reads, and the auxiliary term that helps it off its plateau."""

    tau: float = 1.0
    """Sinkhorn temperature."""
    sinkhorn_iterations: int = DEFAULT_ITERATIONS
    """Row and column normalisations."""
    rank_weights: RankWeights = "uniform"
    """Weight of each place: uniform, or dcg (1 / log2(1 + place)), where the tail of the teacher's order is noise."""
    top_m: int | None = None
    """Keep the target's first m places only (a teacher's prefix); null keeps all."""
    auxiliary: Literal["pairwise", "first_place", "none"] = "pairwise"
    """Term beside it: pairwise logistic on expected ranks, cross-entropy of the first place alone, or none."""
    auxiliary_weight: float = 1.0
    """Weight of the auxiliary term."""
    auxiliary_steps: int | None = None
    """Optimiser steps after which the auxiliary term is left out; null keeps it."""

    def problems(self) -> list[str]:
        found = sinkhorn_problems(self.tau, self.sinkhorn_iterations)
        if not 0 < self.auxiliary_weight < math.inf:
            found.append(
                f"auxiliary_weight={self.auxiliary_weight} must be a finite number above 0 (or auxiliary=none)"
            )
        for name in ("top_m", "auxiliary_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                found.append(f"{name}={value} must be at least 1, or null")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """What a slate's true order is taken from."""

    kind: TargetName = "teacher"
    """teacher: teacher_ranking (with extra_teacher_rankings: their mean). labels: relevance, positives first.
    labels_then_teacher: the positives, then the teacher's order of the rest."""
    answer_tail: AnswerTail = "sought"
    """objective=ar on labels, after the positives: unscored, shuffled, or sought (see spd/targets.py)."""
    draw_names: bool = True
    """objective=ar with markers: draw each slate's names anew from twice K, so that they have to be read and copied;
    false gives the first candidate always the first name."""
    max_candidates: int | None = None
    """Train on so many candidates of each slate, positives always among them, drawn anew each epoch; null takes all."""

    def problems(self) -> list[str]:
        if self.max_candidates is not None and self.max_candidates < 2:
            return [f"max_candidates={self.max_candidates} must be at least 2, or null"]
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutConfig:
    """Evaluation while training: a learning curve on held-out slates."""

    slates: str | None = None
    """Slates with relevance: a folder or URI; null evaluates nothing."""
    every_steps: int = 50
    """Optimiser steps between evaluations; there is always one at the end."""
    max_slates: int = 200
    """Take the first slates only."""

    def problems(self) -> list[str]:
        return [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("every_steps", "max_slates")
            if getattr(self, name) < 1
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay."""

    adapter_lr: float = 5e-4
    """Peak learning rate of the LoRA weights."""
    head_lr: float = 1e-3
    """Peak learning rate of the head."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    warmup_steps: int = 20
    """Optimiser steps of linear warm-up."""
    gradient_clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""

    def problems(self) -> list[str]:
        names = ("adapter_lr", "head_lr", "weight_decay", "gradient_clip", "warmup_steps")
        return [
            f"{name}={getattr(self, name)} must be a finite number of at least 0"
            for name in names
            if not 0 <= getattr(self, name) < math.inf
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where a run can go on from after a crash."""

    every_steps: int = 50
    """Optimiser steps between checkpoints."""
    num_to_keep: int = 2
    """Older ones are removed."""

    def problems(self) -> list[str]:
        return [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("every_steps", "num_to_keep")
            if getattr(self, name) < 1
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training run: slates with teacher rankings in, a ranker artifact out."""

    name: str = "spd"
    """Name of the run; the same name goes on where an unfinished run stopped."""
    objective: Objective = "spd"
    """spd: a single-pass ranker. ar: an autoregressive ranker of the same prompt (a teacher for jobs.label)."""
    train: str
    """Parquet slates with teacher rankings (or relevance, for target.kind=labels): a folder or URI."""
    max_slates: int | None = None
    """Train on the first slates only; null takes all."""
    unlabelled: Literal["error", "skip"] = "error"
    """What to do with a slate without a target: refuse the run, or train without it (counted)."""
    init_from: str | None = None
    """Artifact folder whose adapter and head to start from (a warm start); null starts afresh. objective=ar takes the
    adapter alone, of a single-pass ranker too, and one of fewer layers starts its bottom ones."""
    cache_hidden: bool = True
    """Frozen backbone (adapter.rank=0): keep each slate's hidden states after its first forward, in one fixed order."""
    output: str
    """Folder for the artifact; must not exist."""
    storage: str = "runs"
    """Folder or URI for checkpoints."""
    seed: int = 0
    """Decides initial weights, the order of slates and of their candidates."""
    num_epochs: int = 1
    """Passes over the slates."""
    max_steps: int | None = None
    """Stop after this many optimiser steps; null runs all epochs."""
    global_batch_slates: int = 16
    """Slates of one optimiser step, over all workers."""
    micro_batch_slates: int = 2
    """Slates of one forward on one worker."""
    shuffle_window_slates: int = 50_000
    """Slates shuffled together in memory; a larger data set streams through windows of this size."""
    zero_stage: Literal[1, 2] = 2
    """DeepSpeed ZeRO stage."""
    log_every_steps: int = 1
    """Optimiser steps between points of the loss curve."""
    max_failures: int = 2
    """Lost workers survived before the run fails."""
    decoder: DecoderName = "lap"
    """Decoder that the artifact uses unless asked for another."""
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    workers: WorkerConfig = field(default_factory=WorkerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def problems(self) -> list[str]:
        names = ("num_epochs", "global_batch_slates", "micro_batch_slates", "log_every_steps", "shuffle_window_slates")
        found = [f"{name}={getattr(self, name)} must be at least 1" for name in names if getattr(self, name) < 1]
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            found.append(
                f"name={self.name!r} must be letters, digits, '.', '_' or '-', beginning with one of the first"
            )
        if not 0 <= self.seed < 2**63:
            found.append(f"seed={self.seed} must be between 0 and 2**63 - 1")
        if self.max_failures < 0:
            found.append(f"max_failures={self.max_failures} must be at least 0")
        if "://" in self.output:
            found.append(f"output={self.output!r} must be a local folder: MLflow keeps the artifact for other machines")
        for name in ("max_steps", "max_slates"):
            if (value := getattr(self, name)) is not None and value < 1:
                found.append(f"{name}={value} must be at least 1, or null")
        found.extend(self._objective_problems())
        per_round = self.micro_batch_slates * self.workers.num_workers
        if not found and self.global_batch_slates % per_round:
            found.append(
                f"micro_batch_slates={self.micro_batch_slates} x workers.num_workers={self.workers.num_workers} "
                f"must divide global_batch_slates={self.global_batch_slates}: use {per_round}, {2 * per_round}, ..."
            )
        return found

    def _objective_problems(self) -> list[str]:
        if self.objective == "spd":
            return []
        identifiers, target = self.prompt.identifiers, self.target
        found = []
        if identifiers == "none" or self.prompt.attention != "causal" or self.prompt.readout != "end":
            found.append(
                "objective='ar' names candidates in an answer: set prompt.identifiers to 'markers' or 'ordinals', and "
                "leave prompt.readout and prompt.attention as they are"
            )
        if target.kind == "labels" and target.answer_tail == "sought" and identifiers == "ordinals":
            found.append(
                "target.answer_tail='sought' wants one token a name: set prompt.identifiers='markers', or another tail"
            )
        if self.adapter.rank == 0:
            found.append("adapter.rank=0 leaves objective='ar' nothing to train: set it above 0")
        return found

    @property
    def caches_hidden(self) -> bool:
        """Whether hidden states are kept: the backbone does not change, and candidates keep their first order."""
        return self.cache_hidden and self.adapter.rank == 0 and self.target.max_candidates is None

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one worker in one optimiser step."""
        return self.global_batch_slates // (self.micro_batch_slates * self.workers.num_workers)


def deepspeed_config(config: TrainConfig, bf16: bool) -> dict[str, object]:
    """Return the DeepSpeed engine's own settings for this run."""
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_slates,
        "gradient_accumulation_steps": config.accumulation_steps,
        "gradient_clipping": config.optimizer.gradient_clip,
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own would be compiled at start
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }
