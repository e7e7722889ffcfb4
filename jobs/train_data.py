"""Training slates: checked before Ray starts, streamed in an order that seed, epoch and request_id alone decide."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import ray
import torch
from torch import Tensor

from jobs.progress import progress
from jobs.train_config import TrainConfig
from spd.batch import Batch, collate
from spd.datasets.files import read_slates
from spd.errors import DataError
from spd.prompt import Encoder
from spd.slate import Slate, check_unique, slate_from_row

READ_ROWS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """What the scan before training found."""

    num_slates: int
    """Slates that will be trained on."""
    num_unlabelled: int
    """Slates left out, for want of a teacher_ranking."""
    max_candidates: int
    """Candidates of the largest."""
    digest: str
    """Identity of the slates, texts and targets, in the order of the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward's slates with their targets.

    position: int64 [B, N], the teacher's place of each candidate, -1 where it gives none.
    weight: float32 [B], 1 over the slates of the whole step, 0 for a filler slate that only keeps ranks in step.
    """

    batch: Batch
    position: Tensor
    weight: Tensor


def scan_training_data(config: TrainConfig) -> DataSummary:
    """Read the data once and return what is in it.

    Raises DataError for a broken row, a repeated request_id, a slate with more than K candidates, or one without a
    teacher unless those are to be skipped.
    """
    ids: list[str] = []
    digest = hashlib.sha256()
    largest = num_unlabelled = 0
    for slate in progress(read_slates(config.train), None, "train: check the slates"):
        ids.append(slate.request_id)
        if not slate.teacher_ranking and config.unlabelled == "skip":
            num_unlabelled += 1
            continue
        _check_trainable(slate, config.head.num_positions)
        digest.update(repr(slate).encode())
        largest = max(largest, len(slate.candidates))
    if len(ids) == num_unlabelled:
        raise DataError(f"train={config.train!r} holds no slate with a teacher_ranking: prepare or label it first")
    check_unique(ids)
    return DataSummary(
        num_slates=len(ids) - num_unlabelled,
        num_unlabelled=num_unlabelled,
        max_candidates=largest,
        digest=digest.hexdigest()[:16],
    )


def epoch_order(slates: Iterator[Slate], window_slates: int, seed: int, epoch: int) -> Iterator[Slate]:
    """Yield the slates of one epoch, each window of the stream sorted by the hash of (seed, epoch, request_id).

    A data set that fits the window is shuffled whole; a larger one streams in constant memory.
    """
    while window := list(islice(slates, window_slates)):
        yield from sorted(window, key=lambda slate: _hash(seed, epoch, slate.request_id))


def global_batches(
    dataset: ray.data.DataIterator, config: TrainConfig, start_step: int, total_steps: int
) -> Iterator[tuple[int, list[Slate]]]:
    """Yield (epoch, slates) of each optimiser step from `start_step` on; an epoch's last batch may be smaller.

    Every rank sees every batch and takes its own share, so no collective is needed to agree on the number of steps.
    """
    step = 0
    for epoch in range(config.num_epochs):
        ordered = epoch_order(_stream(dataset), config.shuffle_window_slates, config.seed, epoch)
        while step < total_steps and (slates := list(islice(ordered, config.global_batch_slates))):
            if step >= start_step:
                yield epoch, slates
            step += 1


def micro_batches(
    slates: Sequence[Slate], encoder: Encoder, rank: int, world_size: int, micro_size: int, num_micro: int
) -> list[MicroBatch]:
    """Return this rank's share of a global batch as exactly `num_micro` micro-batches, filled up with weight 0."""
    own = list(slates[rank::world_size])
    capacity = micro_size * num_micro
    assert len(own) <= capacity
    padded = own + [slates[0]] * (capacity - len(own))
    weights = [1.0 / len(slates)] * len(own) + [0.0] * (capacity - len(own))
    starts = range(0, capacity, micro_size)
    return [_micro_batch(padded[i : i + micro_size], weights[i : i + micro_size], encoder) for i in starts]


def prefetch(items: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """Yield the items, each made on another thread while its predecessor is in use: encoding overlaps the step."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(next, items, None)
        while (item := future.result()) is not None:
            future = pool.submit(next, items, None)
            yield item


def shuffled(slate: Slate, seed: int, epoch: int) -> Slate:
    """Return the slate with its candidates in an order that seed, epoch and request_id decide, targets remapped."""
    rng = np.random.default_rng(_hash(seed, epoch, slate.request_id))
    return slate.reordered(rng.permutation(len(slate.candidates)).tolist())


def teacher_positions(slates: Sequence[Slate], size: int) -> Tensor:
    """Return int64 [B, N]: the place the teacher gives each candidate, 0 = best, -1 where it gives none."""
    position = torch.full((len(slates), size), -1, dtype=torch.int64)
    for row, slate in enumerate(slates):
        for place, candidate in enumerate(slate.teacher_ranking or ()):
            position[row, candidate] = place
    return position


def _micro_batch(slates: Sequence[Slate], weights: Sequence[float], encoder: Encoder) -> MicroBatch:
    batch = collate([encoder.encode(slate) for slate in slates])
    return MicroBatch(
        batch=batch,
        position=teacher_positions(slates, batch.readout.shape[1]),
        weight=torch.tensor(weights, dtype=torch.float32),
    )


def _check_trainable(slate: Slate, num_positions: int) -> None:
    where = f"slate {slate.request_id!r}"
    if len(slate.candidates) > num_positions:
        raise DataError(
            f"{where}: {len(slate.candidates)} candidates exceed head.num_positions={num_positions}: "
            f"set head.num_positions={len(slate.candidates)} or more, or shorten the slates"
        )
    if not slate.teacher_ranking:
        raise DataError(
            f"{where}: teacher_ranking is null: training needs a teacher's order: label it, "
            "or set unlabelled='skip' to train without it"
        )


def _stream(dataset: ray.data.DataIterator) -> Iterator[Slate]:
    for table in dataset.iter_batches(batch_size=READ_ROWS, batch_format="pyarrow", prefetch_batches=1):
        yield from (slate for slate in map(slate_from_row, table.to_pylist()) if slate.teacher_ranking)


def _hash(seed: int, epoch: int, request_id: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{epoch}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
