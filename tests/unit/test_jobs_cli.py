"""Entry points: bad input is one line and exit code 2, before Ray starts; help and dry runs teach."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import ablate, demo, evaluate, prepare, score, train
from jobs.ablate_plan import AblateConfig
from jobs.cli import field_docs, run_job
from jobs.train_config import TrainConfig
from spd.config import load_config
from spd.datasets.files import read_slates, write_slates
from spd.errors import ConfigError
from spd.slate import SLATE_SCHEMA
from tests.conftest import make_slate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def slates_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six slates with teacher and relevance."""
    folder = tmp_path_factory.mktemp("slates") / "train"
    slates = [
        replace(make_slate(4, f"r{i}"), teacher_ranking=(2, 0, 3, 1), relevance=(0.0, 0.0, 1.0, 0.0)) for i in range(6)
    ]
    write_slates(slates, folder)
    return str(folder)


def train_arguments(slates: str, backbone: Path, output: Path, *extra: str) -> list[str]:
    settings = [f"train={slates}", f"output={output}", f"backbone.source={backbone}", "head.num_positions=8", *extra]
    return [part for setting in settings for part in ("--set", setting)]


def run_train(arguments: list[str]) -> int:
    return run_job(train.__doc__ or "", TrainConfig, train.run, train.describe, arguments)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("optimizer.adapter_lrr=1", "optimizer.adapter_lrr is no known key: did you mean optimizer.adapter_lr?"),
        ("head.num_positions=3", "slate 'r0': 4 candidates exceed head.num_positions=3: set head.num_positions=4"),
        ("micro_batch_slates=3", "must divide global_batch_slates=16: use 6, 12"),
        ("train=/no/such/folder", "does not exist: give a folder or file of slates"),
        ("train=ftpx://host/x", "can't be opened"),
        ("backbone.source=/no/backbone", "backbone.source='/no/backbone' does not exist"),
        ("zero_stage=7", "zero_stage=7 must be one of 1, 2"),
        ("zero_stage=true", "zero_stage=True must be one of 1, 2"),
        ("optimizer.adapter_lr=nan", "optimizer.adapter_lr=nan must be a finite number"),
        ("optimizer.warmup_steps=-1", "optimizer.warmup_steps=-1 must be a finite number of at least 0"),
        ("loss.tau=inf", "loss.tau=inf must be a finite number"),
        ("adapter.alpha=nan", "adapter.alpha=nan must be a finite number above 0"),
        ("name=a/b", "name='a/b' must be letters, digits"),
        ("seed=-1", "seed=-1 must be between 0 and"),
        ("prompt.max_tokens=3", "do not fit prompt.max_tokens=3"),
        ("prompt.separator=<nope>", "prompt.separator='<nope>' is no single token"),
        ("output=s3://bucket/x", "must be a local folder"),
        ("backbone.source=package:../../x/y", "must read package:NAME/PATH"),
        ("prompt.use_score=true", "prompt.use_score=true, and no slate has a score"),
        ("objective=ar", "set prompt.identifiers to 'markers' or 'ordinals'"),
        ("prompt.readout=tail", "prompt.readout='tail' repeats markers that see every candidate"),
        ("prompt.attention=nearby", "prompt.attention='nearby' must be one of 'causal', 'independent'"),
        ("target.max_candidates=1", "target.max_candidates=1 must be at least 2"),
        ("loss.top_m=0", "loss.top_m=0 must be at least 1"),
        ("init_from=absent", "artifact='absent' is no folder"),
        ("held_out.slates=absent", "uri='absent' does not exist"),
    ],
)
def test_train_refuses_in_one_line_before_ray(
    slates_uri: str, tiny_backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, message: str
) -> None:
    code = run_train(train_arguments(slates_uri, tiny_backbone, tmp_path / "out", extra))

    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def write_rows(folder: Path, rows: list[dict[str, object]], schema: pa.Schema = SLATE_SCHEMA) -> str:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "part-0.parquet")
    return str(folder)


ROW: dict[str, object] = {
    "request_id": "r1",
    "query": "q",
    "candidates": [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}],
    "relevance": None,
    "teacher_ranking": [1, 0],
}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, ROW], "request_id='r1' occurs more than once"),
        ([ROW | {"candidates": []}], "candidates=[] has no candidate"),
        ([ROW | {"teacher_ranking": [0, 0]}], "teacher_ranking=(0, 0) is no permutation"),
        ([ROW | {"teacher_ranking": [0, 2]}], "teacher_ranking=(0, 2) is no permutation"),
        ([ROW | {"teacher_ranking": None}], "target.kind='teacher' needs a teacher_ranking: label the slates"),
        ([], "holds no slate with a teacher_ranking"),
    ],
)
def test_train_refuses_broken_rows(
    tiny_backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, object]], message: str
) -> None:
    uri = write_rows(tmp_path / "rows", rows)

    code = run_train(train_arguments(uri, tiny_backbone, tmp_path / "out"))

    assert code == 2
    assert message in capsys.readouterr().err


