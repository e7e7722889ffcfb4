"""What every entry point shares: arguments, `--help` that lists the config, one-line errors, a quiet environment."""

import argparse
import ast
import dataclasses
import inspect
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, get_type_hints

from spd.config import load_config
from spd.errors import SpdError

Config = TypeVar("Config")

USER_ERROR = 2
INTERRUPTED = 130

QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # the default of 7 backs off for minutes before it says so
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",  # of libraries among themselves
}
"""No usage statistics or telemetry leave the machine; set before Ray, MLflow or a hub client is imported."""


def run_job(
    doc: str,
    config_type: type[Config],
    run: Callable[[Config], object],
    describe: Callable[[Config], Mapping[str, object]],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse, validate, then run the job, or print `describe(config)` for `--dry-run`; returns the exit code.

    What a user can mend prints as one line on stderr and exits with 2.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET_ENVIRONMENT.items()})
    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries among themselves
    arguments = _parser(doc, config_type).parse_args(argv)
    try:
        config = load_config(config_type, arguments.config, arguments.set)
        if arguments.dry_run:
            _print_nested(describe(config))
        else:
            run(config)
    except SpdError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on, or starts again, as its --help says", file=sys.stderr)
        return INTERRUPTED
    return 0


def field_docs(config_type: type) -> dict[str, str]:
    """Return the docstring under each field of a config dataclass, by field name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[node.target.id] = inspect.cleandoc(str(following.value.value))
    return docs


def _parser(doc: str, config_type: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=doc,
        epilog="settings (in the TOML file, or --set name=value):\n" + "\n".join(_settings(config_type, "")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE.toml", help="settings of this run")
    parser.add_argument("--set", metavar="a.b=v", action="append", default=[], help="override one setting; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="check and print what would run, then stop")
    return parser


def _settings(config_type: type, prefix: str) -> list[str]:
    lines: list[str] = []
    hints, docs = get_type_hints(config_type), field_docs(config_type)
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            lines.extend(_settings(hint, f"{prefix}{field.name}."))
        else:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            default = "(required)" if required else f"= {field.default!r}"
            lines.append(f"  {prefix}{field.name} {default}\n      {docs.get(field.name, '')}")
    return lines


def _print_nested(values: Mapping[str, object], indent: int = 0) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            print(f"{' ' * indent}{key}:")
            _print_nested(value, indent + 2)
        else:
            print(f"{' ' * indent}{key} = {value!r}")
