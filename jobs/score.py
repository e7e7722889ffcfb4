"""Rank slates offline: Parquet in, Parquet out, streamed through Ray Data.

    python -m jobs.score --set input=demo/slates/eval --set output=demo/scored --set artifact=demo/artifact
    ray job submit -- python -m jobs.score --set input=s3://logs/day --set output=s3://ranked/day \
        --set artifact=models:/spd@champion --set workers.use_gpu=true --set workers.num_workers=8

A row that cannot be ranked goes out with its `error` and no ranking. The output's `_summary.json`, written last, says
how many rows there are, how many failed and why, and how many rankings were counted to be permutations.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.dataset as pads
import pyarrow.fs as pafs
import ray
import ray.data
from ray.data import ActorPoolStrategy

from jobs.cli import run_job
from jobs.cluster import WorkerConfig, check_workers, start_ray
from jobs.files import is_local, open_slates, read_request_ids, write_json
from jobs.score_stages import DecodeSlates, EncodeSlates, PrefillSlates
from jobs.tracking import Tracker, TrackingConfig, absolute, fetch_artifact
from spd.artifact import check_backbone, load_spec, model_version
from spd.backbone import Precision
from spd.config import config_to_dict, flatten
from spd.datasets.files import resolve_uri
from spd.errors import ConfigError, DataError
from spd.ranker import DEFAULT_BATCH_TOKENS
from spd.slate import SLATE_SCHEMA, check_unique

SUMMARY_FILE = "_summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreConfig:
    """Which slates, which ranker, where the rankings go."""

    input: str
    """Parquet slates: a folder or URI."""
    output: str
    """Folder for the rankings; must be absent or empty unless overwrite."""
    artifact: str
    """Artifact folder, or a registered model such as models:/spd@champion."""
    overwrite: bool = False
    """Replace an output that is there already."""
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Padded tokens of one forward."""
    block_slates: int = 64
    """Slates that go through the stages together."""
    precision: Precision | None = None
    """Dtype of the forward; null keeps the artifact's."""
    backbone: str | None = None
    """Where the artifact's backbone lies, if not where it was trained; must hold the same files."""
    max_error_rate: float = 1.0
    """Fail, with the output kept, when a larger share of rows has an error."""
    workers: WorkerConfig = field(default_factory=WorkerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def problems(self) -> list[str]:
        found = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("batch_tokens", "block_slates")
            if getattr(self, name) < 1
        ]
        if not 0 <= self.max_error_rate <= 1:
            found.append(f"max_error_rate={self.max_error_rate} must be between 0 and 1")
        return found


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", ScoreConfig, run, describe)


def run(config: ScoreConfig) -> dict[str, object]:
    """Score all rows; returns (and stores) the summary."""
    artifact, num_rows = check(config)
    filesystem, output = resolve_uri(config.output)
    folder = _staging(filesystem, output)
    start_ray(config.workers, show_data_progress=True)
    print(f"score: {num_rows} slates through {config.workers.num_workers} prefill workers")
    start_s = time.monotonic()
    pipeline(config, artifact).write_parquet(folder, filesystem=filesystem)
    summary = summarise(filesystem, folder, num_rows) | {
        "model_version": model_version(artifact),
        "wall_s": round(time.monotonic() - start_s, 2),
    }
    if folder != output:
        write_json(f"{folder}/{SUMMARY_FILE}", summary)
        _publish(filesystem, folder, output)
    else:
        write_json(f"{config.output.rstrip('/')}/{SUMMARY_FILE}", summary)
    print("score: " + ", ".join(f"{key} {value}" for key, value in summary.items()) + f"; written to {config.output}")
    _track(config, summary)
    _check_error_rate(config, summary)
    return summary


def check(config: ScoreConfig) -> tuple[Path, int]:
    """Return artifact folder and row count; raises what can be known to be wrong before Ray starts."""
    check_workers(config.workers)
    _check_output(config)
    artifact = fetch_artifact(config.tracking, config.artifact).absolute()
    check_backbone(load_spec(artifact), config.backbone)
    ids = read_request_ids(open_slates(config.input), config.input)
    check_unique(name for name in ids if name is not None)
    return artifact, len(ids)


def pipeline(config: ScoreConfig, artifact: Path) -> ray.data.Dataset:
    """Return the lazy data set of rankings: read, encode (CPU), prefill (actor pool), decode (CPU)."""
    workers, rows = config.workers, config.block_slates
    folder = str(artifact)
    gpus = 1 if workers.use_gpu else 0
    cpus = 0 if workers.use_gpu else workers.cpus_per_worker
    dataset = open_slates(config.input)
    columns = [name for name in SLATE_SCHEMA.names if name in dataset.schema.names]
    read = ray.data.read_parquet(dataset.files, filesystem=dataset.filesystem).select_columns(columns)
    slates = read.repartition(target_num_rows_per_block=rows)
    encoded = slates.map_batches(
        EncodeSlates,
        fn_constructor_args=(folder,),
        batch_size=rows,
        batch_format="pyarrow",
        num_cpus=0.5,
        compute=ActorPoolStrategy(size=1),
    )
    scored = encoded.map_batches(
        PrefillSlates,
        fn_constructor_args=(
            folder,
            config.batch_tokens,
            config.precision,
            config.backbone,
            workers.cpus_per_worker,
        ),
        batch_size=rows,
        batch_format="pyarrow",
        num_cpus=cpus,
        num_gpus=gpus,
        compute=ActorPoolStrategy(size=workers.num_workers),
    )
    return scored.map_batches(
        DecodeSlates,
        fn_constructor_args=(folder,),
        batch_size=rows,
        batch_format="pyarrow",
        num_cpus=0.5,
        compute=ActorPoolStrategy(size=1),
    )


