"""Run a plan of training runs one after the other, each evaluated, its result kept as a JSON file in the repository.

    python -m jobs.ablate --config jobs/ablation.toml --dry-run
    python -m jobs.ablate --config jobs/ablation.toml
    python -m jobs.ablate --config jobs/ablation.toml --set only='["recipe-"]'
    python -m jobs.ablate --config jobs/ablation_small.toml

A row is a name and the settings by which it differs from the plan's own. Rows whose result lies in RESULTS are passed
over, so that a plan cut off goes on where it stopped; a row that fails is told and the others go on. `jobs.results`
turns the results into tables and plots.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from jobs.ablate_plan import (
    AblateConfig,
    RowConfig,
    artifact_folder,
    chosen,
    evaluate_command,
    label_commands,
    result_file,
    row_settings,
    train_command,
)
from jobs.cli import run_job
from jobs.evaluate import EvaluateConfig
from jobs.files import read_json, write_json
from jobs.hardware import commit, hardware
from jobs.label_config import LabelConfig
from jobs.tracking import absolute, read_run
from jobs.train_config import TrainConfig
from spd.config import config_to_dict, load_config
from spd.errors import ConfigError, SpdError

CURVES = ("loss", "held_out_auc", "held_out_ndcg_at_10", "held_out_kendall_tau")


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", AblateConfig, run, describe)


def run(config: AblateConfig) -> list[str]:
    """Run what has no result yet; returns the names of the rows that ran.

    Raises ConfigError once all have had their turn, if some failed.
    """
    check(config)
    rows = chosen(config)
    todo = [row for row in rows if not result_file(config, row).exists()]
    print(f"ablate: {len(rows)} rows, {len(rows) - len(todo)} have their result, {len(todo)} to run", flush=True)
    failed = []
    for place, row in enumerate(todo, start=1):
        print(f"ablate: {place}/{len(todo)} {row.name}", flush=True)
        try:
            run_row(config, row)
        except SpdError as error:
            failed.append(row.name)
            print(f"ablate: {row.name} failed: {error}", file=sys.stderr, flush=True)
    print(f"ablate: {len(todo) - len(failed)} done, {len(failed)} failed; results in {config.results}")
    if failed:
        raise ConfigError(f"rows {', '.join(failed)} failed: mend them and start the same command, the others are kept")
    return [row.name for row in todo]


def run_row(config: AblateConfig, row: RowConfig) -> None:
    """Label if there is a teacher, train, evaluate, write the result; ConfigError names the log of what failed."""
    work, artifact = Path(config.work), artifact_folder(config, row)
    work.mkdir(parents=True, exist_ok=True)
    log = work / f"{row.name}.log"
    for folder, command in label_commands(config, row).items():
        if not Path(folder).exists():
            _call(command, log)
    if not artifact.exists():
        _call(train_command(config, row), log)
    evaluation = work / f"{row.name}.evaluation.json"
    _call(evaluate_command(config, row, evaluation), log)
    trained = read_run(absolute(config.tracking), artifact.name, CURVES)
    result = {
        "name": row.name,
        "commands": [shlex.join(command) for command in commands(config, row)],
        "commit": trained.params.get("commit", commit()),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "train_s": round(trained.wall_s, 1),
        "config": config_to_dict(load_config(TrainConfig, None, row_settings(config, row))),
        "data_digest": trained.params.get("data.digest"),
        "curves": trained.curves,
    }
    write_json(result_file(config, row), result | read_json(evaluation))


def commands(config: AblateConfig, row: RowConfig) -> list[list[str]]:
    """Return the commands of the row, in order."""
    train = [] if row.artifact_of else [train_command(config, row)]
    evaluation = Path(config.work) / f"{row.name}.evaluation.json"
    return [*label_commands(config, row).values(), *train, evaluate_command(config, row, evaluation)]


def check(config: AblateConfig) -> None:
    """Raise ConfigError for a row whose settings are wrong, before the first one runs."""
    for row in config.rows:
        try:
            load_config(TrainConfig, None, row_settings(config, row))
            load_config(EvaluateConfig, None, evaluate_command(config, row, Path("unused"))[4::2])
            for command in label_commands(config, row).values():
                load_config(LabelConfig, None, command[4::2])
        except ConfigError as error:
            raise ConfigError(f"row {row.name!r}: {error}") from None
    known = tuple(row.name for row in config.rows)
    for prefix in config.only:
        if not any(name.startswith(prefix) for name in known):
            raise ConfigError(f"only={prefix!r} begins no row's name: they are {', '.join(known)}")


def describe(config: AblateConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: each row's state and command."""
    check(config)
    rows = {
        row.name: f"{_state(config, row)}: {' && '.join(map(shlex.join, commands(config, row)))}"
        for row in chosen(config)
    }
    return {"results": config.results, "rows": rows}


def _state(config: AblateConfig, row: RowConfig) -> str:
    return "done" if result_file(config, row).exists() else "to run"


def _call(command: list[str], log: Path) -> None:
    """Run a job in a process of its own, its output appended to the log."""
    with log.open("a", encoding="utf-8") as file:
        code = subprocess.run(
            [sys.executable, *command[1:]], stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"{command[2]} exited with {code} ({' '.join(last)}); its output is in {log}")


if __name__ == "__main__":
    raise SystemExit(main())
