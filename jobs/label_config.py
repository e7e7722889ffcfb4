"""Settings of labelling: which teacher orders which slates."""

import math
from dataclasses import dataclass, field
from typing import Literal

from jobs.cluster import WorkerConfig
from jobs.tracking import TrackingConfig
from spd.autoregressive import DEFAULT_BATCH_TOKENS, Decoding
from spd.backbone import Precision
from spd.windows import WindowConfig

Backend = Literal["local", "openai", "vllm", "import"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTeacherConfig:
    """backend=local: an autoregressive ranker trained by jobs.train with objective=ar."""

    artifact: str = ""
    """Artifact folder, or a registered model such as models:/teacher@champion."""
    decoding: Decoding = "constrained"
    """constrained: only a permutation can come out. free: whatever the model says, counted and repaired."""
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Padded tokens of one batch."""
    precision: Precision | None = None
    """Dtype of the forward passes; null keeps the artifact's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """backend=openai or vllm: how a chat model is asked, RankGPT style."""

    model: str = ""
    """Model name at the endpoint; for vllm a hub id or folder."""
    system: str = "You rank candidates by how well they suit a query."
    """System message."""
    instruction: str = "Answer with the identifiers only, best first, all of them, like this: [2] > [1] > [3]"
    """What ends the user message, after query and candidates."""
    max_candidate_characters: int = 1000
    """A longer candidate text loses its end."""
    max_answer_tokens: int = 1024
    """Longest answer."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """backend=openai: an endpoint that speaks OpenAI's chat API."""

    base_url: str = "https://api.openai.com/v1"
    """Address of the API."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, on every worker."""
    concurrency: int = 8
    """Requests under way at once in each worker."""
    requests_per_minute: float | None = None
    """Most requests a minute of all workers together; null sets no limit."""
    max_retries: int = 6
    """Tries after the first on 429, 5xx and lost connections, with exponential backoff (or as Retry-After says)."""
    timeout_s: float = 120.0
    """Longest wait for one answer."""
    usd_per_million_input_tokens: float = 0.0
    """Price, for the summary's cost."""
    usd_per_million_output_tokens: float = 0.0
    """Price, for the summary's cost."""

    def problems(self) -> list[str]:
        found = [
            f"{name}={getattr(self, name)} must be at least {least}"
            for name, least in (("concurrency", 1), ("max_retries", 0))
            if getattr(self, name) < least
        ]
        if self.requests_per_minute is not None and not 0 < self.requests_per_minute < math.inf:
            found.append(f"requests_per_minute={self.requests_per_minute} must be above 0, or null")
        if not 0 < self.timeout_s < math.inf:
            found.append(f"timeout_s={self.timeout_s} must be above 0")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelConfig:
    """Which slates are labelled by whom."""

    input: str
    """Parquet slates: a folder or URI."""
    output: str
    """Folder for the labelled slates; OUTPUT.journal beside it keeps every answer as it comes."""
    backend: Backend = "local"
    """local, openai (any endpoint of that API), vllm (GPUs), or import (rankings made elsewhere)."""
    max_slates: int | None = None
    """Label the first slates only, which are then all of the output; null takes all."""
    num_permutations: int = 1
    """Answers a slate: the first for the candidates as they stand, the others shuffled (extra_teacher_rankings)."""
    invalid: Literal["repair", "null"] = "repair"
    """An answer that is no permutation: repaired (first naming counts, missing last), or no label."""
    window_size: int | None = None
    """Most candidates of one answer; larger slates take sliding windows. Null: the artifact's limit, 20 for chat."""
    window_stride: int | None = None
    """Places that the window moves; null takes half its size."""
    rankings: str | None = None
    """backend=import: TREC run file, or JSON lines of {request_id, ranking: [candidate ids]}."""
    overwrite: bool = False
    """Replace an output that is there already (the journal's answers are kept)."""
    block_slates: int = 64
    """Slates that go through a worker together."""
    seed: int = 0
    """Decides the shuffles of num_permutations."""
    local: LocalTeacherConfig = field(default_factory=LocalTeacherConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    workers: WorkerConfig = field(default_factory=WorkerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def problems(self) -> list[str]:
        names = ("num_permutations", "block_slates")
        found = [f"{name}={getattr(self, name)} must be at least 1" for name in names if getattr(self, name) < 1]
        if self.max_slates is not None and self.max_slates < 1:
            found.append(f"max_slates={self.max_slates} must be at least 1, or null")
        needed = {"local": ("local.artifact", self.local.artifact), "import": ("rankings", self.rankings)}
        name, value = needed.get(self.backend, ("chat.model", self.chat.model))
        if not value:
            found.append(f"{name} is empty: backend={self.backend!r} needs it")
        found.extend(WindowConfig(size=self.window_size, stride=self.window_stride).problems())
        if self.backend == "import" and self.num_permutations > 1:
            found.append("num_permutations above 1 needs a teacher to ask: backend='import' has one ranking a slate")
        return found
