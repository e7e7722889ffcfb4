"""Teachers as Ray Data actors: Arrow tables of slates in; out, a row a slate that says what became of it.

Each answer is journalled as it comes; permutations that the journal has already are not asked again.
"""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from jobs.label_config import ChatConfig, EndpointConfig, LocalTeacherConfig
from jobs.label_journal import Journal, Label
from spd.answer import Answer, parse_ordinals
from spd.autoregressive import ArRanker
from spd.errors import DataError, SpdError
from spd.slate import Slate, slate_from_row

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

OUTCOME_SCHEMA = pa.schema([("request_id", pa.string()), ("error", pa.string())])

FATAL_STATUS = (401, 403, 404)
"""Statuses that every other request would meet as well: wrong key, no access, no such model or address."""


class TeacherStoppedError(SpdError):
    """The teacher can answer nothing at all; the job stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One thing to ask: a slate whose candidates stand in the order of one permutation.

    order: the slate's own index of each candidate of `slate`.
    """

    slate: Slate
    permutation: int
    order: tuple[int, ...]

    def label(self, answer: Answer, **counts: int) -> Label:
        """Return the answer in the slate's own indices."""
        own = replace(answer, order=tuple(self.order[place] for place in answer.order))
        return Label(request_id=self.slate.request_id, permutation=self.permutation, answer=own, **counts)


def questions(slate: Slate, num_permutations: int, seed: int, done: Mapping[str, frozenset[int]]) -> list[Question]:
    """Return what is still to be asked of a slate: first as it stands, then shuffled by seed and request_id."""
    found = []
    for permutation in range(num_permutations):
        if permutation in done.get(slate.request_id, frozenset()):
            continue
        order = list(range(len(slate.candidates)))
        if permutation:
            key = [seed, permutation, *slate.request_id.encode("utf-8")]
            order = np.random.default_rng(key).permutation(len(order)).tolist()
        found.append(Question(slate=slate.reordered(order), permutation=permutation, order=tuple(order)))
    return found


class Teacher(ABC):
    """Common to all: reading rows, asking what is not answered yet, one outcome a row."""

    def __init__(self, journal: str, num_permutations: int, seed: int, done: Mapping[str, frozenset[int]]) -> None:
        self.journal = Journal(journal)
        self._num_permutations = num_permutations
        self._seed = seed
        self._done = done

    def __call__(self, table: pa.Table) -> pa.Table:
        errors: dict[str, str | None] = {}
        asked: list[Question] = []
        for row in table.to_pylist():
            try:
                slate = slate_from_row(row)
            except DataError as error:
                errors[str(row["request_id"])] = f"DataError: {error}"
                continue
            errors[slate.request_id] = None
            asked += questions(slate, self._num_permutations, self._seed, self._done)
        for question, reason in zip(asked, self.ask(asked), strict=True):
            if reason is not None:
                errors[question.slate.request_id] = reason
        rows = [{"request_id": name, "error": reason} for name, reason in errors.items()]
        return pa.Table.from_pylist(rows, schema=OUTCOME_SCHEMA)

    @abstractmethod
    def ask(self, asked: Sequence[Question]) -> list[str | None]:
        """Journal the answers; returns for each question None, or why it has none."""


class LocalTeacher(Teacher):
    """The autoregressive ranker of an artifact, in this process."""

    def __init__(
        self,
        journal: str,
        num_permutations: int,
        seed: int,
        done: Mapping[str, frozenset[int]],
        artifact: str,
        config: LocalTeacherConfig,
        num_threads: int,
    ) -> None:
        super().__init__(journal, num_permutations, seed, done)
        torch.set_num_threads(num_threads)
        self._config = config
        self._ranker = ArRanker.from_pretrained(Path(artifact), precision=config.precision)

    def ask(self, asked: Sequence[Question]) -> list[str | None]:
        errors: list[str | None] = []
        fitting: list[Question] = []
        for question in asked:
            try:
                self._ranker.encoder.encode_question(question.slate)
            except DataError as error:
                errors.append(f"DataError: {error}")
            else:
                errors.append(None)
                fitting.append(question)
        slates = [question.slate for question in fitting]
        rankings = self._ranker.rank_slates(slates, self._config.decoding, self._config.batch_tokens)
        self.journal.append(
            [q.label(r.answer, num_passes=r.num_passes) for q, r in zip(fitting, rankings, strict=True)]
        )
        return errors


