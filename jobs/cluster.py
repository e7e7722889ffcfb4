"""Starting Ray, or joining the cluster that the job was submitted to."""

import logging
import os
from dataclasses import dataclass

import ray
import ray.data
import torch

from jobs.cli import QUIET_ENVIRONMENT
from spd.errors import ConfigError

MIN_LOGICAL_CPUS = 4
MAX_OVERSUBSCRIPTION = 4
OBJECT_STORE_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """How many workers, and what each owns."""

    num_workers: int = 2
    """Processes that share the work."""
    cpus_per_worker: int = 1
    """CPU cores of each; also its number of torch threads."""
    use_gpu: bool = False
    """Give each worker one GPU."""

    def problems(self) -> list[str]:
        return [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("num_workers", "cpus_per_worker")
            if getattr(self, name) < 1
        ]


def check_workers(workers: WorkerConfig) -> None:
    """Raise ConfigError if a Ray started on this machine could not hold the workers; a cluster's size is its own."""
    if os.environ.get("RAY_ADDRESS") or ray.is_initialized():
        return
    cores = os.cpu_count() or 1
    wanted = workers.num_workers * workers.cpus_per_worker
    if wanted > MAX_OVERSUBSCRIPTION * cores:
        raise ConfigError(
            f"workers.num_workers={workers.num_workers} x cpus_per_worker={workers.cpus_per_worker} is far more than "
            f"this machine's {cores} cores: lower them, or submit the job to a cluster"
        )
    if workers.use_gpu and not torch.cuda.is_available():
        raise ConfigError("workers.use_gpu=true, and this machine has no GPU: set it false, or submit to a cluster")


def start_ray(workers: WorkerConfig, show_data_progress: bool = False) -> None:
    """Join the cluster of `RAY_ADDRESS`, else start a local one that dies with this process.

    The local one declares more logical CPUs than the workers take, so that Ray Data's own tasks find a place; it has a
    dashboard because without one Ray floods the log with failed clean-ups.
    """
    # the v2 reader folds small files into one block: no parallelism.
    context = ray.data.DataContext.get_current()
    context.use_datasource_v2 = False
    context.enable_progress_bars = show_data_progress
    logging.getLogger("ray.data").setLevel(logging.INFO if show_data_progress else logging.ERROR)
    if ray.is_initialized():
        return
    runtime_env = {"env_vars": QUIET_ENVIRONMENT | _accelerator(workers)}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(runtime_env=runtime_env, logging_level="warning")
        return
    num_cpus = max(MIN_LOGICAL_CPUS, workers.num_workers * workers.cpus_per_worker + 2, os.cpu_count() or 1)
    ray.init(
        num_cpus=num_cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=True,
        logging_level="warning",
        runtime_env=runtime_env,
    )


def _accelerator(workers: WorkerConfig) -> dict[str, str]:
    return {} if workers.use_gpu else {"DS_ACCELERATOR": "cpu"}
