"""Compare a trained ranker with its teacher, the input order, chance and its untrained self, in one table.

    python -m jobs.evaluate --set slates=demo/slates/eval --set artifact=demo/artifact
    python -m jobs.evaluate --set slates=s3://bucket/eval --set artifact=models:/spd@champion --set output=eval.json

Each metric is averaged over slates, with a 95% bootstrap interval. Runs in this process: on the GPU where there is one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from jobs.cli import run_job
from jobs.files import check_writable, write_json
from jobs.progress import progress
from jobs.tracking import Tracker, TrackingConfig, absolute, fetch_artifact, metric_key
from spd.artifact import build_untrained_model, load_spec
from spd.backbone import Precision, default_device
from spd.config import config_to_dict, flatten
from spd.datasets.files import read_slates
from spd.decode import DECODERS
from spd.errors import DataError
from spd.metrics import default_positive_threshold, evaluate_orders, paired_difference, slate_metrics
from spd.ranker import DEFAULT_BATCH_TOKENS, Ranker
from spd.slate import Slate, check_unique

TABLE_METRICS = ("auc", "ndcg@10", "r@1", "r@10", "mrr", "kendall_tau")

TABLE_WIDTH = 170

Orders = Sequence[Sequence[int]]
EstimateValues = Mapping[str, float | None]
Metrics = Mapping[str, Mapping[str, EstimateValues]]
"""Row name -> metric name -> value, low, high, n."""


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
    """Decides the random order, the untrained head and the bootstrap."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def problems(self) -> list[str]:
        found = [] if 0 <= self.seed < 2**63 else [f"seed={self.seed} must be between 0 and 2**63 - 1"]
        if self.max_slates is not None and self.max_slates < 1:
            found.append(f"max_slates={self.max_slates} must be at least 1, or null for all")
        if self.batch_tokens < 1:
            found.append(f"batch_tokens={self.batch_tokens} must be at least 1")
        return found


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", EvaluateConfig, run, describe)


def run(config: EvaluateConfig) -> dict[str, object]:
    """Evaluate; prints the table, returns (and stores) the results as JSON values."""
    slates = _load_slates(config)
    if config.output:
        check_writable(config.output)
    artifact = fetch_artifact(config.tracking, config.artifact)
    ranker = Ranker.from_pretrained(artifact, precision=config.precision, backbone_source=config.backbone)
    rows = evaluate(ranker, slates, config)
    metrics = metric_values(rows, slates, config.seed)
    report: dict[str, object] = {"slates": config.slates, "model_version": ranker.version, "metrics": metrics}
    report |= comparisons(rows, metrics, slates, config.seed)
    print_table(metrics)
    if config.output:
        write_json(config.output, report)
    _track(config, ranker.version, metrics)
    return report


def evaluate(ranker: Ranker, slates: Sequence[Slate], config: EvaluateConfig) -> dict[str, Orders]:
    """Return the orders to compare, by name; every decoder reads the same score matrices."""
    rng = np.random.default_rng(config.seed)
    scored = _score(ranker, slates, config.batch_tokens, "student")
    print(f"evaluate: the student decodes by {ranker.spec.decoder!r}, other decoders read the same matrices")
    rows: dict[str, Orders] = {"student": [ranker.decode(*one).order for one in scored]}
    for decoder in (name for name in DECODERS if name != ranker.spec.decoder):
        rows[f"student ({decoder})"] = [ranker.decode(*one, decoder).order for one in scored]
    if config.compare_untrained:
        model = build_untrained_model(ranker.spec, default_device(), config.seed, config.precision, config.backbone)
        untrained = Ranker(ranker.spec, ranker.encoder, model, "untrained")
        scored = _score(untrained, slates, config.batch_tokens, "untrained")
        rows["untrained"] = [untrained.decode(*one).order for one in scored]
    if all(slate.teacher_ranking is not None for slate in slates):
        rows["teacher"] = [_completed(slate) for slate in slates]
    rows["input_order"] = [range(len(slate.candidates)) for slate in slates]
    rows["random"] = [rng.permutation(len(slate.candidates)).tolist() for slate in slates]
    return rows


def metric_values(rows: Mapping[str, Orders], slates: Sequence[Slate], seed: int) -> Metrics:
    """Return every row's metrics as JSON values."""
    return {
        name: {key: value.to_json() for key, value in evaluate_orders(slates, orders, seed=seed).items()}
        for name, orders in rows.items()
    }


def comparisons(
    rows: Mapping[str, Orders], metrics: Metrics, slates: Sequence[Slate], seed: int
) -> dict[str, dict[str, object]]:
    """Return the student's paired differences to other rows, and the share of the teacher that it recovers."""
    others = [name for name in ("untrained", "input_order", "teacher") if name in rows]
    found: dict[str, dict[str, object]] = {
        "student_minus": {name: _differences(rows["student"], rows[name], slates, seed) for name in others}
    }
    if "untrained" in rows and "teacher" in rows:
        found["teacher_recovered"] = {key: _recovered(metrics, key) for key in ("auc", "ndcg@10")}
    return found


def print_table(metrics: Metrics) -> None:
    """Print one row a contender: value and 95% interval of each metric."""
    table = Table(title="slate averages with 95% intervals")
    table.add_column("", no_wrap=True)
    for name in TABLE_METRICS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in metrics.items():
        table.add_row(name, *(_cell(row[key]) for key in TABLE_METRICS))
    Console(width=None if Console().is_terminal else TABLE_WIDTH).print(table)


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


def _score(
    ranker: Ranker, slates: Sequence[Slate], batch_tokens: int, what: str
) -> list[tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Return each slate's score matrix with the order of its prompt, in the order given."""
    scored = progress(ranker.score_slates(slates, batch_tokens), len(slates), f"evaluate: score the slates ({what})")
    found = {index: (matrix, encoded.order) for index, encoded, matrix in scored}
    return [found[index] for index in range(len(slates))]


def _completed(slate: Slate) -> list[int]:
    """Return the teacher's order; the candidates that a prefix leaves out follow in input order."""
    ranking = list(slate.teacher_ranking or ())
    named = set(ranking)
    return ranking + [index for index in range(len(slate.candidates)) if index not in named]


def _differences(first: Orders, second: Orders, slates: Sequence[Slate], seed: int) -> dict[str, object]:
    threshold = default_positive_threshold(slate.relevance for slate in slates)
    before, after = (
        [slate_metrics(order, slate, positive_threshold=threshold) for order, slate in zip(orders, slates, strict=True)]
        for orders in (second, first)
    )
    return {
        name: paired_difference([row[name] for row in after], [row[name] for row in before], seed=seed).to_json()
        for name in ("auc", "ndcg@10")
    }


def _recovered(metrics: Metrics, name: str) -> float | None:
    """Return (student - untrained) / (teacher - untrained), or None where that means nothing."""
    student, untrained, teacher = (metrics[row][name]["value"] for row in ("student", "untrained", "teacher"))
    if student is None or untrained is None or teacher is None or teacher == untrained:
        return None
    return (student - untrained) / (teacher - untrained)


def _cell(value: EstimateValues) -> str:
    if value["value"] is None:
        return "-"
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


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
