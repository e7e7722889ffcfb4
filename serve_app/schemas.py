"""Request and response bodies of the endpoint, in the shape that Cohere's rerank clients send and read.

Unknown keys of a request are ignored: such clients send more than this endpoint knows.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field


def replace_surrogates(value: object) -> object:
    """Return text with each lone surrogate as "?": JSON may spell half a character, UTF-8 (the answer) cannot."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def as_document(value: object) -> object:
    """Return a bare string as a document object."""
    return {"text": value} if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(replace_surrogates)]


class Document(BaseModel):
    """One thing to rank."""

    text: Text


class RerankRequest(BaseModel):
    """A query with the documents to rank."""

    model: Text | None = Field(None, description="name of the served model; null takes whichever is served")
    query: Text
    documents: list[Annotated[Document, BeforeValidator(as_document, json_schema_input_type=str | Document)]] = Field(
        min_length=1, description="texts, or objects with a text, in any order"
    )
    top_n: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="places to return, the first of the full ranking; null returns all"
    )
    return_documents: bool = Field(False, description="repeat each document's text in the results")


class RankedResult(BaseModel):
    """One place of the ranking, best first."""

    index: int = Field(description="the document's place in the request, from 0")
    relevance_score: float = Field(description="expected gain in 0..1, never rising along the ranking")
    document: Document | None = None


class Usage(BaseModel):
    """Tokens that went through the model."""

    prompt_tokens: int
    total_tokens: int


class Latency(BaseModel):
    """Where the time went, in milliseconds, as the ingress replica saw it."""

    encode: float = Field(description="tokenising, and the wait for it")
    prefill: float = Field(description="the forward pass, its queue and the hop to it")
    decode: float = Field(description="the assignment, and the wait for it")


class Meta(BaseModel):
    """What answered, and what it had to leave out."""

    model_version: str = Field(description="identity of the artifact's contents")
    num_truncated: int = Field(description="documents that lost tokens")
    query_truncated: bool
    latency_ms: Latency


class RerankResponse(BaseModel):
    """The ranking, best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: Usage
    meta: Meta


class FieldProblem(BaseModel):
    """What is wrong with one field; never its value."""

    field: str
    message: str


class ErrorBody(BaseModel):
    """Body of every answer that is not 2xx; holds nothing of the request's text."""

    code: str
    message: str
    fields: list[FieldProblem] | None = None


class Status(BaseModel):
    """Answer of the probes."""

    status: str


class ServedModel(BaseModel):
    """A model that `/v1/rerank` answers for."""

    id: str
    model_version: str
    max_documents: int = Field(description="most documents in one request")


class ServedModels(BaseModel):
    """The one served model, as a list."""

    data: list[ServedModel]
