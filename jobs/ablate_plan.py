"""A plan of training runs: rows that differ from common settings, and the tables that show their results."""

from dataclasses import dataclass, field
from pathlib import Path

from jobs.tracking import TrackingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One table of the results page."""

    name: str
    """What rows call it in their `tables`."""
    title: str
    """Its heading."""
    note: str = ""
    """Text under it: what was found, where it disagrees with the paper, and why."""
    show: tuple[str, ...] = ("student",)
    """What of each row's evaluation it shows: "student", "student (greedy)", "student (free)", ..."""
    against: str | None = None
    """Show the paired difference in NDCG@10 to this part of the evaluation, for example "upstream_score"."""
    order: bool = False
    """Show the order sensitivity (rows evaluated with num_shuffles)."""
    curve: str | None = None
    """Plot this curve of its rows ("loss", "held_out_auc", ...) beside it; null plots none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """One training run of the plan."""

    name: str
    """Name of the row, of its run and of its result file."""
    tables: tuple[str, ...] = ()
    """Tables that show it, each by its name, or as `name=what that table calls the row`."""
    title: str = ""
    """What tables call it unless they say otherwise; empty takes the name."""
    settings: tuple[str, ...] = ()
    """Training settings, `name=value`, over the plan's own."""
    evaluate: tuple[str, ...] = ()
    """Evaluation settings, `name=value`, over the plan's own."""
    start: str | None = None
    """Name of the row whose artifact this one starts from (a warm start); it must stand before."""
    teacher: str | None = None
    """Name of the autoregressive row whose permutations this one is trained on and compared with (jobs.label)."""
    label: tuple[str, ...] = ()
    """Labelling settings, `name=value`, of such a row."""
    label_max_slates: int | None = None
    """Training slates that such a row has labelled (the first ones); null has all."""
    artifact_of: str | None = None
    """Train nothing: evaluate the artifact of this row under other settings."""
    hours: float = 0.0
    """About how long it takes, told where it was not run."""

    def titles(self) -> dict[str, str]:
        """Return what each table that shows the row calls it."""
        pairs = [entry.partition("=") for entry in self.tables]
        return {table: own or self.title or self.name for table, _, own in pairs}


@dataclass(frozen=True, kw_only=True, slots=True)
class AblateConfig:
    """A plan of rows over common settings."""

    settings: tuple[str, ...] = ()
    """Training settings of all rows, `name=value` as jobs.train takes them."""
    train: str
    """Slates that every row is trained on: a folder or URI."""
    eval: str
    """Held-out slates that every row is evaluated on, and its learning curve measured on: a folder or URI."""
    evaluate: tuple[str, ...] = ()
    """Evaluation settings of all rows, `name=value` as jobs.evaluate takes them."""
    results: str
    """Folder for the results, a JSON file a row."""
    work: str = "runs/ablation"
    """Folder for checkpoints, artifacts and logs."""
    only: tuple[str, ...] = ()
    """Run the rows whose names begin with one of these; empty runs all."""
    rows: tuple[RowConfig, ...]
    """The rows, in the order in which they run."""
    tables: tuple[TableConfig, ...] = ()
    """The tables of the results page, in order."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def problems(self) -> list[str]:
        names = [row.name for row in self.rows]
        found = [
            f"rows: name={name!r} occurs twice: rename one" for name in sorted({n for n in names if names.count(n) > 1})
        ]
        for place, row in enumerate(self.rows):
            for other in (row.start, row.teacher, row.artifact_of):
                if other is not None and other not in names[:place]:
                    found.append(f"rows: {row.name!r} builds on {other!r}, which is no row before it")
        known = {table.name for table in self.tables}
        for row in self.rows:
            found += [
                f"rows: {row.name!r} names table {name!r}, which is not in tables"
                for name in row.titles()
                if name not in known
            ]
        return found


def chosen(config: AblateConfig) -> list[RowConfig]:
    """Return the rows to run, in order."""
    return [row for row in config.rows if not config.only or row.name.startswith(config.only)]


def row_settings(config: AblateConfig, row: RowConfig) -> list[str]:
    """Return all `--set` values of the row's training run; later ones win."""
    train, held_out = row_slates(config, row)
    found = [
        f"train={train}",
        f"held_out.slates={held_out}",
        *config.settings,
        f"name={row.name}",
        f"output={artifact_folder(config, row)}",
        f"storage={config.work}/checkpoints",
        f"tracking.uri={config.tracking.uri}",
        *row.settings,
    ]
    if row.start is not None:
        found.append(f"init_from={Path(config.work) / row.start}")
    return found


def row_slates(config: AblateConfig, row: RowConfig) -> tuple[str, str]:
    """Return where the row's training and held-out slates lie: the plan's, or those that its teacher has ordered."""
    if row.teacher is None:
        return config.train, config.eval
    return f"{config.work}/{row.name}.train", f"{config.work}/{row.name}.eval"


def train_command(config: AblateConfig, row: RowConfig) -> list[str]:
    """Return the command that trains the row."""
    return _command("train", row_settings(config, row))


def label_commands(config: AblateConfig, row: RowConfig) -> dict[str, list[str]]:
    """Return the commands that have the row's teacher order its slates, by the folder that each writes."""
    if row.teacher is None:
        return {}
    common = [f"local.artifact={Path(config.work) / row.teacher}", f"tracking.uri={config.tracking.uri}", *row.label]
    most = [] if row.label_max_slates is None else [f"max_slates={row.label_max_slates}"]
    train, held_out = row_slates(config, row)
    return {
        train: _command("label", [f"input={config.train}", f"output={train}", *common, *most]),
        held_out: _command("label", [f"input={config.eval}", f"output={held_out}", *common]),
    }


def evaluate_command(config: AblateConfig, row: RowConfig, output: Path) -> list[str]:
    """Return the command that evaluates the row's artifact."""
    settings = [
        f"slates={row_slates(config, row)[1]}",
        f"artifact={artifact_folder(config, row)}",
        f"output={output}",
        f"tracking.uri={config.tracking.uri}",
        *config.evaluate,
        *row.evaluate,
    ]
    return _command("evaluate", settings)


def artifact_folder(config: AblateConfig, row: RowConfig) -> Path:
    """Return where the row's artifact lies."""
    return Path(config.work) / (row.artifact_of or row.name)


def result_file(config: AblateConfig, row: RowConfig) -> Path:
    """Return the row's result file."""
    return Path(config.results) / f"{row.name}.json"


def _command(job: str, settings: list[str]) -> list[str]:
    return ["python", "-m", f"jobs.{job}", *(part for setting in settings for part in ("--set", setting))]
