"""Arguments of `build_app`: typed in a config YAML, all strings from `serve run serve_app.app:build_app name=value`."""

import os
from collections.abc import Mapping
from difflib import get_close_matches

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from spd.backbone import Precision
from spd.errors import ConfigError
from spd.ranker import DEFAULT_BATCH_TOKENS

SHARED_GPU = 0.5


class ServeArgs(BaseModel):
    """What is served, by how many replicas, and what each replica owns."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    artifact: str = Field(min_length=1, description="folder that jobs.train wrote")
    model: str = Field("spd", min_length=1, description="name that clients may give as `model`")
    precision: Precision | None = Field(None, description="dtype of the forward pass, in place of the artifact's")
    backbone: str | None = Field(None, min_length=1, description="backbone source, in place of the artifact's")
    batch_tokens: int = Field(DEFAULT_BATCH_TOKENS, ge=1, description="padded tokens of one forward pass at most")
    batch_wait_s: float = Field(0.004, ge=0, le=10, description="wait for company after a batch's first slate")
    max_ongoing_requests: int = Field(256, ge=1, description="requests that one replica holds at once")
    num_ingress_replicas: int = Field(1, ge=1, description="replicas that validate, tokenise and decode")
    num_prefill_replicas: int = Field(1, ge=1, description="replicas that hold the model")
    cpus_per_ingress: float = Field(0.1, ge=0, description="logical CPUs, for placement only")
    cpus_per_prefill: float = Field(0.25, ge=0, description="logical CPUs, for placement only")
    gpus_per_prefill: float | None = Field(None, ge=0, description="GPU share of a prefill replica; 0 uses the CPU")
    num_threads: int | None = Field(None, ge=1, description="torch threads of a prefill replica")

    def resolved_gpus(self) -> float:
        """Return the GPU share of a prefill replica; by default half a GPU where this machine has one.

        Half, because a rolling update starts the new replica beside the old one: with one whole GPU it never could.
        """
        if self.gpus_per_prefill is not None:
            return self.gpus_per_prefill
        return SHARED_GPU if torch.cuda.is_available() else 0.0

    def resolved_threads(self) -> int:
        """Return the torch threads of a prefill replica; by default this machine's cores shared among the replicas."""
        return self.num_threads or max(1, (os.cpu_count() or 1) // self.num_prefill_replicas)


def parse_args(args: Mapping[str, object]) -> ServeArgs:
    """Return the typed arguments; raises ConfigError listing every problem at once, each with its mend."""
    try:
        return ServeArgs.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(details) for details in error.errors())) from None


def _problem(details: ErrorDetails) -> str:
    name = str(details["loc"][0])
    fields = ServeArgs.model_fields
    if details["type"] == "extra_forbidden":
        near = get_close_matches(name, fields, n=1, cutoff=0.5)
        return f"{name} is no known argument: " + (
            f"did you mean {near[0]}?" if near else f"known: {', '.join(fields)}"
        )
    meaning = fields[name].description
    if details["type"] == "missing":
        return f"{name} is missing: give {name}=... ({meaning})"
    return f"{name}={details['input']!r}: {details['msg'][0].lower()}{details['msg'][1:]} ({meaning})"
