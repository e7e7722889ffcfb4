"""Prefill replicas: encoded slates in, score matrices out, dynamically batched under a token budget."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from ray import serve

from serve_app.errors import VersionMismatchError
from spd.artifact import load_model, load_spec, model_version
from spd.backbone import Precision, default_device
from spd.batch import collate, plan_batches
from spd.prompt import EncodedSlate
from spd.ranker import score_batch

Scores = NDArray[np.float32]


class Prefill:
    """Holds the model. Forward passes run one at a time in a thread, so that the event loop stays free."""

    def __init__(
        self,
        artifact: str,
        *,
        batch_tokens: int,
        batch_wait_s: float,
        num_threads: int,
        precision: Precision | None,
        backbone: str | None,
    ) -> None:
        """Load the model; raises ArtifactError when the folder or its backbone is not what it claims."""
        folder = Path(artifact)
        self._model = load_model(folder, load_spec(folder), default_device(), precision, backbone)
        self._version = model_version(folder)
        self._batch_tokens = batch_tokens
        self._thread = ThreadPoolExecutor(1, "forward", initializer=torch.set_num_threads, initargs=(num_threads,))
        self._idle = asyncio.Event()
        self._idle.set()
        self._score_batched: Callable[[EncodedSlate], Awaitable[Scores]] = serve.batch(
            self._score_all,
            max_batch_size=batch_tokens,
            batch_wait_timeout_s=batch_wait_s,
            batch_size_fn=self._num_tokens,
        )

    async def __call__(self, slate: EncodedSlate, version: str) -> Scores:
        """Return the slate's scores, float32 [n, n].

        Raises VersionMismatchError if it was encoded for another artifact than this replica holds.
        """
        if version != self._version:
            raise VersionMismatchError(f"slate encoded for model {version}, this replica holds {self._version}")
        await self._idle.wait()  # @serve.batch closes its batch even while one runs: here the next one still grows
        return await self._score_batched(slate)

    async def _score_all(self, slates: list[EncodedSlate]) -> list[Scores]:
        self._idle.clear()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._forward, slates)
        finally:
            self._idle.set()

    def _forward(self, slates: Sequence[EncodedSlate]) -> list[Scores]:
        scores: dict[int, Scores] = {}
        for group in plan_batches([len(slate.input_ids) for slate in slates], self._batch_tokens):
            scores.update(zip(group, score_batch(self._model, collate([slates[i] for i in group])), strict=True))
        return [scores[index] for index in range(len(slates))]

    def _num_tokens(self, slates: Sequence[EncodedSlate]) -> int:
        """Return the tokens of a batch; a slate over the budget counts as the budget, so that it runs alone."""
        return sum(min(len(slate.input_ids), self._batch_tokens) for slate in slates)
