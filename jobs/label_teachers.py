"""Teachers as Ray Data actors: Arrow tables of slates in; out, a row a slate that says what became of it.

Each answer is journalled as it comes; permutations that the journal has already are not asked again.
"""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from jobs.label_config import ChatConfig, EndpointConfig, LocalTeacherConfig
from jobs.label_journal import Cost, Journal, Label
from spd.answer import Answer, parse_ordinals
from spd.autoregressive import ArRanker
from spd.errors import DataError
from spd.slate import Ranking, Slate, slate_from_row
from spd.windows import rank_sliding, ranking_of_order

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

OUTCOME_SCHEMA = pa.schema([("request_id", pa.string()), ("error", pa.string()), ("fatal", pa.string())])
"""error: why the slate has no answer, or null. fatal: why no slate can have one, or null; the driver then stops."""

FATAL_STATUS = (401, 403, 404)
"""Statuses that every other request would meet as well: wrong key, no access, no such model or address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One thing to ask: a slate whose candidates stand in the order of one permutation.

    order: the slate's own index of each candidate of `slate`.
    """

    slate: Slate
    permutation: int
    order: tuple[int, ...]

    def label(self, answer: Answer, cost: Cost = Cost()) -> Label:  # noqa: B008 (frozen)
        """Return the answer in the slate's own indices."""
        own = replace(answer, order=tuple(self.order[place] for place in answer.order))
        return Label(request_id=self.slate.request_id, permutation=self.permutation, answer=own, cost=cost)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came back for one question: an answer, or why there is none; and what it took."""

    answer: Answer | None = None
    error: str | None = None
    cost: Cost = Cost()  # noqa: RUF009 (frozen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What every teacher is told: where answers are kept, what is asked, what is answered already."""

    journal: str
    num_permutations: int
    seed: int
    window_size: int
    window_stride: int
    done: Mapping[str, frozenset[int]]


