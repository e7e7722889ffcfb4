"""Turn a raw data set into training and evaluation slates (Parquet, one row a slate).

    python -m jobs.prepare --set output=data/movielens
    python -m jobs.prepare --set dataset=amazon_beauty --set source=/data/amazon-beauty --set output=data/beauty
    python -m jobs.prepare --set dataset=ms_marco --set source=/data/ms-marco-dl --set output=data/marco
    python -m jobs.prepare --set dataset=files --set train_uri=s3://logs/train.jsonl.gz --set output=data/mine

Writes OUTPUT/train, OUTPUT/eval and OUTPUT/summary.json. MovieLens-100K lies inside a Python package that
`make assets` installs; for the other data sets point `source` at a folder of their public raw files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jobs.cli import run_job
from jobs.files import write_json
from jobs.progress import progress
from jobs.tracking import Tracker, TrackingConfig, absolute
from spd.backbone import resolve_package
from spd.config import config_to_dict, flatten
from spd.datasets.amazon_beauty import AmazonBeautyConfig, load_amazon_beauty
from spd.datasets.files import check_target, read_slates, resolve_uri, write_slates
from spd.datasets.movielens import MovieLensConfig, load_movielens
from spd.datasets.ms_marco import MsMarcoConfig, load_ms_marco
from spd.datasets.splits import DataSplits
from spd.errors import ConfigError, DataError
from spd.slate import Slate, check_unique

SUMMARY_FILE = "summary.json"
MOVIELENS_PACKAGE = "package:recbole/dataset_example/ml-100k"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """Which data set, from where, to where."""

    dataset: Literal["movielens", "amazon_beauty", "ms_marco", "files"] = "movielens"
    """movielens, amazon_beauty, ms_marco, or files: slates that you already have as JSONL or Parquet."""
    source: str | None = None
    """Folder of the raw files; null takes MovieLens from the installed package."""
    output: str
    """Folder for the slates: OUTPUT/train and OUTPUT/eval."""
    overwrite: bool = False
    """Replace slates that are there already."""
    rows_per_file: int = 500
    """Slates of one Parquet file: small files let Ray Data read in parallel."""
    train_uri: str | None = None
    """dataset=files: training slates, JSONL (.gz) or Parquet, a path or URI."""
    eval_uri: str | None = None
    """dataset=files: evaluation slates."""
    movielens: MovieLensConfig = field(default_factory=MovieLensConfig)
    amazon_beauty: AmazonBeautyConfig = field(default_factory=AmazonBeautyConfig)
    ms_marco: MsMarcoConfig = field(default_factory=MsMarcoConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def problems(self) -> list[str]:
        found = [] if self.rows_per_file > 0 else [f"rows_per_file={self.rows_per_file} must be at least 1"]
        if self.dataset in ("amazon_beauty", "ms_marco") and self.source is None:
            found.append(f"source is null: dataset={self.dataset!r} needs the folder of its raw files")
        if self.dataset != "files" and (self.train_uri or self.eval_uri):
            found.append(f"train_uri and eval_uri belong to dataset='files', not {self.dataset!r}: set dataset=files")
        if self.dataset == "files" and self.train_uri is None and self.eval_uri is None:
            found.append("train_uri and eval_uri are null: dataset='files' needs at least one of them")
        return found


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", PrepareConfig, run, describe)


def run(config: PrepareConfig) -> dict[str, object]:
    """Write the slates; returns (and stores) their summary."""
    splits = load_splits(config)
    output = config.output.rstrip("/")
    check_unique(slate.request_id for split in (splits.train, splits.eval) for slate in split)
    targets = {name: f"{output}/{name}" for name in ("train", "eval")}
    stale = {name: check_target(*resolve_uri(uri), config.overwrite) for name, uri in targets.items()}
    summary: dict[str, object] = {
        "dataset": config.dataset,
        "train": summarise(splits.train),
        "eval": summarise(splits.eval),
    }
    for name, slates in (("train", splits.train), ("eval", splits.eval)):
        if not slates:
            filesystem, _ = resolve_uri(targets[name])
            for part in stale[name]:  # of an earlier data set: beside the new summary they would be a lie
                filesystem.delete_file(part)
        else:
            rows = progress(slates, len(slates), f"prepare: write {name}")
            write_slates(rows, targets[name], rows_per_file=config.rows_per_file, overwrite=config.overwrite)
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    _track(config, splits)
    print(f"prepare: {len(splits.train)} training and {len(splits.eval)} evaluation slates in {output}")
    return summary


def describe(config: PrepareConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: settings, and the counts of the slates that would be written."""
    splits = load_splits(config)
    counts = {"train": summarise(splits.train), "eval": summarise(splits.eval)}
    return {"config": config_to_dict(config), "slates": counts}


def load_splits(config: PrepareConfig) -> DataSplits:
    """Return the slates of the configured data set; raises DataError if its files are missing or broken."""
    if config.dataset == "files":
        return DataSplits(train=_read(config.train_uri), eval=_read(config.eval_uri))
    if config.dataset == "movielens":
        folder = Path(config.source) if config.source else resolve_package(MOVIELENS_PACKAGE)
        return load_movielens(folder, config.movielens)
    if config.source is None:
        raise ConfigError(f"source is null: dataset={config.dataset!r} needs the folder of its raw files")
    if config.dataset == "amazon_beauty":
        return load_amazon_beauty(config.source, config.amazon_beauty)
    return load_ms_marco(config.source, config.ms_marco)


def summarise(slates: Sequence[Slate]) -> dict[str, object]:
    """Return counts that tell at a glance whether the slates are what was meant."""
    sizes = [len(slate.candidates) for slate in slates]
    return {
        "num_slates": len(slates),
        "min_candidates": min(sizes, default=0),
        "max_candidates": max(sizes, default=0),
        "num_with_teacher": sum(slate.teacher_ranking is not None for slate in slates),
        "num_with_relevance": sum(slate.relevance is not None for slate in slates),
        "num_with_score": sum(slate.score is not None for slate in slates),
    }


def _read(uri: str | None) -> list[Slate]:
    if uri is None:
        return []
    slates = list(progress(read_slates(uri), None, f"prepare: read {uri}"))
    if not slates:
        raise DataError(f"{uri!r} holds no slate: name a file or folder with at least one")
    return slates


def _track(config: PrepareConfig, splits: DataSplits) -> None:
    tracker = Tracker.open(absolute(config.tracking), f"prepare-{config.dataset}", flatten(config_to_dict(config)))
    tracker.log_metrics({"num_train_slates": len(splits.train), "num_eval_slates": len(splits.eval)})
    tracker.finish()


if __name__ == "__main__":
    raise SystemExit(main())