class ChatTeacher(Teacher):
    """A chat model behind an endpoint that speaks OpenAI's API; `concurrency` requests at once."""

    def __init__(
        self,
        journal: str,
        num_permutations: int,
        seed: int,
        done: Mapping[str, frozenset[int]],
        chat: ChatConfig,
        endpoint: EndpointConfig,
        num_workers: int,
    ) -> None:
        super().__init__(journal, num_permutations, seed, done)
        self._chat = chat
        self._endpoint = endpoint
        rate = endpoint.requests_per_minute
        self._interval_s = 0.0 if rate is None else 60.0 / rate * num_workers
        self._next_start_s = 0.0

    def ask(self, asked: Sequence[Question]) -> list[str | None]:
        return asyncio.run(self._ask_all(asked))

    async def _ask_all(self, asked: Sequence[Question]) -> list[str | None]:
        from openai import AsyncOpenAI

        endpoint, gate = self._endpoint, asyncio.Semaphore(self._endpoint.concurrency)
        key = os.environ.get(endpoint.api_key_env)
        if not key:
            raise TeacherStoppedError(f"endpoint.api_key_env={endpoint.api_key_env!r} is not set: export the key there")
        async with AsyncOpenAI(
            base_url=endpoint.base_url, api_key=key, max_retries=endpoint.max_retries, timeout=endpoint.timeout_s
        ) as client:

            async def one(question: Question) -> str | None:
                async with gate:
                    await self._wait_for_turn()
                    return await self._ask_one(client, question)

            tasks = [asyncio.create_task(one(question)) for question in asked]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:  # the first fatal answer stops those that have not begun
                    task.cancel()

    async def _ask_one(self, client: "AsyncOpenAI", question: Question) -> str | None:
        """Ask, journal, return None or why there is no answer; texts stay out of it."""
        from openai import APIStatusError, OpenAIError

        chat = self._chat
        try:
            completion = await client.chat.completions.create(
                model=chat.model,
                messages=chat_messages(question.slate, chat),
                temperature=chat.temperature,
                max_tokens=chat.max_answer_tokens,
            )
        except APIStatusError as error:
            if error.status_code in FATAL_STATUS:
                raise TeacherStoppedError(
                    f"endpoint.base_url={self._endpoint.base_url!r} answered {error.status_code} for model "
                    f"{chat.model!r}: check the key in {self._endpoint.api_key_env}, the address and the model's name"
                ) from None
            return f"{type(error).__name__}: status {error.status_code} after {self._endpoint.max_retries} retries"
        except (OpenAIError, ValueError) as error:  # ValueError: a body that is no JSON
            return f"{type(error).__name__}: no answer after {self._endpoint.max_retries} retries"
        text = completion.choices[0].message.content if completion.choices else None
        usage = completion.usage
        label = question.label(
            parse_ordinals(text or "", len(question.order)),
            num_requests=1,
            input_tokens=usage.prompt_tokens if usage else 0,
            output_tokens=usage.completion_tokens if usage else 0,
        )
        self.journal.append([label])
        return None

    async def _wait_for_turn(self) -> None:
        """Let requests start no faster than the rate limit, evenly spaced."""
        now_s = time.monotonic()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + self._interval_s
        await asyncio.sleep(start_s - now_s)


class JournalTexts:
    """Journals the texts that vLLM generated: column `generated_text` beside the slate's own."""

    def __init__(self, journal: str) -> None:
        self._journal = Journal(journal)

    def __call__(self, table: pa.Table) -> pa.Table:
        slates = [slate_from_row(row) for row in table.to_pylist()]
        texts = table["generated_text"].to_pylist()
        self._journal.append(
            [
                Label(
                    request_id=slate.request_id,
                    permutation=0,
                    answer=parse_ordinals(text or "", len(slate.candidates)),
                    num_requests=1,
                )
                for slate, text in zip(slates, texts, strict=True)
            ]
        )
        return pa.Table.from_pylist([{"request_id": s.request_id} for s in slates], schema=OUTCOME_SCHEMA)


def chat_messages(slate: Slate, chat: ChatConfig) -> "list[ChatCompletionMessageParam]":
    """Return the messages that ask for a slate's order: the query, then each candidate behind its ordinal."""
    lines = [f"[{n}] {c.text[: chat.max_candidate_characters]}" for n, c in enumerate(slate.candidates, start=1)]
    user = f"Query: {slate.query}\n\nCandidates:\n" + "\n".join(lines) + f"\n\n{chat.instruction}"
    return [{"role": "system", "content": chat.system}, {"role": "user", "content": user}]
