"""The Ray Serve application: CPU ingress replicas in front of prefill replicas that hold the model.

    RAY_USAGE_STATS_ENABLED=0 serve run serve_app.app:build_app artifact=demo/artifact
    RAY_AUTH_MODE=token serve deploy serve_app/config.yaml

    curl localhost:8000/v1/rerank -H 'content-type: application/json' \
        -d '{"query": "space opera", "documents": ["Fargo", "Star Wars"], "top_n": 1}'
"""

from pathlib import Path

from ray import serve
from ray.serve import Application

from serve_app.args import ServeArgs, parse_args
from serve_app.ingress import Ingress
from serve_app.prefill import Prefill
from spd.artifact import load_spec

QUIET_ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of every replica. Ray's own statistics are turned off where Ray starts: RAY_USAGE_STATS_ENABLED=0."""


def build_app(args: dict[str, object]) -> Application:
    """Return the application of an artifact, see `ServeArgs`.

    Before any replica starts, raises ConfigError for unfit arguments and ArtifactError for a broken artifact.
    """
    settings = parse_args(args)
    folder = Path(settings.artifact).expanduser().resolve()  # replicas have another working directory
    load_spec(folder)
    prefill = _deployment(Prefill, settings, settings.num_prefill_replicas, _prefill_resources(settings)).bind(
        str(folder),
        batch_tokens=settings.batch_tokens,
        batch_wait_s=settings.batch_wait_s,
        num_threads=settings.resolved_threads(),
        precision=settings.precision,
        backbone=settings.backbone,
    )
    resources = {"num_cpus": settings.cpus_per_ingress}
    ingress = _deployment(Ingress, settings, settings.num_ingress_replicas, resources)
    return ingress.bind(prefill, str(folder), model=settings.model)


def _deployment(
    replica_class: type, settings: ServeArgs, num_replicas: int, resources: dict[str, float]
) -> serve.Deployment:
    """Return the deployment of a replica class.

    A rolling update starts each new replica before it stops an old one (surge), else requests wait for the model to
    load. A constructor that fails thrice will fail again: Serve's own limit is 20.
    """
    return serve.deployment(
        replica_class,
        num_replicas=num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={**resources, "runtime_env": {"env_vars": QUIET_ENVIRONMENT}},
        max_surge_percent=100,
        max_constructor_retry_count=3,
        graceful_shutdown_timeout_s=20,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        health_check_timeout_s=30,
    )


def _prefill_resources(settings: ServeArgs) -> dict[str, float]:
    return {"num_cpus": settings.cpus_per_prefill, "num_gpus": settings.resolved_gpus()}
