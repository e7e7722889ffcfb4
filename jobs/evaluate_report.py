"""What an evaluation says: every row's metrics, the student's paired differences, and their table and lines."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from jobs.evaluate_rows import Contenders, Orders
from spd.metrics import (
    BootstrapBy,
    clusters_of,
    default_positive_threshold,
    evaluate_orders,
    paired_difference,
    slate_metrics,
)
from spd.slate import Slate

TABLE_METRICS = ("auc", "ndcg@10", "r@1", "r@10", "mrr", "kendall_tau")
COMPARED = ("untrained", "upstream_score", "input_order", "teacher")
COMPARED_METRICS = ("auc", "ndcg@10")
TABLE_WIDTH = 170

EstimateValues = Mapping[str, float | None]
Metrics = Mapping[str, Mapping[str, EstimateValues]]
"""Row name -> metric name -> value, low, high, n."""


def metric_values(
    rows: Mapping[str, Orders], slates: Sequence[Slate], seed: int, bootstrap_by: BootstrapBy = "slate"
) -> Metrics:
    """Return every row's metrics as JSON values."""
    return {
        name: {
            key: value.to_json()
            for key, value in evaluate_orders(slates, orders, seed=seed, bootstrap_by=bootstrap_by).items()
        }
        for name, orders in rows.items()
    }


def comparisons(
    rows: Mapping[str, Orders],
    metrics: Metrics,
    slates: Sequence[Slate],
    seed: int,
    bootstrap_by: BootstrapBy = "slate",
) -> dict[str, dict[str, object]]:
    """Return the student's paired differences to other rows, and the share of the teacher that it recovers."""
    differences: dict[str, object] = {
        name: _differences(rows["student"], rows[name], slates, seed, bootstrap_by) for name in COMPARED if name in rows
    }
    found = {"student_minus": differences}
    if "untrained" in rows and "teacher" in rows:
        found["teacher_recovered"] = {key: _recovered(metrics, key) for key in COMPARED_METRICS}
    return found


def print_table(metrics: Metrics, bootstrap_by: BootstrapBy = "slate") -> None:
    """Print one row a contender: value and 95% interval of each metric."""
    table = Table(title=f"slate averages with 95% intervals (resampled by {bootstrap_by})")
    table.add_column("", no_wrap=True)
    for name in TABLE_METRICS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in metrics.items():
        table.add_row(name, *(_cell(row[key]) for key in TABLE_METRICS))
    Console(width=None if Console().is_terminal else TABLE_WIDTH).print(table)


def print_costs(contenders: Contenders) -> None:
    """Print the forward passes of each row, and how valid free answers were."""
    for name, passes in contenders.passes.items():
        print(
            f"evaluate: {name}: {passes['mean']:.1f} forward passes a slate on average (at most {passes['max']:g}), "
            f"{passes['mean_sequential']:.1f} of them one after the other"
        )
    if (free := contenders.validity) is not None:
        print(
            f"evaluate: of {free['num_answers']:g} free answers {free['valid_share']:.1%} were permutations; on "
            f"average {free['mean_repeated']:.2f} repeated, {free['mean_missing']:.2f} missing, "
            f"{free['mean_out_of_range']:.2f} out of range, {free['mean_passes']:.1f} passes a slate"
        )


def _differences(
    first: Orders, second: Orders, slates: Sequence[Slate], seed: int, bootstrap_by: BootstrapBy
) -> dict[str, object]:
    threshold = default_positive_threshold(slate.relevance for slate in slates)
    clusters = clusters_of(slates, bootstrap_by)
    after, before = (
        [slate_metrics(order, slate, positive_threshold=threshold) for order, slate in zip(orders, slates, strict=True)]
        for orders in (first, second)
    )
    return {
        name: paired_difference(
            [row[name] for row in after], [row[name] for row in before], seed=seed, clusters=clusters
        ).to_json()
        for name in COMPARED_METRICS
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
