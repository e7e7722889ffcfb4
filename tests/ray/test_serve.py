"""The endpoint over real HTTP, on a tiny artifact."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.app import build_app
from spd.backbone import file_sha256
from spd.ranker import Ranker
from tests.conftest import make_slate
from tests.ray.conftest import free_port

pytestmark = pytest.mark.ray

BATCH_TOKENS = 400
QUICK = {"batch_tokens": str(BATCH_TOKENS), "num_threads": "1", "precision": "fp32", "gpus_per_prefill": "0"}
SECRET = "xylophonesecret"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def url(ray_session: Path) -> Iterator[str]:
    """Address of a running Serve without applications."""
    from ray import serve

    port = free_port()
    options = {"host": "127.0.0.1", "port": port, "request_timeout_s": 60}
    serve.start(proxy_location="HeadOnly", http_options=options)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def client(url: str, tiny_artifact: Path) -> Iterator[httpx.Client]:
    """A client of the application on the tiny artifact, as `serve run` builds it: all arguments are strings."""
    from ray import serve

    serve.run(build_app({"artifact": str(tiny_artifact), **QUICK}), name="spd", route_prefix="/")
    with httpx.Client(base_url=url, timeout=90, limits=httpx.Limits(max_connections=64)) as client:
        yield client


def post(client: httpx.Client, body: dict[str, object]) -> httpx.Response:
    return client.post("/v1/rerank", json=body)


def indices(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return [result["index"] for result in response.json()["results"]]


def test_answers_in_the_documented_shape(client: httpx.Client) -> None:
    body = {"model": "spd", "query": "space", "documents": ["Fargo", {"text": "Alien", "id": 7}], "unknown": 1}

    answer = post(client, body | {"return_documents": True}).json()

    assert sorted(answer) == ["id", "meta", "model", "results", "usage"]
    assert sorted(result["index"] for result in answer["results"]) == [0, 1]
    assert all(result["document"]["text"] == ["Fargo", "Alien"][result["index"]] for result in answer["results"])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    assert answer["meta"]["num_truncated"] == 0
    assert sorted(answer["meta"]["latency_ms"]) == ["decode", "encode", "prefill"]


def test_http_equals_local_ranking_whatever_it_is_batched_with(client: httpx.Client, tiny_ranker: Ranker) -> None:
    slates = [make_slate(1 + 5 * (i % 7), query=f"query {i}") for i in range(24)]  # 31 candidates exceed the budget
    documents = [[candidate.text for candidate in slate.candidates] for slate in slates]
    expected = [tiny_ranker.rank(slate.query, texts) for slate, texts in zip(slates, documents, strict=True)]

    with ThreadPoolExecutor(24) as pool:
        bodies = [{"query": slate.query, "documents": texts} for slate, texts in zip(slates, documents, strict=True)]
        answers = list(pool.map(lambda body: post(client, body), bodies))

    assert max(answer.json()["usage"]["prompt_tokens"] for answer in answers) > BATCH_TOKENS
    for answer, ranked in zip(answers, expected, strict=True):
        assert indices(answer) == [place.index for place in ranked]
        scores = [result["relevance_score"] for result in answer.json()["results"]]
        assert scores == pytest.approx([place.relevance_score for place in ranked], abs=1e-5)
        assert all("document" not in result for result in answer.json()["results"])


def test_top_n_is_the_prefix_of_the_full_ranking(client: httpx.Client) -> None:
    body: dict[str, object] = {"query": "q", "documents": [candidate.text for candidate in make_slate(12).candidates]}

    full = indices(post(client, body))

    assert indices(post(client, body | {"top_n": 3})) == full[:3]
    assert indices(post(client, body | {"top_n": 10**30})) == full


def test_probes_models_and_docs(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/v1/models").json()["data"][0]["max_documents"] == 32
    assert client.get("/docs").status_code == 200
    assert "/v1/rerank" in client.get("/openapi.json").json()["paths"]


AWKWARD_BUT_RANKED = {
    "duplicates": '{"query": "q", "documents": ["same", "same", "same"]}',
    "empty texts": '{"query": "", "documents": ["", "", " "]}',
    "one document": '{"query": "q", "documents": ["a"]}',
    "special tokens": '{"query": "<|end|>", "documents": ["<|start|><|end|>", "a"]}',
    "lone surrogates": '{"query": "\\ud800", "documents": ["\\udfff a", "\\ud83d\\ude00"], "\\ud800": 1}',
    "nul and newline": '{"query": "a\\u0000b", "documents": ["\\u0000", "\\n"]}',
    "huge query": json.dumps({"query": "word " * 100_000, "documents": ["a", "b"]}),
    "huge document": json.dumps({"query": "q", "documents": ["word " * 100_000, "b"]}),
}


@pytest.mark.parametrize("name", AWKWARD_BUT_RANKED)
def test_awkward_text_is_ranked_with_no_index_missing(client: httpx.Client, name: str) -> None:
    body = json.loads(AWKWARD_BUT_RANKED[name]) | {"return_documents": True}

    response = client.post(
        "/v1/rerank", content=json.dumps(body), headers=JSON
    )  # json.dumps writes surrogates as escapes

    assert sorted(indices(response)) == list(range(len(body["documents"])))


REFUSED = {
    "bad JSON": (SECRET, 422),
    "no object": (f'["{SECRET}"]', 422),
    "not UTF-8": (b'{"query": "\xff"}', 400),
    "deep nesting": ("[" * 100_000, 400),
    "no query": ('{"documents": ["a"]}', 422),
    "no documents": ('{"query": "q", "documents": []}', 422),
    "null document": (f'{{"query": "{SECRET}", "documents": [null, {{"title": "{SECRET}"}}]}}', 422),
    "surrogate in a wrong field": ('{"query": ["\\ud800"], "documents": ["a"]}', 422),
    "NaN query": ('{"query": NaN, "documents": ["a"]}', 422),
    "NaN top_n": ('{"query": "q", "documents": ["a"], "top_n": NaN}', 422),
    "zero top_n": ('{"query": "q", "documents": ["a"], "top_n": 0}', 422),
    "top_n as text": (f'{{"query": "q", "documents": ["a"], "top_n": "{SECRET}"}}', 422),
    "too many documents": (json.dumps({"query": SECRET, "documents": [SECRET] * 33}), 422),
    "unknown model": (f'{{"query": "q", "documents": ["a"], "model": "{SECRET}\\ud800"}}', 404),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unfit_request_is_refused_without_an_echo(client: httpx.Client, name: str) -> None:
    body, status = REFUSED[name]

    response = client.post("/v1/rerank", content=body, headers=JSON)

    assert response.status_code == status, response.text
    assert SECRET not in response.text
    assert response.json()["message"]


def test_refusals_name_the_mend(client: httpx.Client) -> None:
    too_many = post(client, {"query": "q", "documents": ["a"] * 33}).json()["message"]
    assert "33 candidates exceed 32" in too_many

    assert "'spd'" in post(client, {"query": "q", "documents": ["a"], "model": "other"}).json()["message"]
    assert client.get("/nowhere").json() == {"code": "http_error", "message": "Not Found"}


def test_scores_that_are_not_finite_answer_500_and_break_nothing(url: str, tiny_artifact: Path, tmp_path: Path) -> None:
    from ray import serve

    folder = tmp_path / "broken"
    shutil.copytree(tiny_artifact, folder)
    tensors = load_file(folder / "head.safetensors")
    save_file(
        {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, folder / "head.safetensors"
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["head.safetensors"] = file_sha256(folder / "head.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    serve.run(build_app({"artifact": str(folder), **QUICK}), name="broken", route_prefix="/broken")

    answers = [httpx.post(f"{url}/broken/v1/rerank", json={"query": "q", "documents": ["a", "b"]}) for _ in range(2)]

    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(500, "broken_scores")] * 2
    assert httpx.get(f"{url}/broken/health").status_code == 200
    assert httpx.get(f"{url}/broken/ready").status_code == 503
    serve.delete("broken")


def test_lost_prefill_replica_is_replaced(client: httpx.Client) -> None:
    body: dict[str, object] = {"query": "q", "documents": [candidate.text for candidate in make_slate(20).candidates]}
    expected = indices(post(client, body))
    stop = time.monotonic() + 4

    def ask_until_stopped(_: int) -> list[httpx.Response]:
        answers = []
        while time.monotonic() < stop:
            answers.append(post(client, body))
        return answers

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_until_stopped, i) for i in range(4)]
        time.sleep(1)
        os.kill(prefill_pid(), signal.SIGKILL)
        answers = [answer for future in asking for answer in future.result()]

    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all(indices(answer) == expected for answer in answers if answer.status_code == 200)
    assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 503)
    wait_for(lambda: client.get("/ready").status_code == 200)
    assert indices(post(client, body)) == expected


def test_logs_hold_nothing_of_a_request(client: httpx.Client, ray_session: Path) -> None:
    post(client, {"query": SECRET, "documents": [SECRET]})
    post(client, {"query": SECRET, "documents": [SECRET] * 33})
    time.sleep(1)

    files = [path for path in (ray_session / "session_latest" / "logs").rglob("*") if path.is_file()]

    assert any("Prefill" in path.name for path in files)
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []


def prefill_pid() -> int:
    import ray
    from ray.util.state import list_actors

    address = ray.get_runtime_context().gcs_address  # another Ray may run on this machine
    filters = [("class_name", "=", "ServeReplica:spd:Prefill"), ("state", "=", "ALIVE")]
    actors = list_actors(address=address, filters=filters)
    assert len(actors) == 1
    return int(actors[0].pid)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.5)
