"""MovieLens-100K slates: the movie a user liked next, among movies that the user never rated.

Raw folder: `recbole/dataset_example/ml-100k` of the PyPI package recbole 1.2.1 (`pip install --no-deps recbole`);
research use only, so it is read in place and never copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spd.datasets.interactions import (
    Negatives,
    NegativeSampler,
    SlateBuilder,
    check_config,
    distinct_names,
    require_files,
)
from spd.datasets.splits import DataSplits
from spd.errors import DataError
from spd.slate import Candidate, Slate
from spd.teacher import ItemKnn

INTERACTIONS_FILE = "ml-100k.inter"
ITEMS_FILE = "ml-100k.item"
SOURCE = (
    "MovieLens-100K comes inside the PyPI package recbole 1.2.1 (pip install --no-deps recbole==1.2.1), "
    "in its folder recbole/dataset_example/ml-100k"
)
NO_TITLE = frozenset({"", "unknown", "unkonwn"})  # the last is how ml-100k.item spells item 267


@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLensConfig:
    """How the slates are cut."""

    seed: int = 0
    """Decides the users held out, the negatives and the candidates' order."""
    num_candidates: int = 20
    """N of each slate, one liked movie and N-1 never rated."""
    num_history: int = 8
    """How many of the last liked movies make the query and the teacher's input."""
    num_eval_users: int = 320
    """Held-out users, one slate each."""
    slates_per_user: int = 4
    """Slates of a training user, from the most recent liked movies."""
    negatives: Negatives = "uniform"
    """`uniform` over the catalog, or `popular`, in proportion to the training users' likes."""
    min_liked_rating: float = 4.0
    """The lowest rating (1 to 5) that counts as a like."""

    def __post_init__(self) -> None:
        counts = ("num_candidates", "num_history", "num_eval_users", "slates_per_user")
        check_config(self.negatives, {name: getattr(self, name) for name in counts})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rating:
    user_id: str
    item_id: str
    rating: float
    timestamp: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _User:
    """A user's rated items and, in time order, the liked among them."""

    id: str
    number: int
    rated: frozenset[int]
    liked: tuple[int, ...]


def load_movielens(folder: str | Path, config: MovieLensConfig) -> DataSplits:
    """Return slates of training and of held-out users, each with the full item-KNN permutation as teacher.

    The teacher is fitted on the training users' likes alone; for a training user's own slate that user is left out
    again. Raises DataError where a file is missing or malformed.
    """
    root = Path(folder)
    require_files(root, (INTERACTIONS_FILE, ITEMS_FILE), SOURCE)
    ratings = _read_ratings(root / INTERACTIONS_FILE)
    movies = _read_table(root / ITEMS_FILE, ("item_id", "movie_title", "release_year"))
    catalog = _build_catalog(movies, ratings)
    users = _shuffled_users(ratings, {item.id: index for index, item in enumerate(catalog)}, config)
    held_out, train = users[: config.num_eval_users], users[config.num_eval_users :]
    if not train:
        raise DataError(
            f"num_eval_users={config.num_eval_users} leaves none of the {len(users)} users with two likes to train on: "
            f"use {len(users) - 1} or less"
        )
    teacher = ItemKnn.fit([user.liked for user in train], len(catalog))
    builder = SlateBuilder(
        catalog=catalog,
        teacher=teacher,
        sampler=NegativeSampler.build(config.negatives, teacher.popularity),
        num_candidates=config.num_candidates,
        query_prefix="A user liked these movies: ",
    )
    return DataSplits(
        train=[
            _build_slate(user, place, user.liked, builder, config)
            for user in train
            for place in range(max(1, len(user.liked) - config.slates_per_user), len(user.liked))
        ],
        eval=[_build_slate(user, len(user.liked) - 1, (), builder, config) for user in held_out],
    )


def _build_slate(
    user: _User, place: int, own_row: Sequence[int], builder: SlateBuilder, config: MovieLensConfig
) -> Slate:
    """Return the slate whose positive is the user's liked movie at `place`."""
    positive = user.liked[place]
    return builder.build(
        request_id=f"ml-u{user.id}-i{builder.catalog[positive].id}",
        history=user.liked[max(0, place - config.num_history) : place],
        positive=positive,
        seen=user.rated,
        own_row=own_row,
        rng=np.random.default_rng((config.seed, user.number, place)),
    )


def _shuffled_users(ratings: list[_Rating], item_index: dict[str, int], config: MovieLensConfig) -> list[_User]:
    """Return the users with at least two likes, shuffled by the seed; equal timestamps keep the file's order."""
    rated: dict[str, set[int]] = {}
    liked: dict[str, list[int]] = {}
    for row in sorted(ratings, key=lambda row: row.timestamp):
        item = item_index[row.item_id]
        likes = liked.setdefault(row.user_id, [])
        if row.rating >= config.min_liked_rating and item not in likes:
            likes.append(item)
        rated.setdefault(row.user_id, set()).add(item)
    users = [
        _User(id=user_id, number=number, rated=frozenset(rated[user_id]), liked=tuple(liked[user_id]))
        for number, user_id in enumerate(sorted(rated, key=lambda user_id: (len(user_id), user_id)))
        if len(liked[user_id]) >= 2
    ]
    return [users[place] for place in np.random.default_rng(config.seed).permutation(len(users)).tolist()]


def _build_catalog(movies: list[dict[str, str]], ratings: list[_Rating]) -> list[Candidate]:
    """Return every movie listed or rated: titles as in the file, shared ones with their year, then with their id."""
    listed = {row["item_id"]: row for row in movies}
    ids = list(dict.fromkeys([*listed, *(row.item_id for row in ratings)]))
    names, years = [], []
    for item_id in ids:
        row = listed.get(item_id, {"movie_title": "", "release_year": ""})
        title, year = row["movie_title"].strip(), row["release_year"].strip()
        names.append(f"Movie {item_id}" if title.lower() in NO_TITLE else title)
        years.append(year or "year unknown")
    texts = distinct_names(distinct_names(names, years), [f"no. {item_id}" for item_id in ids])
    return [Candidate(item_id, text) for item_id, text in zip(ids, texts, strict=True)]


def _read_ratings(path: Path) -> list[_Rating]:
    """Return the ratings in the file's order; DataError on a rating or timestamp that is no number."""
    ratings = []
    for row in _read_table(path, ("user_id", "item_id", "rating", "timestamp")):
        try:
            rating, timestamp = float(row["rating"]), float(row["timestamp"])
        except ValueError as error:
            raise DataError(f"{path}: user {row['user_id']}, item {row['item_id']}: {error}: mend the row") from error
        ratings.append(_Rating(user_id=row["user_id"], item_id=row["item_id"], rating=rating, timestamp=timestamp))
    return ratings


def _read_table(path: Path, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of a tab-separated file whose header is `name:type`; DataError names file and line."""
    lines = path.read_text(encoding="utf-8").split("\n")
    header = [column.split(":")[0] for column in lines[0].split("\t")]
    missing = [field for field in fields if field not in header]
    if missing:
        raise DataError(f"{path}: column {missing[0]!r} is not in the header {lines[0]!r}: take the file from {SOURCE}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        values = line.split("\t")
        if line and len(values) != len(header):
            raise DataError(f"{path}:{number}: {len(values)} fields for {len(header)} columns: mend or drop the line")
        if line:
            rows.append(dict(zip(header, values, strict=True)))
    return rows
