"""Fine-tune a single-pass ranker: LoRA plus head under a Sinkhorn loss, on Ray Train with DeepSpeed ZeRO.

    python -m jobs.train --config jobs/demo_train.toml --dry-run
    python -m jobs.train --config jobs/demo_train.toml --set output=runs/my_ranker
    ray job submit -- python -m jobs.train --config jobs/demo_train.toml --set workers.use_gpu=true

A run that was cut off goes on from its last checkpoint when started again under the same name.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow.fs as pafs
import ray.data
import ray.train
import torch
from ray.train import LoggingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from jobs.cli import run_job
from jobs.cluster import check_workers, start_ray
from jobs.files import check_writable, open_slates, sole_owner, write_json
from jobs.hardware import commit
from jobs.progress import shows_bar
from jobs.tracking import Tracker, absolute
from jobs.train_config import HeldOutConfig, TrainConfig, deepspeed_config
from jobs.train_data import DataSummary, scan_training_data
from jobs.train_loop import ARTIFACT_FOLDER, WorkerPlan, train_worker
from jobs.train_objectives import build_objective
from spd.artifact import RankerSpec, load_spec, model_version
from spd.backbone import backbone_sha256, default_device, load_tokenizer, resolve_backbone, resolve_dtype
from spd.config import config_to_dict, flatten
from spd.datasets.files import read_slates, resolve_uri
from spd.errors import ArtifactError, ConfigError
from spd.model import parameter_counts
from spd.prompt import Encoder
from spd.slate import Slate, check_unique

SETTINGS_FILE = "settings.json"
FREE_SETTINGS = ("output", "max_failures", "log_every_steps", "checkpoint", "tracking")
"""Settings that may change when a run goes on: they decide nothing about its weights."""


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", TrainConfig, run, describe)


def run(config: TrainConfig) -> Path:
    """Train; returns the artifact's folder."""
    summary, spec = check(config)
    filesystem, storage = resolve_uri(config.storage)
    folder = f"{config.storage.rstrip('/')}/{config.name}"
    taken = f"name={config.name!r} is being trained by another process: wait for it, or set another name"
    with sole_owner(folder, taken):
        return _train(config, summary, spec, filesystem, storage)


def _train(
    config: TrainConfig, summary: DataSummary, spec: RankerSpec, filesystem: pafs.FileSystem, storage: str
) -> Path:
    goes_on = _claim_name(config, summary, spec, f"{config.storage.rstrip('/')}/{config.name}")
    tracking = absolute(config.tracking)
    params = flatten(config_to_dict(config)) | flatten({"data": config_to_dict(summary), "commit": commit()})
    tracker = Tracker.open(tracking, config.name, params, goes_on=goes_on)
    plan = WorkerPlan(
        config=_for_workers(replace(config, tracking=tracking)),
        spec=spec,
        total_steps=total_steps(config, summary),
        run_id=tracker.run_id,
        on_terminal=shows_bar(),
        held_out=_read_held_out(config.held_out),
    )
    skipped = f" ({summary.num_unlabelled} without a target left out)" if summary.num_unlabelled else ""
    print(f"train: {summary.num_slates} slates{skipped}, {plan.total_steps} steps of {config.global_batch_slates}")
    try:
        print("train: starting Ray", flush=True)
        start_ray(config.workers)
        print(
            f"train: starting {config.workers.num_workers} workers; each loads the backbone, about a minute", flush=True
        )
        result = _trainer(plan, filesystem, storage).fit()
        output = _fetch_artifact(result, Path(config.output))
        version = tracker.register(output)
    except BaseException:
        tracker.finish("FAILED")  # started again, the job goes on in the same MLflow run
        raise
    tracker.finish()
    registered = f"{tracking.registered_model} version {version}, alias {tracking.alias}"
    print(f"train: artifact {output} ({model_version(output)}), registered as {registered}")
    return output


def check(config: TrainConfig) -> tuple[DataSummary, RankerSpec]:
    """Read data and backbone once, before Ray starts; raises the error that the run would meet later."""
    if Path(config.output).exists():
        raise ArtifactError(f"output={config.output!r} exists: choose another folder, or remove it first")
    check_workers(config.workers)
    check_writable(config.output)
    if config.adapter.rank == 0 and config.optimizer.head_lr == 0:
        raise ConfigError("adapter.rank=0 and optimizer.head_lr=0 leave nothing to train: set one of them")
    open_slates(config.train)
    check_unique(slate.request_id for slate in _read_held_out(config.held_out))
    if config.init_from is not None:
        check_warm_start(config)
    summary = scan_training_data(config)
    backbone_folder = resolve_backbone(config.backbone.source)
    _check_prompt(config, summary)
    spec = RankerSpec(
        objective=config.objective,
        backbone=config.backbone,
        backbone_sha256=backbone_sha256(backbone_folder),
        prompt=config.prompt,
        num_positions=config.head.num_positions,
        max_trained_candidates=summary.max_candidates,
        head=config.head.name,
        has_adapter=config.adapter.rank > 0,
        decoder=config.decoder,
        tau=config.loss.tau,
        sinkhorn_iterations=config.loss.sinkhorn_iterations,
    )
    return summary, spec


def _check_prompt(config: TrainConfig, summary: DataSummary) -> None:
    """Raise what the first prompt would: a separator, too few markers or a budget that fits no slate shows now."""
    encoder, first = _encoder(config), next(read_slates(config.train))
    if config.objective == "ar":
        encoder.encode_question(first)
    else:
        encoder.encode(first)
    if config.prompt.identifiers != "none":
        encoder.identifiers(summary.max_candidates)


def _encoder(config: TrainConfig) -> Encoder:
    return Encoder(load_tokenizer(resolve_backbone(config.backbone.source)), config.prompt)


