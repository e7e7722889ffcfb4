"""The one MLflow module: runs, curves, artifacts, registered versions. Only a driver or rank 0 calls it."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import Metric, Param
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from spd.backbone import cache_folder
from spd.errors import ArtifactError, ConfigError

RUN_TAG = "spd.run"
ARTIFACT_PATH = "artifact"
MAX_PARAM_CHARACTERS = 6000
SQLITE_PREFIX = "sqlite:///"
MODELS_PREFIX = "models:/"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where runs and registered versions go."""

    uri: str = "sqlite:///mlflow.db"
    """MLflow tracking server, or a SQLite file (relative to the working folder)."""
    experiment: str = "spd"
    """Experiment that the run belongs to."""
    registered_model: str = "spd"
    """Name under which the artifact is registered."""
    alias: str = "challenger"
    """Alias that a newly trained version gets; champion is for you to give once it has won."""


class Tracker:
    """One MLflow run: found again by its name while unfinished, so that a resumed job goes on in the same run."""

    def __init__(self, config: TrackingConfig, run_id: str) -> None:
        self.config = config
        self.run_id = run_id
        self._client = _client(config)

    @classmethod
    def open(
        cls, config: TrackingConfig, name: str, params: Mapping[str, object], *, goes_on: bool = False
    ) -> "Tracker":
        """Return a new run with `params`; a job that goes on gets its own unfinished run called `name` again.

        Raises ConfigError when the tracking server cannot be reached.
        """
        try:
            client = _client(config)
            experiment_id = _experiment(client, config)
            query = f"tags.`{RUN_TAG}` = '{name}' and attributes.status != 'FINISHED'"
            found = client.search_runs([experiment_id], query, max_results=1)
            if found and goes_on:
                client.update_run(found[0].info.run_id, status="RUNNING")
                return cls(config, found[0].info.run_id)
            run = client.create_run(experiment_id, run_name=name, tags={RUN_TAG: name})
            texts = [Param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in params.items()]
            client.log_batch(run.info.run_id, params=texts)
        except MlflowException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"tracking.uri={config.uri!r} cannot be used ({reason}): check it") from None
        return cls(config, run.info.run_id)

    def log_metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Add one point to the curve of each named metric."""
        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    def log_file(self, path: Path) -> None:
        """Store one file with the run."""
        self._client.log_artifact(self.run_id, str(path))

    def register(self, artifact: Path) -> str:
        """Store the ranker artifact with the run, register it, point the alias at it; returns the version."""
        self._client.log_artifacts(self.run_id, str(artifact), ARTIFACT_PATH)
        name = self.config.registered_model
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"runs:/{self.run_id}/{ARTIFACT_PATH}"
        version = str(self._client.create_model_version(name, source=source, run_id=self.run_id).version)
        self._client.set_registered_model_alias(name, self.config.alias, version)
        return version

    def finish(self, status: str = "FINISHED") -> None:
        """Close the run; `status` as MLflow spells it (FINISHED, FAILED)."""
        self._client.set_terminated(self.run_id, status)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What is kept of a finished run.

    wall_s: from its start to its end. curves: (step, value) by step, of each metric asked for.
    """

    params: dict[str, str]
    wall_s: float
    curves: dict[str, list[tuple[int, float]]]


def read_run(config: TrackingConfig, name: str, keys: Sequence[str]) -> RunRecord:
    """Return the newest finished run called `name`; raises ConfigError if there is none."""
    client = _client(config)
    query = f"tags.`{RUN_TAG}` = '{name}' and attributes.status = 'FINISHED'"
    runs = client.search_runs([_experiment(client, config)], query, max_results=1)
    if not runs:
        raise ConfigError(f"tracking.uri={config.uri!r} has no finished run called {name!r}: run it there")
    info = runs[0].info
    points = {key: {p.step: p.value for p in client.get_metric_history(info.run_id, key)} for key in keys}
    return RunRecord(
        params=dict(runs[0].data.params),
        wall_s=(info.end_time - info.start_time) / 1000,
        curves={key: sorted(values.items()) for key, values in points.items()},
    )


def metric_key(name: str) -> str:
    """Return the name without what MLflow refuses in one."""
    return name.replace("@", "_at_").replace("(", "").replace(")", "")


def absolute(config: TrackingConfig) -> TrackingConfig:
    """Return the config with a relative SQLite file made absolute: workers run in another folder."""
    if not config.uri.startswith(SQLITE_PREFIX):
        return config
    file = Path(config.uri.removeprefix(SQLITE_PREFIX)).absolute()
    return replace(config, uri=f"{SQLITE_PREFIX}{file}")


def fetch_artifact(config: TrackingConfig, source: str) -> Path:
    """Return the local folder of an artifact: `source` itself, or the download of `models:/name@alias` or `/version`.

    Resolved once, when a job starts, and kept in `$SPD_CACHE` by version, so that a moving alias changes nothing later.
    Raises ArtifactError when the registry knows no such model.
    """
    if not source.startswith(MODELS_PREFIX):
        return Path(source)
    try:
        version = _registered_version(_client(absolute(config)), source.removeprefix(MODELS_PREFIX))
        target = cache_folder() / "models" / f"{version.name}-{version.version}-{version.run_id}"
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as aside:
                download_artifacts(
                    run_id=version.run_id,
                    artifact_path=ARTIFACT_PATH,
                    dst_path=aside,
                    tracking_uri=absolute(config).uri,
                )
                (Path(aside) / ARTIFACT_PATH).rename(target)
    except MlflowException as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(
            f"artifact={source!r} is not in the registry at tracking.uri={config.uri!r} ({reason}): "
            "check name and alias, or give a folder"
        ) from None
    return target


def _registered_version(client: MlflowClient, name: str) -> ModelVersion:
    model, separator, alias = name.partition("@")
    if separator:
        return client.get_model_version_by_alias(model, alias)
    model, _, version = name.partition("/")
    return client.get_model_version(model, version)


def _client(config: TrackingConfig) -> MlflowClient:
    return MlflowClient(tracking_uri=config.uri, registry_uri=config.uri)


def _experiment(client: MlflowClient, config: TrackingConfig) -> str:
    """Return the experiment's id; beside a SQLite file its artifacts lie in `mlartifacts`, not where a worker runs."""
    found = client.get_experiment_by_name(config.experiment)
    if found is not None:
        return str(found.experiment_id)
    location = None
    if config.uri.startswith(SQLITE_PREFIX):
        location = (Path(config.uri.removeprefix(SQLITE_PREFIX)).absolute().parent / "mlartifacts").as_uri()
    return str(client.create_experiment(config.experiment, artifact_location=location))
