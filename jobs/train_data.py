"""Training slates: checked before Ray starts, streamed in an order that seed, epoch and request_id alone decide."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, zip_longest

import numpy as np
import ray

from jobs.progress import progress
from jobs.train_config import TrainConfig
from jobs.train_objectives import MicroBatch
from spd.datasets.files import read_slates
from spd.errors import DataError
from spd.slate import Slate, check_unique, slate_from_row
from spd.targets import has_target, label_tiers

READ_ROWS = 256

_NEEDS = {
    "teacher": "a teacher_ranking: label the slates (jobs.label, jobs.prepare), or set target.kind='labels'",
    "labels_then_teacher": "a teacher_ranking: label the slates (jobs.label, jobs.prepare)",
    "labels": "a relevance above 0: take slates with a positive, or set target.kind='teacher'",
}

MakeMicroBatch = Callable[[Sequence[Slate], Sequence[float], Sequence[int]], MicroBatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """What the scan before training found."""

    num_slates: int
    """Slates that will be trained on."""
    num_unlabelled: int
    """Slates left out, for want of a target."""
    max_candidates: int
    """Candidates of the largest."""
    digest: str
    """Identity of the slates, texts and targets, in the order of the files."""


def scan_training_data(config: TrainConfig) -> DataSummary:
    """Read the data once and return what is in it.

    Raises DataError for a broken row, a repeated request_id, a slate with more candidates than K, or one without a
    target unless those are to be skipped.
    """
    ids: list[str] = []
    digest = hashlib.sha256()
    largest = num_unlabelled = num_scored = 0
    slates = islice(read_slates(config.train), config.max_slates)
    for slate in progress(slates, None, "train: check the slates"):
        ids.append(slate.request_id)
        if not has_target(slate, config.target.kind) and config.unlabelled == "skip":
            num_unlabelled += 1
            continue
        size = min(len(slate.candidates), config.target.max_candidates or len(slate.candidates))
        _check_trainable(slate, size, config)
        digest.update(repr(slate).encode())
        largest = max(largest, size)
        num_scored += slate.score is not None
    if len(ids) == num_unlabelled:
        raise DataError(f"train={config.train!r} holds no slate with {_NEEDS[config.target.kind]}")
    if config.prompt.use_score and not num_scored:
        raise DataError(f"train={config.train!r}: prompt.use_score=true, and no slate has a score: set it false")
    check_unique(ids)
    return DataSummary(
        num_slates=len(ids) - num_unlabelled,
        num_unlabelled=num_unlabelled,
        max_candidates=largest,
        digest=digest.hexdigest()[:16],
    )


def epoch_order(
    slates: Iterator[Slate], window_slates: int, seed: int, epoch: int, num_shares: int = 1
) -> Iterator[Slate]:
    """Yield the slates of one epoch, each window of the stream sorted by the hash of (seed, epoch, request_id).

    A data set that fits the window is shuffled whole; a larger one streams in constant memory. With several shares
    each slate keeps its own through all epochs: place p of the order is always of share p mod `num_shares`.
    """
    while window := list(islice(slates, window_slates)):
        fixed = sorted(window, key=lambda slate: _hash(seed, 0, slate.request_id))
        shares = [
            sorted(fixed[share::num_shares], key=lambda slate: _hash(seed, epoch, slate.request_id))
            for share in range(num_shares)
        ]
        yield from (slate for row in zip_longest(*shares) for slate in row if slate is not None)


def global_batches(
    dataset: ray.data.DataIterator, config: TrainConfig, start_step: int, total_steps: int, world_size: int
) -> Iterator[tuple[int, list[Slate]]]:
    """Yield (epoch, slates) of each optimiser step from `start_step` on; an epoch's last batch may be smaller.

    Every rank sees every batch and takes its own share, so no collective is needed to agree on the number of steps.
    Where hidden states are kept, a slate goes to the same rank in every epoch.
    """
    num_shares = world_size if config.caches_hidden else 1
    step = 0
    for epoch in range(config.num_epochs):
        ordered = epoch_order(_stream(dataset, config), config.shuffle_window_slates, config.seed, epoch, num_shares)
        while step < total_steps and (slates := list(islice(ordered, config.global_batch_slates))):
            if step >= start_step:
                yield epoch, slates
            step += 1


def micro_batches(
    slates: Sequence[Slate],
    make: MakeMicroBatch,
    seeds: Sequence[int],
    rank: int,
    world_size: int,
    micro_size: int,
    num_micro: int,
) -> list[MicroBatch]:
    """Return this rank's share of a global batch as exactly `num_micro` micro-batches, filled up with weight 0."""
    own = list(zip(slates, seeds, strict=True))[rank::world_size]
    capacity = micro_size * num_micro
    assert len(own) <= capacity
    padded = own + [(slates[0], seeds[0])] * (capacity - len(own))
    weights = [1.0 / len(slates)] * len(own) + [0.0] * (capacity - len(own))
    found = []
    for start in range(0, capacity, micro_size):
        part = padded[start : start + micro_size]
        found.append(
            make([slate for slate, _ in part], weights[start : start + micro_size], [seed for _, seed in part])
        )
    return found


def prefetch(items: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """Yield the items, each made on another thread while its predecessor is in use: encoding overlaps the step."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(next, items, None)
        while (item := future.result()) is not None:
            future = pool.submit(next, items, None)
            yield item


def shuffled(slate: Slate, seed: int, epoch: int, max_candidates: int | None = None) -> Slate:
    """Return the slate with its candidates in an order that seed, epoch and request_id decide, targets remapped.

    Of a larger slate so many candidates at random stay, the positives first among them.
    """
    rng = np.random.default_rng(slate_seed(seed, epoch, slate))
    order = rng.permutation(len(slate.candidates)).tolist()
    if max_candidates is not None and len(order) > max_candidates:
        positive = {index for tier in label_tiers(slate) for index in tier}
        kept = sorted(order, key=lambda index: index not in positive)[:max_candidates]
        order = rng.permutation(kept).tolist()  # in the first order the positives would mostly stand last
    return slate.reordered(order)


def slate_seed(seed: int, epoch: int, slate: Slate) -> int:
    """Return the number that decides all that is random about a slate in an epoch."""
    return _hash(seed, epoch, slate.request_id)


def _check_trainable(slate: Slate, size: int, config: TrainConfig) -> None:
    where = f"slate {slate.request_id!r}"
    if size > config.head.num_positions:
        raise DataError(
            f"{where}: {size} candidates exceed head.num_positions={config.head.num_positions}: "
            f"set head.num_positions={size} or more, or shorten the slates"
        )
    if not has_target(slate, config.target.kind):
        raise DataError(
            f"{where}: target.kind={config.target.kind!r} needs {_NEEDS[config.target.kind]} "
            "(or set unlabelled='skip' to train without the slate)"
        )


def _stream(dataset: ray.data.DataIterator, config: TrainConfig) -> Iterator[Slate]:
    rows = (
        row
        for table in dataset.iter_batches(batch_size=READ_ROWS, batch_format="pyarrow", prefetch_batches=1)
        for row in table.to_pylist()
    )
    slates = (slate_from_row(row) for row in rows)
    return (slate for slate in slates if has_target(slate, config.target.kind))


def _hash(seed: int, epoch: int, request_id: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{epoch}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
