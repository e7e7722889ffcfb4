"""What each training worker runs: DeepSpeed over LoRA plus head, checkpoints, and the artifact at the end."""

import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray.train
import ray.train.torch
import torch
import torch.distributed
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

from jobs.tracking import Tracker, metric_key
from jobs.train_config import TrainConfig, deepspeed_config
from jobs.train_data import global_batches, micro_batches, prefetch, shuffled, slate_seed
from jobs.train_objectives import MicroBatch, Objective, build_objective
from spd.artifact import RankerSpec, save_artifact
from spd.backbone import load_tokenizer, resolve_backbone, resolve_dtype
from spd.errors import DataError
from spd.metrics import default_positive_threshold, slate_metrics
from spd.model import trainable_parameters
from spd.prompt import Encoder
from spd.schedule import warmup_cosine
from spd.slate import Slate

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

CHECKPOINT_TAG = "deepspeed"
ARTIFACT_FOLDER = "artifact"
BACKBONE_PREFIX, HEAD_PREFIX = "backbone.", "head."
CURVE_METRICS = ("auc", "ndcg@10", "r@1", "r@10", "kendall_tau")
LINE_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """All that a worker needs, by value."""

    config: TrainConfig
    spec: RankerSpec
    total_steps: int
    run_id: str
    on_terminal: bool
    held_out: tuple[Slate, ...]


def train_worker(plan: WorkerPlan) -> None:
    """Train from the last checkpoint, if there is one, to `total_steps`; the last checkpoint holds the artifact."""
    config = plan.config
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it would tell of every epoch's stream
    torch.set_num_threads(config.workers.cpus_per_worker)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    encoder = Encoder(load_tokenizer(resolve_backbone(config.backbone.source)), config.prompt)
    objective = build_objective(config, plan.spec, encoder)
    engine = build_engine(plan, objective, ray.train.torch.get_device())
    start_step = _restore(engine)
    reporter = StepReporter(plan, start_step) if rank == 0 else None
    steps = prefetch(_own_steps(plan, objective, rank, world_size, start_step))
    for step, micros in enumerate(steps, start=start_step):
        loss = train_step(engine, objective, micros, step, scale=config.accumulation_steps * world_size)
        mean_loss = _sum_over_ranks(loss)
        if not torch.isfinite(mean_loss):
            raise DataError(f"loss is {mean_loss.item()} at step {step}: lower optimizer.adapter_lr or head_lr")
        if reporter is not None:
            reporter.step(step, mean_loss, engine)
        last = step + 1 == plan.total_steps
        if plan.held_out and (last or (step + 1) % config.held_out.every_steps == 0):
            started_s = time.monotonic()
            metrics = evaluate_held_out(engine, objective, plan.held_out, rank, world_size)
            if reporter is not None:
                reporter.held_out(step, metrics, time.monotonic() - started_s)
        if last or (step + 1) % config.checkpoint.every_steps == 0:
            _checkpoint(engine, plan, encoder, rank, step, with_artifact=last)


def build_engine(plan: WorkerPlan, objective: Objective, device: torch.device) -> "DeepSpeedEngine":
    """Return the DeepSpeed engine over a fresh model; the seed alone decides its initial weights."""
    import deepspeed

    # a C++ collective that DeepSpeed would compile at start on CPUs; a worker killed meanwhile leaves a lock for ever
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = plan.config
    dtype = resolve_dtype(config.backbone.precision, device)
    model = objective.build_model().train()
    float_buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    parameters = trainable_parameters(model)
    optimizer = torch.optim.AdamW(_parameter_groups(config, parameters), weight_decay=config.optimizer.weight_decay)
    warmup, total = config.optimizer.warmup_steps, plan.total_steps
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=list(parameters.values()),
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, total)),
        config=deepspeed_config(config, bf16=dtype == torch.bfloat16),
    )
    _restore_buffers(engine.module, float_buffers)
    return engine


def train_step(
    engine: "DeepSpeedEngine", objective: Objective, micros: Sequence[MicroBatch], step: int, scale: float
) -> Tensor:
    """Run one optimiser step; return this rank's part of the step's mean loss.

    scale undoes DeepSpeed's division by micro-batches and ranks: the weights already sum to 1 over the global batch.
    """
    total = torch.zeros((), device=engine.device)
    for micro in micros:
        losses = objective.losses(engine, micro, step, engine.device)
        loss = (losses * micro.weight.to(engine.device)).sum()
        engine.backward(loss * scale)
        engine.step()
        total += loss.detach()
    return total


def evaluate_held_out(
    engine: "DeepSpeedEngine", objective: Objective, slates: Sequence[Slate], rank: int, world_size: int
) -> dict[str, float]:
    """Return the mean of each of CURVE_METRICS over the slates that define it; every rank takes its share."""
    own = slates[rank::world_size]
    threshold = default_positive_threshold(slate.relevance for slate in slates)
    engine.module.eval()
    orders = objective.rank(engine.module, own)
    engine.module.train()
    rows = [slate_metrics(o, s, positive_threshold=threshold) for o, s in zip(orders, own, strict=True)]
    defined = [[value for row in rows if (value := row[name]) is not None] for name in CURVE_METRICS]
    sums = torch.tensor([[sum(values), len(values)] for values in defined], dtype=torch.float64, device=engine.device)
    totals = _sum_over_ranks(sums).tolist()
    return {name: total / count for name, (total, count) in zip(CURVE_METRICS, totals, strict=True) if count}


