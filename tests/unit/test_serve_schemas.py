"""The endpoint's schemas, arguments and error table, without starting Ray."""

import shutil
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import ServeDeploySchema

from serve_app.app import build_app
from serve_app.args import parse_args
from serve_app.errors import RETRIED, find_answer
from serve_app.ingress import build_results
from serve_app.schemas import RerankRequest
from spd.errors import ArtifactError, ConfigError, DataError
from spd.slate import Ranking

CONFIG = Path(__file__).parents[2] / "serve_app" / "config.yaml"


def test_documents_are_strings_or_objects() -> None:
    request = RerankRequest.model_validate({"query": "q", "documents": ["a", {"text": "b", "id": 3}], "extra": 1})

    assert [document.text for document in request.documents] == ["a", "b"]
    assert (request.model, request.top_n, request.return_documents) == (None, None, False)


def test_lone_surrogates_become_question_marks() -> None:
    request = RerankRequest.model_validate({"query": "\ud800q", "documents": ["a\udfff"]})

    assert (request.query, request.documents[0].text) == ("?q", "a?")


@pytest.mark.parametrize(
    "change",
    [
        {"documents": []},
        {"documents": "a"},
        {"documents": [None]},
        {"documents": [["a"]]},
        {"query": None},
        {"query": 3},
        {"top_n": 0},
        {"top_n": -1},
        {"top_n": float("nan")},
        {"top_n": True},
        {"top_n": 1.5},
        {"model": 1},
        {"return_documents": None},
    ],
)
def test_unfit_requests_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RerankRequest.model_validate({"query": "q", "documents": ["a"], **change})


def test_openapi_shows_both_forms_of_a_document() -> None:
    items = RerankRequest.model_json_schema()["properties"]["documents"]["items"]

    assert {"type": "string"} in items["anyOf"]


def test_results_are_the_prefix_with_documents_on_request() -> None:
    body = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2, "return_documents": True}
    request = RerankRequest.model_validate(body)
    ranking = Ranking(order=(2, 0, 1), relevance_score=(0.9, 0.5, 0.1), is_degenerate=False)

    results = build_results(ranking, request)

    assert [(result.index, result.document.text if result.document else None) for result in results] == [
        (2, "c"),
        (0, "a"),
    ]


def test_arguments_may_be_strings_or_typed() -> None:
    strings = parse_args({"artifact": "a", "batch_tokens": "128", "batch_wait_s": "0.01", "num_prefill_replicas": "2"})
    typed = parse_args({"artifact": "a", "batch_tokens": 128, "batch_wait_s": 0.01, "num_prefill_replicas": 2})

    assert strings == typed


def test_every_unfit_argument_is_named_with_its_mend() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args({"artefact": "a", "batch_tokens": "many", "precision": "fp8", "batch_wait_s": "nan"})

    message = str(caught.value)
    assert "artefact is no known argument: did you mean artifact?" in message
    assert "artifact is missing: give artifact=..." in message
    assert "batch_tokens='many': input should be a valid integer" in message
    assert "precision='fp8': input should be 'auto', 'bf16' or 'fp32'" in message
    assert "batch_wait_s='nan': input should be a finite number" in message


def test_corrupt_artifact_fails_before_anything_starts(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corrupt"
    shutil.copytree(tiny_artifact, folder)
    (folder / "head.safetensors").write_bytes(b"\0" * 64)

    with pytest.raises(ArtifactError, match=r"head\.safetensors has sha256"):
        build_app({"artifact": str(folder)})
    with pytest.raises(ArtifactError, match="is no folder"):
        build_app({"artifact": str(tmp_path / "nowhere")})


def test_deploy_config_is_valid() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(CONFIG.read_text()))

    (application,) = config.applications
    assert application.import_path == "serve_app.app:build_app"
    assert parse_args(application.args).model == "spd"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DataError("too many"), 422),
        (BackPressureError(1, 1), 503),
        (ActorDiedError(), 503),
        (TimeoutError(), 503),
        (RuntimeError("secret"), 500),
        (UnicodeEncodeError("utf-8", "secret", 0, 1, "secret"), 500),
    ],
)
def test_errors_map_to_answers_without_inner_text(error: Exception, status: int) -> None:
    answer = find_answer(error)

    assert answer.status == status
    assert answer.message and "secret" not in answer.message


def test_errors_of_a_replica_are_unwrapped() -> None:
    wrapped = RayTaskError("call", "Traceback: secret", DataError("too many")).as_instanceof_cause()

    assert (find_answer(wrapped).status, find_answer(wrapped).message) == (422, "too many")
    assert not isinstance(wrapped, RETRIED)
