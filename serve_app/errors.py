"""One table from error class to HTTP answer. No answer repeats the request's text: it would land in clients' logs."""

import logging
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.exceptions import HTTPException

from serve_app.schemas import ErrorBody, FieldProblem
from spd.errors import DataError, SpdError

logger = logging.getLogger("ray.serve")

RETRY_AFTER_S = 1
MAX_FIELD_PROBLEMS = 10


class UnknownModelError(SpdError):
    """A request for a model that is not served here."""


class BrokenScoresError(SpdError):
    """A score matrix with NaN or infinity: the model's fault, not the request's."""


class VersionMismatchError(SpdError):
    """An ingress and a prefill replica of different artifacts met, as they may during a rolling update."""


class NotReadyError(SpdError):
    """The readiness probe's ranking failed."""


RETRIED: tuple[type[Exception], ...] = (RayActorError, ReplicaUnavailableError, VersionMismatchError)
"""Errors of one prefill replica; another, or the same one restarted, may answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP answer to an error class. message None gives the error's own, which then must hold no request text."""

    status: int
    code: str
    message: str | None = None


UNAVAILABLE = Answer(503, "unavailable", "no prefill replica could answer: try again shortly")

ANSWERS: dict[type[Exception], Answer] = {
    DataError: Answer(422, "unrankable"),
    UnknownModelError: Answer(404, "unknown_model"),
    BrokenScoresError: Answer(500, "broken_scores"),
    NotReadyError: Answer(503, "not_ready"),
    BackPressureError: Answer(503, "overloaded", "too many requests are waiting: try again shortly"),
    RayActorError: UNAVAILABLE,
    ReplicaUnavailableError: UNAVAILABLE,
    DeploymentUnavailableError: UNAVAILABLE,
    VersionMismatchError: UNAVAILABLE,
    TimeoutError: UNAVAILABLE,
    Exception: Answer(500, "internal", "the request failed inside the service: its log has the reason"),
}


def add_error_handlers(api: FastAPI) -> None:
    """Give the API one handler for every class of `ANSWERS`, and its own for FastAPI's refusals."""
    for error_class in ANSWERS:
        api.add_exception_handler(error_class, answer_error)
    api.add_exception_handler(RequestValidationError, answer_invalid)
    api.add_exception_handler(HTTPException, answer_http)


def find_answer(error: Exception) -> Answer:
    """Return the row of the error's nearest class, with the message filled in."""
    cause = error.cause if isinstance(error, RayTaskError) else error  # its own text is the replica's traceback
    row = next(ANSWERS[known] for known in type(cause).__mro__ if known in ANSWERS)
    return Answer(row.status, row.code, row.message or str(cause))


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer by the table; what is the service's fault leaves one line in its log."""
    answer = find_answer(error)
    if answer.status >= 500:
        logger.warning("%s %s: %s", answer.status, answer.code, answer.message)
    return _respond(answer.status, ErrorBody(code=answer.code, message=answer.message or answer.code))


async def answer_invalid(request: Request, error: Exception) -> Response:
    """Answer 422 with field paths and rules; FastAPI's own handler would echo the values."""
    assert isinstance(error, RequestValidationError)
    problems = [
        FieldProblem(field=".".join(str(part) for part in details["loc"]), message=details["msg"])
        for details in error.errors()[:MAX_FIELD_PROBLEMS]
    ]
    message = "; ".join(f"{problem.field}: {problem.message}" for problem in problems)
    return _respond(422, ErrorBody(code="invalid_request", message=message, fields=problems))


async def answer_http(request: Request, error: Exception) -> Response:
    """Answer an unknown path, a wrong method or an unreadable body in the same shape as every other error."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return _respond(error.status_code, ErrorBody(code="http_error", message=str(error.detail)), headers)


def _respond(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> Response:
    retry = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    return JSONResponse(body.model_dump(exclude_none=True), status, {**(headers or {}), **retry})
