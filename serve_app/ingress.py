"""Ingress replicas: HTTP, validation, tokenising, one hop to a prefill replica, the assignment, the response."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import ParamSpec, TypeVar
from uuid import uuid4

import numpy as np
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.errors import (
    RETRIED,
    BrokenScoresError,
    NotReadyError,
    UnknownModelError,
    add_error_handlers,
    find_answer,
)
from serve_app.prefill import Scores
from serve_app.schemas import (
    Document,
    ErrorBody,
    Latency,
    Meta,
    RankedResult,
    RerankRequest,
    RerankResponse,
    ServedModel,
    ServedModels,
    Status,
    Usage,
)
from spd.artifact import load_encoder, load_spec, model_version
from spd.prompt import EncodedSlate
from spd.ranker import decode_for, encode_within
from spd.slate import Candidate, Ranking, Slate

MAX_TRIES = 3
FIRST_PAUSE_S = 0.1
READY_TIMEOUT_S = 5.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

api = FastAPI(
    title="spd",
    description="Listwise reranking by single pass decoding: one forward pass a request.",
    responses={status: {"model": ErrorBody} for status in (404, 422, 500, 503)},
)
add_error_handlers(api)


@dataclass(frozen=True, slots=True)
class RankedSlate:
    """A ranking with what it took."""

    encoded: EncodedSlate
    ranking: Ranking
    latency: Latency


def build_slate(request_id: str, query: str, documents: list[Document]) -> Slate:
    """Return the slate of a request, candidate ids being the documents' places."""
    candidates = tuple(Candidate(str(index), document.text) for index, document in enumerate(documents))
    return Slate(request_id=request_id, query=query, candidates=candidates)


def build_results(ranking: Ranking, request: RerankRequest) -> list[RankedResult]:
    """Return the first `top_n` places of the full ranking."""
    places = list(zip(ranking.order, ranking.relevance_score, strict=True))[: request.top_n]
    return [
        RankedResult(
            index=index,
            relevance_score=score,
            document=request.documents[index] if request.return_documents else None,
        )
        for index, score in places
    ]


def _milliseconds(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)


# @serve.ingress copies the routes with the globals they name while this module is still being read: what they call
# stands above it.
@serve.ingress(api)
class Ingress:
    """Answers HTTP. Tokenising and decoding run in a thread, so that the event loop stays free for the probes."""

    def __init__(self, prefill: DeploymentHandle, artifact: str, *, model: str) -> None:
        folder = Path(artifact)
        self._prefill = prefill
        self._model = model
        self._spec = load_spec(folder)
        self._encoder = load_encoder(folder, self._spec)
        self._version = model_version(folder)
        self._thread = ThreadPoolExecutor(1, "text")

    @api.post("/v1/rerank", response_model_exclude_none=True)
    async def rerank(self, request: RerankRequest) -> RerankResponse:
        """Rank the documents by how well they suit the query, best first."""
        if request.model not in (None, self._model):
            raise UnknownModelError(f"model is not served here: leave it out, or give {self._model!r}")
        request_id = uuid4().hex
        ranked = await self._rank(build_slate(request_id, request.query, request.documents))
        num_tokens = len(ranked.encoded.input_ids)
        return RerankResponse(
            id=request_id,
            model=self._model,
            results=build_results(ranked.ranking, request),
            usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            meta=Meta(
                model_version=self._version,
                num_truncated=ranked.encoded.num_truncated,
                query_truncated=ranked.encoded.query_truncated,
                latency_ms=ranked.latency,
            ),
        )

    @api.get("/v1/models")
    async def models(self) -> ServedModels:
        """List the one model that is served."""
        limit = self._spec.max_candidates
        return ServedModels(data=[ServedModel(id=self._model, model_version=self._version, max_documents=limit)])

    @api.get("/health")
    async def health(self) -> Status:
        """Answer 200 while this process answers at all."""
        return Status(status="ok")

    @api.get("/ready")
    async def ready(self) -> Status:
        """Answer 200 once a small ranking has run through a prefill replica, else 503."""
        documents = [Document(text="a"), Document(text="b")][: self._spec.max_candidates]
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._rank(build_slate("ready", "a", documents))
        except Exception as error:  # whatever it is, no ranking can be had here
            raise NotReadyError(
                f"a test ranking failed: {find_answer(error).message or type(error).__name__}"
            ) from error
        return Status(status="ready")

    async def _rank(self, slate: Slate) -> RankedSlate:
        start = perf_counter()
        encoded = await self._in_thread(encode_within, self._encoder, slate, self._spec.max_candidates)
        encoded_at = perf_counter()
        scores = await self._score(encoded)
        scored_at = perf_counter()
        ranking = await self._in_thread(decode_for, self._spec, scores, encoded.order)
        latency = Latency(
            encode=_milliseconds(start, encoded_at),
            prefill=_milliseconds(encoded_at, scored_at),
            decode=_milliseconds(scored_at, perf_counter()),
        )
        return RankedSlate(encoded, ranking, latency)

    async def _score(self, encoded: EncodedSlate) -> Scores:
        """Return a prefill replica's scores, float32 [n, n], finite; a lost replica's work goes to another."""
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                scores: Scores = await self._prefill.remote(encoded, self._version)
                break
            except RETRIED:
                if not tries_left:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (MAX_TRIES - 1 - tries_left))
        if not np.isfinite(scores).all():
            raise BrokenScoresError("the model gave scores that are not finite: serve another artifact or precision")
        return np.array(scores)  # Ray hands over read-only memory

    async def _in_thread(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))