class StepReporter:
    """Rank 0's account of the steps: lines (more often on a terminal), curves in MLflow."""

    def __init__(self, plan: WorkerPlan, start_step: int) -> None:
        self._plan = plan
        self._start_step = start_step
        self._tracker = Tracker(plan.config.tracking, plan.run_id)
        self._start_s = self._last_line_s = time.monotonic()
        self._interval_s = TERMINAL_INTERVAL_S if plan.on_terminal else LINE_INTERVAL_S
        if start_step:
            _write_line(f"train: going on at step {start_step}/{plan.total_steps}")

    def step(self, step: int, mean_loss: Tensor, engine: "DeepSpeedEngine") -> None:
        """Account for one finished optimiser step."""
        config, done = self._plan.config, step + 1 - self._start_step
        elapsed_s = time.monotonic() - self._start_s
        slates_per_s = done * config.global_batch_slates / elapsed_s
        if step % config.log_every_steps == 0:
            adapter_lr = engine.optimizer.param_groups[0]["lr"]
            point = {"loss": mean_loss.item(), "lr": adapter_lr, "slates_per_s": slates_per_s}
            self._tracker.log_metrics(point, step)
        last = step + 1 == self._plan.total_steps
        if last or done == 1 or time.monotonic() - self._last_line_s >= self._interval_s:
            self._last_line_s = time.monotonic()
            left_s = (self._plan.total_steps - step - 1) * elapsed_s / done
            _write_line(
                f"train: step {step + 1}/{self._plan.total_steps} loss {mean_loss.item():.3f} "
                f"{slates_per_s:.2f} slates/s, {left_s:.0f} s left"
            )

    def held_out(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Account for one evaluation on held-out slates; its time is no training time."""
        self._start_s += seconds
        self._tracker.log_metrics({f"held_out_{metric_key(name)}": value for name, value in metrics.items()}, step)
        _write_line(f"train: step {step + 1} held out: " + ", ".join(f"{k} {v:.3f}" for k, v in metrics.items()))


def _own_steps(
    plan: WorkerPlan, objective: Objective, rank: int, world_size: int, start_step: int
) -> Iterator[list[MicroBatch]]:
    config = plan.config
    dataset = ray.train.get_dataset_shard("train")
    for epoch, slates in global_batches(dataset, config, start_step, plan.total_steps, world_size):
        order_epoch = 0 if config.caches_hidden else epoch
        mixed = [shuffled(slate, config.seed, order_epoch, config.target.max_candidates) for slate in slates]
        seeds = [slate_seed(config.seed, epoch, slate) for slate in slates]
        yield micro_batches(
            mixed,
            objective.micro_batch,
            seeds,
            rank,
            world_size,
            config.micro_batch_slates,
            config.accumulation_steps,
        )


def _parameter_groups(config: TrainConfig, parameters: Mapping[str, torch.nn.Parameter]) -> list[dict[str, object]]:
    head = [p for name, p in parameters.items() if name.startswith(HEAD_PREFIX)]
    adapter = [p for name, p in parameters.items() if not name.startswith(HEAD_PREFIX)]
    groups = [(adapter, config.optimizer.adapter_lr), (head, config.optimizer.head_lr)]
    return [{"params": params, "lr": lr} for params, lr in groups if params]


def _restore_buffers(model: torch.nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Put float32 buffers back: DeepSpeed's bf16 casts the rotary frequencies too, and positions would then blur."""
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        device = model.get_buffer(name).device
        model.get_submodule(owner).register_buffer(leaf, buffer.to(device), persistent=False)


def _sum_over_ranks(value: Tensor) -> Tensor:
    torch.distributed.all_reduce(value)
    return value


def _restore(engine: "DeepSpeedEngine") -> int:
    """Load the run's last checkpoint, if any; return the step to go on with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        # the frozen backbone is not in the checkpoint, hence not strict
        _, state = engine.load_checkpoint(folder, tag=CHECKPOINT_TAG, load_module_strict=False)
    return int(state["step"]) + 1


def _checkpoint(
    engine: "DeepSpeedEngine", plan: WorkerPlan, encoder: Encoder, rank: int, step: int, with_artifact: bool
) -> None:
    """Save the trainable state of every rank, and rank 0's artifact; all ranks call it."""
    with tempfile.TemporaryDirectory() as folder:
        state = {"step": step}
        engine.save_checkpoint(folder, tag=CHECKPOINT_TAG, client_state=state, exclude_frozen_parameters=True)
        if with_artifact:
            _write_artifact(engine, plan, encoder, rank, Path(folder) / ARTIFACT_FOLDER)
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _write_artifact(engine: "DeepSpeedEngine", plan: WorkerPlan, encoder: Encoder, rank: int, folder: Path) -> None:
    """Write the artifact from the float32 master weights; gathering them is a collective, writing is rank 0's."""
    from deepspeed.utils import safe_get_full_fp32_param

    names = trainable_parameters(engine.module)
    masters = {name: safe_get_full_fp32_param(p).detach().cpu() for name, p in names.items()}
    if rank != 0:
        return
    backbone = engine.module.backbone
    adapter_state = _strip_prefix(masters, BACKBONE_PREFIX)
    adapter = None
    if isinstance(backbone, PeftModel):
        adapter = (get_peft_model_state_dict(backbone, state_dict=adapter_state, save_embedding_layers=False), backbone)
    save_artifact(folder, plan.spec, encoder.tokenizer, _strip_prefix(masters, HEAD_PREFIX), adapter)


def _strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _write_line(line: str) -> None:
    """Write a line to the driver's log: Ray Train's patched `print` would write it twice."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
