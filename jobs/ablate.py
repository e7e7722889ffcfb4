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
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from jobs.ablate_plan import (
    AblateConfig,
    RowConfig,
    artifact_folder,
    chosen,
    result_file,
    row_settings,
    train_command,
)
from jobs.cli import run_job
from jobs.files import read_json, write_json
from jobs.hardware import commit, hardware
from jobs.tracking import absolute, run_history
from jobs.train_config import TrainConfig
from spd.config import config_to_dict, load_config
from spd.errors import ConfigError, SpdError

CURVES = ("loss", "held_out_auc", "held_out_ndcg_at_10", "held_out_kendall_tau")


def main() -> int:
    """Run the job; returns the exit code."""
    return run_job(__doc__ or "", AblateConfig, run, describe)


def run(config: AblateConfig) -> list[str]:
    """Run what has no result yet; returns the names of the rows that failed."""
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
    return failed


def run_row(config: AblateConfig, row: RowConfig) -> None:
    """Train, evaluate, and write the result; raises ConfigError, naming the log, if a job fails."""
    work, artifact = Path(config.work), artifact_folder(config, row)
    work.mkdir(parents=True, exist_ok=True)
    command = train_command(config, row)
    log = work / f"{row.name}.log"
    start_s = time.monotonic()
    if not artifact.exists():
        _call(command, log)
    train_s = time.monotonic() - start_s
    evaluation = work / f"{row.name}.evaluation.json"
    _call(evaluate_command(config, row, evaluation), log)
    params, curves = run_history(absolute(config.tracking), row.name, CURVES)
    write_json(
        result_file(config, row),
        {
            "name": row.name,
            "command": shlex.join(command),
            "commit": commit(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
            "train_s": round(train_s, 1),
            "config": config_to_dict(load_config(TrainConfig, None, row_settings(config, row))),
            "data_digest": params.get("data.digest"),
            "curves": curves,
            **read_json(evaluation),
        },
    )


def check(config: AblateConfig) -> None:
    """Raise ConfigError for a row whose settings are wrong, before the first one runs."""
    for row in config.rows:
        try:
            load_config(TrainConfig, None, row_settings(config, row))
        except ConfigError as error:
            raise ConfigError(f"row {row.name!r}: {error}") from None
    known = tuple(row.name for row in config.rows)
    for prefix in config.only:
        if not any(name.startswith(prefix) for name in known):
            raise ConfigError(f"only={prefix!r} begins no row's name: they are {', '.join(known)}")


def evaluate_command(config: AblateConfig, row: RowConfig, output: Path) -> list[str]:
    """Return the command that evaluates the row's artifact."""
    settings = [
        f"slates={config.eval}",
        f"artifact={artifact_folder(config, row)}",
        f"output={output}",
        f"max_slates={'null' if config.eval_max_slates is None else config.eval_max_slates}",
        f"compare_untrained={str(config.compare_untrained).lower()}",
        f"tracking.uri={config.tracking.uri}",
    ]
    return ["python", "-m", "jobs.evaluate", *(part for setting in settings for part in ("--set", setting))]


def describe(config: AblateConfig) -> Mapping[str, object]:
    """Return what `--dry-run` prints: each row's state and command."""
    check(config)
    rows = {row.name: f"{_state(config, row)}: {shlex.join(train_command(config, row))}" for row in chosen(config)}
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