class Teacher(ABC):
    """Common to all: reading rows, asking what is not answered yet (in sliding windows if too large), one row each."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.fatal: str | None = None

    @abstractmethod
    def reply(self, slates: Sequence[Slate], keep: Callable[[int, Reply], None]) -> list[Reply]:
        """Return one reply a slate; calls `keep(index, reply)` for each as it comes. Sets `fatal` if none can come."""

    def __call__(self, table: pa.Table) -> pa.Table:
        errors: dict[str, str | None] = {}
        asked: list[Question] = []
        journal = Journal(self._task.journal, [str(name) for name in table["request_id"].to_pylist()])
        again = {name: frozenset(answers) for name, answers in journal.labels().items()}  # of a worker that died
        for row in table.to_pylist():
            try:
                slate = slate_from_row(row)
            except DataError as error:
                errors[str(row["request_id"])] = f"DataError: {error}"
                continue
            errors[slate.request_id] = None
            asked += questions(slate, self._task.num_permutations, self._task.seed, {**self._task.done, **again})
        for question, reason in self._ask(asked, journal):
            errors[question.slate.request_id] = reason
        rows = [{"request_id": name, "error": reason, "fatal": self.fatal} for name, reason in errors.items()]
        return pa.Table.from_pylist(rows, schema=OUTCOME_SCHEMA)

    def _ask(self, asked: Sequence[Question], journal: Journal) -> list[tuple[Question, str]]:
        """Have the questions answered and journalled; returns those without an answer, and why."""
        small = [question for question in asked if len(question.order) <= self._task.window_size]
        large = [question for question in asked if len(question.order) > self._task.window_size]

        def keep(index: int, reply: Reply) -> None:
            if reply.answer is not None:
                journal.append([small[index].label(reply.answer, reply.cost)])

        replies = self.reply([question.slate for question in small], keep) if small else []
        slid = [self._slide(question, journal) for question in large]
        pairs = [*zip(small, replies, strict=True), *zip(large, slid, strict=True)]
        return [(question, reply.error) for question, reply in pairs if reply.error is not None]

    def _slide(self, question: Question, journal: Journal) -> Reply:
        """Return the whole slate's reply, put together from its windows' and journalled once they are all there."""
        parts: list[Reply] = []

        def rank_windows(windows: Sequence[Slate]) -> list[Ranking]:
            orders = []
            for window in windows:
                failed = any(part.error is not None for part in parts)
                reply = Reply(error="not asked") if failed else self.reply([window], lambda _, __: None)[0]
                parts.append(reply)
                orders.append(reply.answer.order if reply.answer else tuple(range(len(window.candidates))))
            return [ranking_of_order(order) for order in orders]

        size, stride = self._task.window_size, self._task.window_stride
        (found,) = rank_sliding([question.slate], size, stride, rank_windows)
        error = next((part.error for part in parts if part.error is not None), None)
        if error is not None:
            return Reply(error=error)
        answer = _sum_answers(found.ranking.order, parts)
        cost = sum((part.cost for part in parts), Cost())
        journal.append([question.label(answer, cost)])
        return Reply(answer=answer, cost=cost)


class LocalTeacher(Teacher):
    """The autoregressive ranker of an artifact, in this process."""

    def __init__(self, task: Task, artifact: str, config: LocalTeacherConfig, num_threads: int) -> None:
        super().__init__(task)
        torch.set_num_threads(num_threads)
        self._config = config
        self._ranker = ArRanker.from_pretrained(Path(artifact), precision=config.precision)

    def reply(self, slates: Sequence[Slate], keep: Callable[[int, Reply], None]) -> list[Reply]:
        replies: list[Reply] = []
        fitting: list[int] = []
        for index, slate in enumerate(slates):
            try:
                self._ranker.encoder.encode_question(slate)
            except DataError as error:
                replies.append(Reply(error=f"DataError: {error}"))
            else:
                replies.append(Reply())
                fitting.append(index)
        found = self._ranker.rank_slates(
            [slates[index] for index in fitting], self._config.decoding, self._config.batch_tokens
        )
        for index, one in zip(fitting, found, strict=True):
            replies[index] = Reply(answer=one.answer, cost=Cost(num_passes=one.num_passes))
            keep(index, replies[index])
        return replies


class ChatTeacher(Teacher):
    """A chat model behind an endpoint that speaks OpenAI's API; `concurrency` requests at once."""

    def __init__(self, task: Task, chat: ChatConfig, endpoint: EndpointConfig, num_workers: int) -> None:
        super().__init__(task)
        self._chat = chat
        self._endpoint = endpoint
        rate = endpoint.requests_per_minute
        self._interval_s = 0.0 if rate is None else 60.0 / rate * num_workers
        self._next_start_s = 0.0

    def reply(self, slates: Sequence[Slate], keep: Callable[[int, Reply], None]) -> list[Reply]:
        return asyncio.run(self._ask_all(slates, keep))

    async def _ask_all(self, slates: Sequence[Slate], keep: Callable[[int, Reply], None]) -> list[Reply]:
        from openai import AsyncOpenAI

        endpoint, gate = self._endpoint, asyncio.Semaphore(self._endpoint.concurrency)
        key = os.environ.get(endpoint.api_key_env)
        if not key:
            self.fatal = (
                f"the environment variable {endpoint.api_key_env!r} (endpoint.api_key_env) is not set on a worker"
            )
            return [Reply(error=self.fatal)] * len(slates)
        async with AsyncOpenAI(
            base_url=endpoint.base_url, api_key=key, max_retries=endpoint.max_retries, timeout=endpoint.timeout_s
        ) as client:

            async def one(index: int, slate: Slate) -> Reply:
                async with gate:
                    await self._wait_for_turn()
                    reply = Reply(error=self.fatal) if self.fatal else await self._ask_one(client, slate)
                keep(index, reply)
                return reply

            return list(await asyncio.gather(*(one(index, slate) for index, slate in enumerate(slates))))

    async def _ask_one(self, client: "AsyncOpenAI", slate: Slate) -> Reply:
        """Return the answer, or why there is none; texts stay out of it."""
        from openai import APIStatusError, OpenAIError
        from openai.types.chat import ChatCompletion

        chat = self._chat
        try:
            completion = await client.chat.completions.create(
                model=chat.model,
                messages=chat_messages(slate, chat),
                temperature=chat.temperature,
                max_tokens=chat.max_answer_tokens,
            )
        except APIStatusError as error:
            if error.status_code in FATAL_STATUS:
                self.fatal = (
                    f"endpoint.base_url={self._endpoint.base_url!r} answered {error.status_code} for model "
                    f"{chat.model!r}: check the key in {self._endpoint.api_key_env}, the address and the model's name"
                )
            tries = f"after {self._endpoint.max_retries} retries"
            return Reply(error=f"{type(error).__name__}: status {error.status_code} {tries}")
        except (OpenAIError, ValueError) as error:  # ValueError: a body that is no JSON
            return Reply(error=f"{type(error).__name__}: no answer after {self._endpoint.max_retries} retries")
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            return Reply(error="ValueError: the endpoint's answer is no chat completion")
        usage = completion.usage
        return Reply(
            answer=parse_ordinals(completion.choices[0].message.content or "", len(slate.candidates)),
            cost=Cost(
                num_requests=1,
                input_tokens=usage.prompt_tokens if usage else 0,
                output_tokens=usage.completion_tokens if usage else 0,
            ),
        )

    async def _wait_for_turn(self) -> None:
        """Let requests start no faster than the rate limit, evenly spaced."""
        now_s = time.monotonic()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + self._interval_s
        await asyncio.sleep(start_s - now_s)


class JournalTexts:
    """Journals the texts that vLLM generated: column `generated_text` beside the slate's own."""

    def __init__(self, journal: str) -> None:
        self._uri = journal

    def __call__(self, table: pa.Table) -> pa.Table:
        slates = [slate_from_row(row) for row in table.to_pylist()]
        texts = table["generated_text"].to_pylist()
        Journal(self._uri, [slate.request_id for slate in slates]).append(
            [
                Label(
                    request_id=slate.request_id,
                    permutation=0,
                    answer=parse_ordinals(text or "", len(slate.candidates)),
                    cost=Cost(num_requests=1),
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


def _sum_answers(order: tuple[int, ...], parts: Sequence[Reply]) -> Answer:
    """Return the whole slate's answer, with what had to be mended in all of its windows."""
    answers = [part.answer for part in parts if part.answer is not None]
    return Answer(
        order=order,
        num_repeated=sum(answer.num_repeated for answer in answers),
        num_missing=min(len(order) - 1, sum(answer.num_missing for answer in answers)),
        num_out_of_range=sum(answer.num_out_of_range for answer in answers),
    )
