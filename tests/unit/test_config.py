"""The config loader: precedence, types, and errors that name the mend."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from spd.config import build_config, config_to_dict, flatten, load_config
from spd.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    learning_rate: float = 0.1
    stage: Literal[1, 2] = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    seed: int | None = None
    inner: Inner = field(default_factory=Inner)

    def problems(self) -> list[str]:
        return ["seed=13 must be another"] if self.seed == 13 else []


def test_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "a"\nseed = 1\n[inner]\nlearning_rate = 3e-4\n')

    config = load_config(Outer, str(file), ["seed=2", "inner.stage=1"])

    assert config == Outer(name="a", seed=2, inner=Inner(learning_rate=3e-4, stage=1))


def test_an_override_needs_no_quotes_and_may_be_null() -> None:
    assert load_config(Outer, None, ["name=s3://bucket/x", "seed=null"]).name == "s3://bucket/x"


def test_an_override_that_looks_like_a_date_stays_text() -> None:
    assert load_config(Outer, None, ["name=2026-12-01"]).name == "2026-12-01"


def test_a_whole_number_is_a_valid_float() -> None:
    assert load_config(Outer, None, ["name=a", "inner.learning_rate=1"]).inner.learning_rate == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["name=a", "inner.learning_rat=1"], "inner.learning_rat is no known key: did you mean inner.learning_rate?"),
        (["name=a", "seed=x"], "seed='x' must be a whole number or null"),
        (["name=a", "inner.stage=3"], "inner.stage=3 must be one of 1, 2"),
        (["name=a", "inner=1"], "inner=1 must be a table of settings"),
        ([], "name is missing: set it in the file or with --set name=..."),
        (["name=a", "seed=13"], "seed=13 must be another"),
        (["name"], "--set 'name' must read name=value, for example --set train.seed=1"),
    ],
)
def test_errors_name_the_mend(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(Outer, None, overrides)

    assert str(error.value) == message


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"seed='x'.*inner\.stage=9"):
        build_config(Outer, {"name": "a", "seed": "x", "inner": {"stage": 9}})


def test_a_missing_or_broken_file_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")

    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Outer, str(tmp_path / "absent.toml"), [])
    with pytest.raises(ConfigError, match="no valid TOML"):
        load_config(Outer, str(broken), [])


def test_flatten_gives_dotted_names() -> None:
    assert flatten(config_to_dict(Outer(name="a"))) == {
        "name": "a",
        "seed": None,
        "inner.learning_rate": 0.1,
        "inner.stage": 2,
    }
