"""Labelling without Ray: rankings made elsewhere, the journal, and what is asked again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import label
from jobs.cli import run_job
from jobs.label_config import LabelConfig
from jobs.label_import import match_ranking, read_rankings
from jobs.label_journal import Cost, Journal, Label, open_journal, read_journal
from jobs.label_teachers import questions
from spd.answer import Answer, repair
from spd.datasets.files import read_slates, write_slates
from spd.errors import ConfigError, DataError
from tests.conftest import make_slate


@pytest.fixture
def slates_uri(tmp_path: Path) -> Path:
    write_slates([make_slate(4, f"r{i}", query=f"query {i}") for i in range(3)], tmp_path / "slates")
    return tmp_path / "slates"


def run(*settings: str) -> int:
    flags = [part for setting in settings for part in ("--set", setting)]
    return run_job("", LabelConfig, label.run, label.describe, flags)


def test_a_trec_run_and_json_lines_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.trec").write_text("r1 Q0 c2 2 0.5 tag\nr1 Q0 c0 1 0.9 tag\nr2 Q0 c1 1 1.0 tag\n")
    (tmp_path / "run.jsonl").write_text(
        '{"request_id": "r1", "ranking": ["c0", "c2"]}\n\n{"request_id": "r2", "ranking": ["c1"]}\n'
    )

    assert read_rankings(str(tmp_path / "run.trec")) == read_rankings(str(tmp_path / "run.jsonl"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.trec", "r1 Q0 c2 first 0.5 tag\n", r"x\.trec:1: no TREC run line"),
        ("x.jsonl", '{"request_id": "r1"}\n', r"x\.jsonl:1: no object with request_id and ranking"),
        ("x.jsonl", '{"request_id": "r", "ranking": []}\n' * 2, r"x\.jsonl:2: request_id='r' has a ranking already"),
        ("x.jsonl", "[" * 100_000, r"x\.jsonl:1: no object"),
    ],
)
def test_a_broken_file_of_rankings_names_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(DataError, match=message):
        read_rankings(str(tmp_path / name))


def test_a_ranking_of_ids_may_be_a_prefix_and_hold_strangers() -> None:
    answer, num_unknown = match_ranking(make_slate(4), ["c3", "elsewhere", "c1", "c3"])

    assert answer == Answer(order=(3, 1), num_repeated=1, num_missing=2)
    assert num_unknown == 1


def test_imported_rankings_become_teacher_rankings(slates_uri: Path, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text(
        '{"request_id": "r1", "ranking": ["c2", "c0"]}\n{"request_id": "x", "ranking": []}\n'
    )
    output = tmp_path / "labelled"

    code = run(
        f"input={slates_uri}",
        f"output={output}",
        "backend=import",
        f"rankings={tmp_path / 'run.jsonl'}",
        f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}",
    )

    assert code == 0
    assert [slate.teacher_ranking for slate in read_slates(output)] == [None, (2, 0), None]
    summary = json.loads((tmp_path / "labelled.summary.json").read_text())
    assert (summary["slates"], summary["labelled"], summary["failed"]) == (3, 1, {"not asked, or lost": 2})


def test_the_journal_keeps_every_answer_but_a_torn_one(tmp_path: Path) -> None:
    open_journal(str(tmp_path), {"backend": "openai"})
    first = Label(request_id="a", permutation=0, answer=repair([1, 0], 2), cost=Cost(num_requests=1, input_tokens=7))
    second = replace(first, permutation=1)
    journal = Journal(str(tmp_path), ["a", "b"])
    journal.append([first])
    torn = next(tmp_path.glob("*/*.jsonl"))
    torn.write_bytes(torn.read_bytes() + b'{"request_id": "b", "ans')
    Journal(str(tmp_path), ["a", "b"]).append([second])

    assert read_journal(str(tmp_path)) == journal.labels() == {"a": {0: first, 1: second}}
    assert Journal(str(tmp_path), ["c"]).labels() == {}


def test_other_settings_do_not_go_on_with_a_journal(tmp_path: Path) -> None:
    open_journal(str(tmp_path), {"chat": {"model": "small"}})
    open_journal(str(tmp_path), {"chat": {"model": "small"}})

    with pytest.raises(ConfigError, match="answers given with another chat"):
        open_journal(str(tmp_path), {"chat": {"model": "large"}})


def test_only_what_has_no_answer_is_asked() -> None:
    slate = make_slate(6)

    first, second, third = questions(slate, 3, 0, {})

    assert first.order == tuple(range(6)) and len({first.order, second.order, third.order}) == 3
    assert second.slate.candidates == tuple(slate.candidates[i] for i in second.order)
    assert second.label(repair([0], 6)).answer.order[0] == second.order[0]
    assert questions(slate, 3, 0, {"r1": frozenset({0, 2})}) == [second]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["backend=local"], "local.artifact is empty"),
        (["backend=openai"], "chat.model is empty"),
        (["backend=import"], "rankings is empty"),
        (
            ["backend=openai", "chat.model=m", "endpoint.requests_per_minute=0"],
            "requests_per_minute=0 must be above 0",
        ),
        (["backend=vllm", "chat.model=m"], "the package vllm is not installed"),
        (["backend=import", "rankings=absent.trec"], "is no file"),
        (["backend=imports"], "backend='imports' must be one of"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    slates_uri: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    code = run(f"input={slates_uri}", f"output={tmp_path / 'out'}", *settings)

    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_single_pass_artifact_is_no_teacher(
    slates_uri: Path, tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"input={slates_uri}", f"output={tmp_path / 'out'}", f"local.artifact={tiny_artifact}") == 2
    assert "is a single-pass ranker: label with an autoregressive one" in capsys.readouterr().err