def summarise(filesystem: pafs.FileSystem, folder: str, num_rows: int) -> dict[str, object]:
    """Return counts read back from the written files; raises DataError if a row was lost."""
    columns = ["ranking", "candidate_ids", "num_truncated", "error"]
    table = pads.dataset(folder, filesystem=filesystem, format="parquet").to_table(columns=columns)
    if table.num_rows != num_rows:
        raise DataError(f"{num_rows} rows went in and {table.num_rows} came out: {folder} is kept, run the job again")
    errors = Counter(error.partition(":")[0] for error in table["error"].to_pylist() if error is not None)
    pairs = zip(table["ranking"].to_pylist(), table["candidate_ids"].to_pylist(), strict=True)
    valid = sum(ranking is not None and sorted(ranking) == list(range(len(ids))) for ranking, ids in pairs)
    return {
        "num_scored": table.num_rows - errors.total(),
        "num_valid_permutations": valid,
        "num_errors": errors.total(),
        "errors_by_kind": dict(errors),
        "num_truncated_slates": sum(bool(count) for count in table["num_truncated"].to_pylist()),
    }


def describe(config: ScoreConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: settings, the ranker's spec, the number of rows."""
    artifact, num_rows = check(config)
    spec = load_spec(artifact)
    return {"config": config_to_dict(config), "ranker": config_to_dict(spec), "data": {"num_slates": num_rows}}


def _check_output(config: ScoreConfig) -> None:
    """Raise ConfigError unless the output is absent, empty, or a finished scoring that may be replaced."""
    filesystem, output = resolve_uri(config.output)
    inner, outer = (f"{path.rstrip('/')}/" for path in (output, resolve_uri(config.input)[1]))
    if inner.startswith(outer) or outer.startswith(inner):
        raise ConfigError(f"output={config.output!r} and input={config.input!r} lie in each other: keep them apart")
    if filesystem.get_file_info(output).type == pafs.FileType.File:
        raise ConfigError(f"output={config.output!r} is a file: name a folder")
    present = filesystem.get_file_info(pafs.FileSelector(output, allow_not_found=True))
    if present and not config.overwrite:
        raise ConfigError(f"output={config.output!r} is not empty: choose another folder, or set overwrite=true")
    names = {file.base_name for file in present}
    foreign = sorted(name for name in names if name != SUMMARY_FILE and not name.endswith(".parquet"))
    if foreign or (names and SUMMARY_FILE not in names):
        raise ConfigError(
            f"output={config.output!r} holds {(foreign or sorted(names))[0]!r} and was written by no finished scoring: "
            "choose another folder, or empty it yourself"
        )


def _staging(filesystem: pafs.FileSystem, output: str) -> str:
    """Return the empty folder to write to: beside the output where it can be renamed, else the output itself."""
    parent, _, name = output.rstrip("/").rpartition("/")
    folder = f"{parent}/.{name}.part" if is_local(filesystem) else output
    if filesystem.get_file_info(folder).type == pafs.FileType.Directory:
        filesystem.delete_dir_contents(folder)
    filesystem.create_dir(folder)
    return folder


def _publish(filesystem: pafs.FileSystem, folder: str, output: str) -> None:
    """Make the finished folder the output; the one that it replaces is removed last."""
    replaced = f"{folder}.replaced"
    if filesystem.get_file_info(output).type == pafs.FileType.Directory:
        filesystem.move(output, replaced)
    filesystem.move(folder, output)
    if filesystem.get_file_info(replaced).type == pafs.FileType.Directory:
        filesystem.delete_dir(replaced)


def _track(config: ScoreConfig, summary: Mapping[str, object]) -> None:
    params = flatten(config_to_dict(config)) | {"model_version": summary["model_version"]}
    tracker = Tracker.open(absolute(config.tracking), f"score-{summary['model_version']}", params)
    tracker.log_metrics({key: float(value) for key, value in summary.items() if isinstance(value, int | float)})
    tracker.finish()


def _check_error_rate(config: ScoreConfig, summary: Mapping[str, object]) -> None:
    errors, scored = summary["num_errors"], summary["num_scored"]
    assert isinstance(errors, int) and isinstance(scored, int)
    rate = errors / (errors + scored)
    if rate > config.max_error_rate:
        raise DataError(
            f"{errors} of {errors + scored} rows have an error, above max_error_rate={config.max_error_rate}: "
            f"{config.output} is kept, see its error column and mend those rows"
        )


if __name__ == "__main__":
    raise SystemExit(main())
