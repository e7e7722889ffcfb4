"""Write the results page from the results of plans and benchmarks: one table each, plots, and every row's command.

    python -m jobs.results
    python -m jobs.results --set plans='["jobs/ablation.toml"]' --set output=docs/results.md

A row of a plan that has no result stands in its table as not run, with the time that it needs and its command.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.ablate_plan import AblateConfig, RowConfig, TableConfig, result_file
from jobs.benchmark import milliseconds_cell
from jobs.cli import run_job
from jobs.files import read_json
from spd.config import load_config

COLUMNS = {
    "auc": "AUC",
    "r@1": "R@1",
    "r@10": "R@10",
    "ndcg@1": "NDCG@1",
    "ndcg@10": "NDCG@10",
    "kendall_tau": "Kendall tau",
}
REFERENCES = ("teacher", "upstream_score", "input_order", "random", "untrained")
Json = dict[str, object]


PREAMBLE = """# Results

Written by `python -m jobs.results` from the results of `jobs.ablate` (a JSON file a row, exported from its MLflow run)
and `jobs.benchmark`. Only what was measured stands here. Values are means over held-out slates with 95% bootstrap
intervals; one run a row unless a spread is given. Training times were often taken beside other work: they are no
measure of speed. What the demo reaches stands in [demo.md](demo.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultsConfig:
    """What goes on the page."""

    plans: tuple[str, ...] = ("jobs/ablation.toml", "jobs/beauty.toml", "jobs/dl20.toml")
    """Plans of jobs.ablate, in order."""
    benchmarks: tuple[str, ...] = ("docs/benchmark.json", "docs/benchmark_short.json")
    """Results of jobs.benchmark; one that is not there yet is told as such."""
    output: str = "docs/results.md"
    """The page; plots go to the folder `plots` beside it."""


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", ResultsConfig, run, describe)


def run(config: ResultsConfig) -> Path:
    """Write the page; returns its path."""
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    sections = [PREAMBLE]
    for plan_file in config.plans:
        plan = load_config(AblateConfig, plan_file, [])
        sections += [table_section(plan, table, output) for table in plan.tables]
        sections.append(command_section(plan, plan_file))
    sections += [benchmark_section(Path(name)) for name in config.benchmarks]
    aside = output.with_name(f".{output.name}.part")
    aside.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    aside.rename(output)
    print(f"results: written to {output}")
    return output


def table_section(plan: AblateConfig, table: TableConfig, output: Path) -> str:
    """Return a table of the page: a line a row, references below, then the note and the plot."""
    rows = [row for row in plan.rows if table.name in row.titles()]
    found = {row.name: read_json(file) for row in rows if (file := result_file(plan, row)).exists()}
    columns = [*COLUMNS.values(), *_extra_columns(table), "passes", "training"]
    lines = [line for row in rows for line in _lines(row, table, found.get(row.name), len(columns))]
    references = next(iter(found.values()), None)
    if references is not None:
        lines += _reference_lines(references, len(columns))
    header = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    parts = [f"## {table.title}", "\n".join([*header, *lines])]
    if table.note:
        parts.append(table.note.strip())
    if table.curve and found:
        plot = output.parent / "plots" / f"{table.name}.png"
        draw_curves({row.titles()[table.name]: found[row.name] for row in rows if row.name in found}, table.curve, plot)
        parts.append(f"![{table.curve} by slates trained on](plots/{plot.name})")
    return "\n\n".join(parts)


def command_section(plan: AblateConfig, plan_file: str) -> str:
    """Return the page's account of what was run where: one line a row."""
    lines = []
    for row in plan.rows:
        file = result_file(plan, row)
        if file.exists():
            result = read_json(file)
            lines.append(
                f"| {row.name} | {result['commit']} | {_setting(result, 'seed')} | {_data_digest(result)} | "
                f"{' '.join(row.settings) or '(the plan as it is)'} |"
            )
    hardware = sorted({str(read_json(f)["hardware"]) for row in plan.rows if (f := result_file(plan, row)).exists()})
    return "\n\n".join(
        [
            f"### What was run for {plan_file}",
            f"Each row: `python -m jobs.ablate --config {plan_file} --set only='[\"NAME\"]'`, which trains "
            f"(`jobs.train`) and evaluates (`jobs.evaluate`); the whole command lies in its result under "
            f"`{plan.results}`. Hardware: {'; '.join(hardware) or 'none yet'}.",
            "\n".join(["| row | commit | seed | data | settings over the plan's |", "| --- " * 5 + "|", *lines]),
        ]
    )


def benchmark_section(file: Path) -> str:
    """Return the table of a benchmark: milliseconds and passes of each contender and part by slate size."""
    if not file.exists():
        return f"## Latency\n\nNot run: `python -m jobs.benchmark --set json={file}`."
    report = read_json(file)
    sizes, ratios, config = report["sizes"], report["ratios"], report["config"]
    assert isinstance(sizes, dict) and isinstance(ratios, dict) and isinstance(config, dict)
    parts = list(next(iter(sizes.values()))["milliseconds"])
    lines = [f"| tokens of the prompt | {' | '.join(str(values['num_tokens']) for values in sizes.values())} |"]
    for part in parts:
        cells = [milliseconds_cell(values, part) for values in sizes.values()]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    header = f"| median ms a slate (passes, valid permutations) | {' | '.join(sizes)} |"
    table = "\n".join([header, "| --- " * (len(sizes) + 1) + "|", *lines])
    listed = ", ".join(f"`{name}` {value}" for name, value in ratios.items())
    layers = config["backbone"]["num_layers"] or "all"
    limits = f"{config['prompt']['max_candidate_tokens']} tokens a candidate and {config['prompt']['max_query_tokens']}"
    return "\n\n".join(
        [
            f"## Latency: one pass against decoding (Tables 2 and 5), at most {limits} of the query",
            f"`python -m jobs.benchmark`, {layers} layers, settings in `{file}`, commit {report['commit']}. "
            f"Hardware: {report['hardware']}.",
            table,
            f"Ratios of medians of this one run: {listed}.",
        ]
    )


def draw_curves(results: Mapping[str, Json], key: str, file: Path) -> None:
    """Draw one curve a row, by slates trained on, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for title, result in results.items():
        curves = result["curves"]
        assert isinstance(curves, dict)
        batch = _setting(result, "global_batch_slates")
        assert isinstance(batch, int)
        points = _smooth([(step * batch, value) for step, value in curves.get(key, [])])
        axes.plot([x for x, _ in points], [y for _, y in points], label=title)
    axes.set_xlabel("slates trained on")
    axes.set_ylabel(key)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


def describe(config: ResultsConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: each plan's rows with and without a result."""
    plans = {name: load_config(AblateConfig, name, []) for name in config.plans}
    return {
        name: {row.name: "result" if result_file(plan, row).exists() else "not run" for row in plan.rows}
        for name, plan in plans.items()
    }


def _extra_columns(table: TableConfig) -> list[str]:
    against = [f"NDCG@10 minus {table.against.replace('_', ' ')}"] if table.against else []
    return [*against, *(["tau between shuffles", "exposure first, middle, last"] if table.order else [])]


def _lines(row: RowConfig, table: TableConfig, result: Json | None, width: int) -> list[str]:
    """Return the row's lines: one a part of its evaluation that the table shows."""
    title = row.titles()[table.name]
    if result is None:
        return [f"| {title} | not run, needs about {row.hours:g} h{' |' * width}"]
    metrics, passes = result["metrics"], result["passes"]
    assert isinstance(metrics, dict) and isinstance(passes, dict)
    seconds = "" if row.artifact_of else f"{result['train_s']:.0f} s"
    lines = []
    for part in (name for name in table.show if name in metrics):
        name = title if part == "student" else f"{title}, {part.removeprefix('student ').strip('()')}"
        taken = (passes.get(part) or passes["student"])["mean"]
        cells = [_cells(metrics[part]), *_extra_cells(table, result, part), f"{taken:g}", seconds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _extra_cells(table: TableConfig, result: Json, part: str) -> list[str]:
    """Return the cells of `_extra_columns`; they are known of the student alone."""
    cells: list[str] = []
    if table.against:
        differences = result["student_minus"]
        assert isinstance(differences, dict)
        difference = differences.get(table.against, {}).get("ndcg@10")
        cells.append(_cell(difference) if part == "student" else "")
    if table.order:
        order = result.get("order_sensitivity") if part == "student" else None
        if isinstance(order, dict):
            exposure = order["exposure"]
            places = (exposure[0], exposure[len(exposure) // 2], exposure[-1])
            cells += [_cell(order["kendall_tau"]), ", ".join(f"{value:.2f}" for value in places)]
        else:
            cells += ["", ""]
    return cells


def _reference_lines(result: Json, width: int) -> list[str]:
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    names = [name for name in REFERENCES if name in metrics]
    rest = " |" * (width - len(COLUMNS))
    return [f"| *{name.replace('_', ' ')}* | {_cells(metrics[name])} |{rest}" for name in names]


def _cells(metrics: Mapping[str, Mapping[str, float | None]]) -> str:
    return " | ".join(_cell(metrics.get(key)) for key in COLUMNS)


def _cell(value: Mapping[str, float | None] | None) -> str:
    if value is None or value["value"] is None:
        return ""
    texts = [f"{value[key]:.3f}".replace("0.", ".", 1) for key in ("value", "low", "high")]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _setting(result: Json, key: str) -> object:
    config = result["config"]
    assert isinstance(config, dict)
    return config[key]


def _data_digest(result: Json) -> str:
    return str(result.get("data_digest", ""))


def _smooth(points: Sequence[tuple[int, float]], width: int = 8) -> list[tuple[int, float]]:
    """Return running means over `width` points: single steps of few slates are too noisy to compare."""
    if len(points) <= 2 * width:
        return list(points)
    ends = range(width, len(points) + 1)
    return [(points[end - 1][0], sum(value for _, value in points[end - width : end]) / width) for end in ends]


if __name__ == "__main__":
    raise SystemExit(main())
