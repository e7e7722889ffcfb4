"""Plans of runs and the page of results: what a row runs, what the page says of rows with and without a result."""

import json
from pathlib import Path

import pytest

from jobs import ablate, results
from jobs.ablate_plan import AblateConfig, RowConfig, TableConfig, chosen, row_settings
from jobs.cli import run_job
from jobs.results import ResultsConfig
from spd.config import build_config, load_config
from spd.errors import ConfigError

PLAN = """
train = "slates/train"
eval = "slates/eval"
results = "{folder}/results"
settings = ["head.num_positions=20", "seed=3"]
tables = [
    {{name = "a", title = "First", note = "What was found.", curve = "loss"}},
    {{name = "b", title = "Second", show = ["student", "student (free)"], against = "random", order = true}},
]
rows = [
    {{name = "base", tables = ["a", "b=as b calls it"], hours = 0.5}},
    {{name = "next", tables = ["b"], settings = ["seed=4"], start = "base", title = "another", hours = 0.25}},
]
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN.format(folder=tmp_path))
    return file


def write_result(folder: Path, name: str) -> None:
    value = {"value": 0.725, "low": 0.7, "high": 0.75, "n": 320}
    none = {"value": None, "low": None, "high": None, "n": 0}
    metrics = {row: {"auc": value, "kendall_tau": none} for row in ("student", "student (free)", "teacher", "random")}
    curve = [(step, 3.0 - step / 100) for step in range(40)]
    folder.mkdir(exist_ok=True)
    result = {
        "name": name,
        "commit": "abc1234",
        "hardware": "2 CPU cores",
        "train_s": 61.4,
        "data_digest": "d1",
        "config": {"seed": 3, "global_batch_slates": 4},
        "curves": {"loss": curve},
        "metrics": metrics,
        "passes": {"student": {"mean": 1.0}},
        "student_minus": {"random": {"ndcg@10": value}},
        "order_sensitivity": {"num_shuffles": 2, "kendall_tau": value, "exposure": [1.0, 0.9, 0.8]},
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_a_rows_settings_win_over_the_plans_and_it_starts_from_its_predecessor(plan_file: Path) -> None:
    plan = load_config(AblateConfig, str(plan_file), ["work=w"])

    settings = row_settings(plan, plan.rows[1])

    assert settings.index("seed=3") < settings.index("seed=4")
    assert {"train=slates/train", "name=next", "output=w/next", "init_from=w/base"} <= set(settings)
    assert [row.name for row in chosen(load_config(AblateConfig, str(plan_file), ['only=["ne"]']))] == ["next"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((RowConfig(name="a"), RowConfig(name="a")), "name='a' occurs twice"),
        ((RowConfig(name="a", start="b"), RowConfig(name="b")), "'a' builds on 'b', which is no row before it"),
        ((RowConfig(name="a", tables=("9",)),), "names table '9', which is not in tables"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(rows: tuple[RowConfig, ...], message: str) -> None:
    plan = AblateConfig(train="t", eval="e", results="r", rows=rows, tables=(TableConfig(name="1", title="T"),))

    assert any(message in problem for problem in plan.problems())


def test_wrong_settings_are_found_before_the_first_row_runs(plan_file: Path) -> None:
    plan = load_config(AblateConfig, str(plan_file), ['settings=["head.nam=linear"]'])

    with pytest.raises(ConfigError, match=r"row 'base': head\.nam is no known key: did you mean head\.name\?"):
        ablate.run(plan)


def test_a_row_of_a_table_in_toml_is_checked_like_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"rows\[1\]\.nam is no known key"):
        build_config(AblateConfig, {"train": "t", "eval": "e", "results": "r", "rows": [{"name": "a"}, {"nam": "b"}]})


def test_the_page_shows_results_references_and_what_was_not_run(plan_file: Path, tmp_path: Path) -> None:
    write_result(tmp_path / "results", "base")

    results.run(ResultsConfig(plans=(str(plan_file),), benchmarks=(), output=str(tmp_path / "page.md")))

    page = (tmp_path / "page.md").read_text()
    assert "| as b calls it | .725 [.700, .750] | " in page
    assert "| as b calls it, free | .725 [.700, .750] | " in page
    assert "| .725 [.700, .750] | .725 [.700, .750] | 1.00, 0.90, 0.80 | 1 | 61 s |" in page
    assert "| *teacher* | .725 [.700, .750] |" in page
    assert "| another | not run, needs about 0.25 h |" in page
    assert "What was found." in page and (tmp_path / "plots" / "a.png").stat().st_size > 1000
    assert "| base | abc1234 | 3 | d1 | (the plan as it is) |" in page


def test_a_row_with_a_result_is_passed_over(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("base", "next"):
        write_result(tmp_path / "results", name)

    code = run_job("", AblateConfig, ablate.run, ablate.describe, ["--config", str(plan_file)])

    assert code == 0
    assert "2 have their result, 0 to run" in capsys.readouterr().out


@pytest.mark.slow
def test_a_row_that_fails_is_told_with_its_log_and_the_others_have_their_turn(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = load_config(AblateConfig, str(plan_file), [f"work={tmp_path / 'work'}"])  # its slates do not exist

    with pytest.raises(ConfigError, match="rows base, next failed"):
        ablate.run(plan)

    told = capsys.readouterr().err
    assert "base failed: jobs.train exited with 2 (error: uri='slates/train' does not exist" in told
    assert str(tmp_path / "work" / "base.log") in told and not (tmp_path / "results").exists()