def test_train_names_a_missing_column(tiny_backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{key: value for key, value in ROW.items() if key != "query"}]
    uri = write_rows(tmp_path / "rows", rows, SLATE_SCHEMA.remove(SLATE_SCHEMA.get_field_index("query")))

    assert run_train(train_arguments(uri, tiny_backbone, tmp_path / "out")) == 2
    assert "column 'query' is missing: a slate needs request_id, query, candidates" in capsys.readouterr().err


def test_a_dry_run_shows_settings_engine_and_parameters_and_writes_nothing(
    slates_uri: str, tiny_backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = train_arguments(slates_uri, tiny_backbone, tmp_path / "out")

    assert run_train([*arguments, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "adapter_lr = 0.0005" in printed and "stage = 2" in printed and "backbone = 28832" in printed
    assert "total_steps = 1" in printed
    assert not (tmp_path / "out").exists()


def test_help_lists_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_train(["--help"])

    printed = capsys.readouterr().out
    assert "optimizer.adapter_lr = 0.0005" in printed
    assert field_docs(TrainConfig)["zero_stage"] in printed


@pytest.mark.parametrize("job", [evaluate, score])
def test_a_broken_artifact_stops_a_job_before_it_starts(
    job: object,
    slates_uri: str,
    tiny_artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = Path(shutil.copytree(tiny_artifact, tmp_path / "broken"))
    (broken / "head.safetensors").write_bytes(b"")
    module, config_type, key = (
        (evaluate, evaluate.EvaluateConfig, "slates") if job is evaluate else (score, score.ScoreConfig, "input")
    )
    settings = [f"{key}={slates_uri}", f"artifact={broken}", f"output={tmp_path / 'out'}"]
    arguments = [part for setting in settings for part in ("--set", setting)]

    assert run_job("", config_type, module.run, module.describe, arguments) == 2
    assert "head.safetensors has sha256" in capsys.readouterr().err


def test_score_refuses_an_output_that_holds_something(
    slates_uri: str, tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.parquet").write_text("keep")
    settings = [f"input={slates_uri}", f"artifact={tiny_artifact}", f"output={tmp_path / 'out'}"]
    arguments = [part for setting in settings for part in ("--set", setting)]

    assert run_job("", score.ScoreConfig, score.run, score.describe, arguments) == 2
    assert run_job("", score.ScoreConfig, score.run, score.describe, [*arguments, "--set", "overwrite=true"]) == 2
    assert "'mine.parquet' and was written by no finished scoring" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine.parquet").read_text() == "keep"


def test_score_refuses_to_write_over_its_input(
    slates_uri: str, tiny_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"input={slates_uri}", f"artifact={tiny_artifact}", f"output={slates_uri}", "overwrite=true"]
    arguments = [part for setting in settings for part in ("--set", setting)]

    assert run_job("", score.ScoreConfig, score.run, score.describe, arguments) == 2
    assert "lie in each other" in capsys.readouterr().err
    assert len(list(read_slates(slates_uri))) == 6


def test_the_demo_leaves_a_folder_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")

    with pytest.raises(ConfigError, match="holds files of yours"):
        demo.run(demo.DemoConfig(folder=str(tmp_path)))
    assert (tmp_path / "report.json").read_text() == "{}"


def test_prepare_reads_slates_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"request_id": "r2"}) + "\n")
    settings = ["dataset=files", f"train_uri={mine}", f"output={tmp_path / 'slates'}"]
    arguments = [part for setting in settings for part in ("--set", setting)]

    assert run_job("", prepare.PrepareConfig, prepare.run, prepare.describe, arguments) == 0
    assert [slate.request_id for slate in read_slates(str(tmp_path / "slates" / "train"))] == ["r1", "r2"]
    assert "2 training and 0 evaluation slates" in capsys.readouterr().out


def test_prepare_refuses_uris_of_another_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", "train_uri=mine.jsonl", "--set", f"output={tmp_path / 'slates'}"]

    assert run_job("", prepare.PrepareConfig, prepare.run, prepare.describe, arguments) == 2
    assert "set dataset=files" in capsys.readouterr().err


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: prepare.PrepareConfig) -> None:
        raise KeyboardInterrupt

    assert run_job("", prepare.PrepareConfig, interrupted, prepare.describe, ["--set", "output=x"]) == 130
    assert capsys.readouterr().err.count("interrupted") == 1


def test_prepare_needs_its_raw_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["dataset=amazon_beauty", f"source={tmp_path}", f"output={tmp_path / 'slates'}"]
    arguments = [part for setting in settings for part in ("--set", setting)]

    assert run_job("", prepare.PrepareConfig, prepare.run, prepare.describe, arguments) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((ROOT / "jobs").glob("*_train.toml")), ids=lambda file: file.name)
def test_shipped_training_configs_are_valid(file: Path) -> None:
    assert load_config(TrainConfig, str(file), []).output


@pytest.mark.parametrize(
    "file", [f for f in sorted((ROOT / "jobs").glob("*.toml")) if "_train" not in f.name], ids=lambda file: file.name
)
def test_shipped_plans_are_valid_row_by_row(file: Path) -> None:
    ablate.check(load_config(AblateConfig, str(file), []))
