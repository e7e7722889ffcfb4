"""Compare a trained ranker with its teacher, the input order, chance and its untrained self, in one table.

    python -m jobs.evaluate --set slates=demo/slates/eval --set artifact=demo/artifact
    python -m jobs.evaluate --set slates=s3://bucket/eval --set artifact=models:/spd@champion --set output=eval.json

Each metric is averaged over slates, with a 95% bootstrap interval. An autoregressive artifact has a row of constrained
and one of free decoding. Slates larger than one pass are ranked in windows (`windows.*`). Runs in this process: on the
GPU where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs.cli import run_job
from jobs.evaluate_report import Metrics, comparisons, metric_values, print_costs, print_table
from jobs.evaluate_rows import (
    Contenders,
    RankerOptions,
    autoregressive_contenders,
    baseline_orders,
    student_contenders,
)
from jobs.files import check_writable, write_json
from jobs.order_sensitivity import order_sensitivity, sensitivity_line
from jobs.tracking import Tracker, TrackingConfig, absolute, fetch_artifact, metric_key
from spd.artifact import load_spec
from spd.autoregressive import ArRanker
from spd.backbone import Precision
from spd.config import config_to_dict, flatten
from spd.datasets.files import read_slates
from spd.errors import DataError
from spd.metrics import BootstrapBy
from spd.ranker import DEFAULT_BATCH_TOKENS, Ranker
from spd.slate import Slate, check_unique
from spd.windows import WindowConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Which ranker on which slates."""

    slates: str
    """Slates with relevance or teacher rankings: a path or URI, Parquet or JSONL."""
    artifact: str
    """Artifact folder, or a registered model such as models:/spd@champion."""
    output: str | None = None
    """JSON file for the results; null only prints them."""
    compare_untrained: bool = True
    """Also score with the bare backbone and a fresh head."""
    max_slates: int | None = None
    """Take the first slates only; null takes all."""
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Padded tokens of one forward."""
    precision: Precision | None = None
    """Dtype of the forward; null keeps the artifact's."""
    backbone: str | None = None
    """Where the artifact's backbone lies, if not where it was trained; must hold the same files."""
    seed: int = 0
    """Decides the random orders, the untrained head and the bootstrap."""
    windows: WindowConfig = field(default_factory=WindowConfig)
    """How slates larger than one pass are ranked."""
    bootstrap_by: BootstrapBy = "slate"
    """What the intervals resample: slates, or queries where several slates share one and are not independent."""
    num_shuffles: int = 0
    """Rank each slate again under so many random candidate orders, to see how much the order matters."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def problems(self) -> list[str]:
        found = [] if 0 <= self.seed < 2**63 else [f"seed={self.seed} must be between 0 and 2**63 - 1"]
        if self.max_slates is not None and self.max_slates < 1:
            found.append(f"max_slates={self.max_slates} must be at least 1, or null for all")
        if self.batch_tokens < 1:
            found.append(f"batch_tokens={self.batch_tokens} must be at least 1")
        if self.num_shuffles < 0 or self.num_shuffles == 1:
            found.append(f"num_shuffles={self.num_shuffles} makes no pair to compare: use 0, or at least 2")
        return found


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", EvaluateConfig, run, describe)


def run(config: EvaluateConfig) -> dict[str, object]:
    """Evaluate; prints the table, returns (and stores) the results as JSON values."""
    slates = _load_slates(config)
    if config.output:
        check_writable(config.output)
    contenders = load_contenders(fetch_artifact(config.tracking, config.artifact), slates, config)
    report, metrics = evaluate(contenders, slates, config)
    if config.output:
        write_json(config.output, report)
    _track(config, contenders.version, metrics)
    return report


def load_contenders(artifact: Path, slates: Sequence[Slate], config: EvaluateConfig) -> Contenders:
    """Return what the artifact's ranker, single-pass or autoregressive, makes of the slates."""
    options = RankerOptions(
        windows=config.windows,
        batch_tokens=config.batch_tokens,
        compare_untrained=config.compare_untrained,
        precision=config.precision,
        backbone=config.backbone,
        seed=config.seed,
    )
    if load_spec(artifact).objective == "ar":
        ar_ranker = ArRanker.from_pretrained(artifact, precision=config.precision, backbone_source=config.backbone)
        return autoregressive_contenders(ar_ranker, artifact, slates, options)
    ranker = Ranker.from_pretrained(artifact, precision=config.precision, backbone_source=config.backbone)
    return student_contenders(ranker, slates, options)


def evaluate(
    contenders: Contenders, slates: Sequence[Slate], config: EvaluateConfig
) -> tuple[dict[str, object], Metrics]:
    """Return the report as JSON values, and its metrics; prints both."""
    rows = contenders.orders | baseline_orders(slates, config.seed)
    metrics = metric_values(rows, slates, config.seed, config.bootstrap_by)
    report: dict[str, object] = {
        "slates": config.slates,
        "model_version": contenders.version,
        "bootstrap_by": config.bootstrap_by,
        "metrics": metrics,
        "passes": contenders.passes,
    }
    report |= comparisons(rows, metrics, slates, config.seed, config.bootstrap_by)
    if contenders.validity is not None:
        report["free_decoding"] = contenders.validity
    print_table(metrics, config.bootstrap_by)
    print_costs(contenders)
    if config.num_shuffles:
        found = order_sensitivity(contenders.rank, slates, config.num_shuffles, config.seed, config.bootstrap_by)
        report["order_sensitivity"] = found
        print(sensitivity_line(found))
    return report, metrics


def describe(config: EvaluateConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: settings, the ranker's spec, the number of slates."""
    spec = load_spec(fetch_artifact(config.tracking, config.artifact))
    counts = {"num_slates": len(_load_slates(config))}
    return {"config": config_to_dict(config), "ranker": config_to_dict(spec), "data": counts}


def _load_slates(config: EvaluateConfig) -> list[Slate]:
    slates = list(read_slates(config.slates))[: config.max_slates]
    if not slates:
        raise DataError(f"slates={config.slates!r} holds no slate: name a folder with at least one")
    check_unique(slate.request_id for slate in slates)
    if all(slate.relevance is None and slate.teacher_ranking is None for slate in slates):
        raise DataError(f"slates={config.slates!r} has neither relevance nor teacher_ranking: nothing to compare with")
    return slates


def _track(config: EvaluateConfig, version: str, metrics: Metrics) -> None:
    """Log every value under `row/metric` to an MLflow run of its own."""
    params = flatten(config_to_dict(config)) | {"model_version": version}
    tracker = Tracker.open(absolute(config.tracking), f"evaluate-{version}", params)
    values = {
        f"{metric_key(row)}/{metric_key(name)}": float(estimate["value"])
        for row, estimates in metrics.items()
        for name, estimate in estimates.items()
        if estimate["value"] is not None
    }
    tracker.log_metrics(values)
    tracker.finish()


if __name__ == "__main__":
    raise SystemExit(main())
