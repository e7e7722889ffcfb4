"""Settings of a training run."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from jobs.cluster import WorkerConfig
from jobs.tracking import TrackingConfig
from spd.backbone import AdapterConfig, BackboneConfig
from spd.decode import DecoderName
from spd.head import HeadName
from spd.prompt import PromptConfig
from spd.sinkhorn import DEFAULT_ITERATIONS, sinkhorn_problems


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
    """Sinkhorn cross-entropy and the pairwise term that helps it off its plateau."""

    tau: float = 1.0
    """Sinkhorn temperature."""
    sinkhorn_iterations: int = DEFAULT_ITERATIONS
    """Row and column normalisations."""
    pairwise_weight: float = 1.0
    """Weight of the pairwise logistic loss on expected ranks; 0 leaves it out."""

    def problems(self) -> list[str]:
        found = sinkhorn_problems(self.tau, self.sinkhorn_iterations)
        if not 0 <= self.pairwise_weight < math.inf:
            found.append(f"pairwise_weight={self.pairwise_weight} must be a finite number of at least 0")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay."""

    adapter_lr: float = 2e-4
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
    train: str
    """Parquet slates with `teacher_ranking`: a folder or URI."""
    unlabelled: Literal["error", "skip"] = "error"
    """What to do with a slate without teacher_ranking: refuse the run, or train without it (counted)."""
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
    loss: LossConfig = field(default_factory=LossConfig)
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
        if self.max_steps is not None and self.max_steps < 1:
            found.append(f"max_steps={self.max_steps} must be at least 1, or null")
        per_round = self.micro_batch_slates * self.workers.num_workers
        if not found and self.global_batch_slates % per_round:
            found.append(
                f"micro_batch_slates={self.micro_batch_slates} x workers.num_workers={self.workers.num_workers} "
                f"must divide global_batch_slates={self.global_batch_slates}: use {per_round}, {2 * per_round}, ..."
            )
        return found

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