def total_steps(config: TrainConfig, summary: DataSummary) -> int:
    """Return the optimiser steps of the run: whole epochs, or fewer by `max_steps`."""
    steps = config.num_epochs * math.ceil(summary.num_slates / config.global_batch_slates)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def describe(config: TrainConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: settings, DeepSpeed's settings, data, parameter counts."""
    summary, spec = check(config)
    device = default_device() if config.workers.use_gpu else torch.device("cpu")
    dtype = resolve_dtype(config.backbone.precision, device)
    return {
        "config": config_to_dict(config),
        "deepspeed": deepspeed_config(config, bf16=dtype == torch.bfloat16),
        "data": config_to_dict(summary),
        "parameters": parameter_counts(build_objective(config, spec, _encoder(config)).build_model()),
        "total_steps": total_steps(config, summary),
    }


def _trainer(plan: WorkerPlan, filesystem: pafs.FileSystem, storage: str) -> TorchTrainer:
    config = plan.config
    workers = config.workers
    return TorchTrainer(
        train_worker,
        train_loop_config=plan,
        torch_config=TorchConfig(backend="nccl" if workers.use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers.num_workers,
            use_gpu=workers.use_gpu,
            resources_per_worker={"CPU": workers.cpus_per_worker, "GPU": int(workers.use_gpu)},
        ),
        datasets={"train": _dataset(config).materialize()},
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),  # every rank sees each batch and takes its share
        run_config=ray.train.RunConfig(
            name=config.name,
            storage_path=storage,
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
            logging_config=LoggingConfig(log_level="WARNING"),  # the workers write this job's own lines
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.checkpoint.num_to_keep),
        ),
    )


def _dataset(config: TrainConfig) -> ray.data.Dataset:
    """Return the rows in the order of the files, so that every rank means the same by the first `max_slates`."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    slates = open_slates(config.train)
    dataset = ray.data.read_parquet(slates.files, filesystem=slates.filesystem)
    return dataset if config.max_slates is None else dataset.limit(config.max_slates)


def _read_held_out(config: HeldOutConfig) -> tuple[Slate, ...]:
    """Return the slates that the learning curve is measured on; none if the run has no such curve."""
    return () if config.slates is None else tuple(islice(read_slates(config.slates), config.max_slates))


def _for_workers(config: TrainConfig) -> TrainConfig:
    """Return the config with local paths made absolute: workers run in another folder."""
    source = config.backbone.source
    if Path(source).exists():
        source = str(Path(source).absolute())
    init_from = None if config.init_from is None else str(Path(config.init_from).absolute())
    return replace(config, backbone=replace(config.backbone, source=source), init_from=init_from)


def check_warm_start(config: TrainConfig) -> None:
    """Raise ConfigError if the artifact to start from has other tensors than the run would train.

    An autoregressive ranker has no head: it takes the adapter of either objective, its bottom layers at least.
    """
    folder = Path(config.init_from or "")
    before = load_spec(folder)
    now: dict[str, object] = {"has_adapter": config.adapter.rank > 0}
    then: dict[str, object] = {"has_adapter": before.has_adapter}
    if config.objective == "spd":
        now |= {
            "objective": config.objective,
            "prompt.num_features": config.prompt.num_features,
            "head.num_positions": config.head.num_positions,
            "head.name": config.head.name,
            "backbone.num_layers": config.backbone.num_layers,
        }
        then |= {
            "objective": before.objective,
            "prompt.num_features": before.prompt.num_features,
            "head.num_positions": before.num_positions,
            "head.name": before.head,
            "backbone.num_layers": before.backbone.num_layers,
        }
    changed = [key for key in now if now[key] != then[key]]
    if changed:
        raise ConfigError(
            f"init_from={config.init_from!r} has {changed[0]}={then[changed[0]]!r}, this run {now[changed[0]]!r}: "
            "set the same, or start afresh"
        )


def _claim_name(config: TrainConfig, summary: DataSummary, spec: RankerSpec, folder: str) -> bool:
    """Record what a new run trains, on what; returns whether an earlier run of this name goes on.

    Raises ConfigError if that one had other settings, data or backbone: it would not be the same run.
    """
    settings = {key: value for key, value in config_to_dict(config).items() if key not in FREE_SETTINGS}
    settings |= {"data_digest": summary.digest, "backbone_sha256": spec.backbone_sha256}
    now = flatten(json.loads(json.dumps(settings)))
    filesystem, path = resolve_uri(f"{folder}/{SETTINGS_FILE}")
    if filesystem.get_file_info(path).type == pafs.FileType.NotFound:
        write_json(f"{folder}/{SETTINGS_FILE}", settings)
        return False
    with filesystem.open_input_stream(path) as file:
        before = flatten(json.loads(file.read()))
    changed = [key for key in now if now[key] != before.get(key)]
    if changed:
        raise ConfigError(
            f"name={config.name!r} is a run with another {changed[0]} ({before.get(changed[0])!r}, now "
            f"{now[changed[0]]!r}): set another name, or the same settings and data to go on"
        )
    return True


def _fetch_artifact(result: ray.train.Result, output: Path) -> Path:
    """Copy the artifact out of the run's last checkpoint (aside, then renamed) and check it."""
    assert result.checkpoint is not None
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    with result.checkpoint.as_directory() as folder:
        shutil.copytree(Path(folder) / ARTIFACT_FOLDER, aside)
    load_spec(aside)
    if output.exists():
        raise ArtifactError(
            f"output={str(output)!r} appeared while training ran: the new artifact is in {str(aside)!r}"
        )
    return aside.rename(output)


if __name__ == "__main__":
    raise SystemExit(main())
