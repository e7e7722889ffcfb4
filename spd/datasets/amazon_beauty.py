"""Amazon Beauty slates (reviews of 2014, 5-core): the product a user bought last, among products never bought.

Raw folder, all public: `sequential_data.txt` and `datamaps.json` (github.com/Wenyueh/LLM-RecSys-ID),
`products_lookup.csv` and `item_id_to_int.json` (github.com/dh-r/LLM-Sequential-Recommendation), and, only for the few
products without a name, `Beauty_item2attributes.json` (github.com/aHuiWang/CIKM2020-S3Rec). Research use.
"""

import csv
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

SEQUENCES_FILE = "sequential_data.txt"
MAPS_FILE = "datamaps.json"
NAMES_FILE = "products_lookup.csv"
NAME_IDS_FILE = "item_id_to_int.json"
ATTRIBUTES_FILE = "Beauty_item2attributes.json"
SOURCE = (
    f"Amazon Beauty comes as {SEQUENCES_FILE} and {MAPS_FILE} from github.com/Wenyueh/LLM-RecSys-ID, and as "
    f"{NAMES_FILE} and {NAME_IDS_FILE} from github.com/dh-r/LLM-Sequential-Recommendation"
)
MIN_ATTRIBUTE_COUNT = 5  # S3Rec numbers, from 1, only the attributes that occur this often


@dataclass(frozen=True, kw_only=True, slots=True)
class AmazonBeautyConfig:
    """How the slates are cut; the defaults are the paper's sizes (arXiv 2609.01807)."""

    seed: int = 0
    """Decides the users held out, the negatives and the candidates' order."""
    num_candidates: int = 50
    """N of each slate, the last product bought and N-1 never bought."""
    num_history: int = 10
    """How many of the products bought before it make the query and the teacher's input."""
    num_eval_users: int = 1118
    """Held-out users; the rest train. One slate a user."""
    num_train_users: int | None = None
    """Make slates of only so many of the rest; None takes all. The teacher is fitted on all either way."""
    negatives: Negatives = "uniform"
    """`uniform` over the catalog, or `popular`, in proportion to purchases."""

    def __post_init__(self) -> None:
        counts = ("num_candidates", "num_history", "num_eval_users")
        limit = {} if self.num_train_users is None else {"num_train_users": self.num_train_users}
        check_config(self.negatives, {name: getattr(self, name) for name in counts} | limit)


def load_amazon_beauty(folder: str | Path, config: AmazonBeautyConfig) -> DataSplits:
    """Return one slate a user, with the full item-KNN permutation as teacher.

    The teacher is fitted on every user's history without its last item, so it never sees a positive.
    Raises DataError where a file is missing or malformed.
    """
    root = Path(folder)
    require_files(root, (SEQUENCES_FILE, MAPS_FILE, NAMES_FILE, NAME_IDS_FILE), SOURCE)
    catalog = load_catalog(root)
    histories = _read_histories(root / SEQUENCES_FILE, len(catalog))
    if len(histories) <= config.num_eval_users:
        raise DataError(
            f"num_eval_users={config.num_eval_users} leaves none of the {len(histories)} users to train on: "
            f"use {len(histories) - 1} or less"
        )
    teacher = ItemKnn.fit([history[:-1] for history in histories.values()], len(catalog))
    builder = SlateBuilder(
        catalog=catalog,
        teacher=teacher,
        sampler=NegativeSampler.build(config.negatives, teacher.popularity),
        num_candidates=config.num_candidates,
        query_prefix="A user bought these beauty products: ",
    )
    order = np.random.default_rng(config.seed).permutation(list(histories)).tolist()
    held_out, train = order[: config.num_eval_users], order[config.num_eval_users :][: config.num_train_users]
    return DataSplits(
        train=[_build_slate(user, histories[user], builder, config) for user in train],
        eval=[_build_slate(user, histories[user], builder, config) for user in held_out],
    )


def load_catalog(folder: Path) -> list[Candidate]:
    """Return every product, item number k at place k-1: its ASIN and its name, no two names alike."""
    asins: dict[str, str] = _read_json(folder / MAPS_FILE, ("id2item",))["id2item"]
    name_ids: dict[str, int] = _read_json(folder / NAME_IDS_FILE)
    names = _read_names(folder / NAMES_FILE)
    numbers = [str(number) for number in range(1, len(asins) + 1)]
    unknown = [number for number in numbers if asins.get(number) not in name_ids]
    if unknown:
        raise DataError(f"{folder / MAPS_FILE}: item {unknown[0]} is not in {NAME_IDS_FILE}: take both from {SOURCE}")
    attributes = _read_attributes(folder)
    ids = [asins[number] for number in numbers]
    texts = [
        names.get(str(name_ids[asin])) or _placeholder(asin, attributes.get(number, []))
        for asin, number in zip(ids, numbers, strict=True)
    ]
    return [Candidate(asin, text) for asin, text in zip(ids, distinct_names(texts, ids), strict=True)]


def _build_slate(user: int, history: tuple[int, ...], builder: SlateBuilder, config: AmazonBeautyConfig) -> Slate:
    """Return the slate whose positive is the user's last product."""
    positive = history[-1]
    return builder.build(
        request_id=f"beauty-u{user}-i{builder.catalog[positive].id}",
        history=history[:-1][-config.num_history :],
        positive=positive,
        seen=history,
        own_row=(),
        rng=np.random.default_rng((config.seed, user)),
    )


def _read_histories(path: Path, num_items: int) -> dict[int, tuple[int, ...]]:
    """Return each user's products, oldest first, as places in the catalog; DataError names file and line."""
    histories = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split()
        if not all(field.isdigit() for field in fields) or len(fields) < 3:
            raise DataError(f"{path}:{number}: {line[:60]!r} must be a user number and at least two item numbers")
        items = tuple(int(field) - 1 for field in fields[1:])
        if not 0 <= min(items) <= max(items) < num_items:
            raise DataError(
                f"{path}:{number}: an item number is outside 1..{num_items} of {MAPS_FILE}: take both files"
            )
        histories[int(fields[0])] = items
    return histories


def _read_attributes(folder: Path) -> dict[str, list[str]]:
    """Return each item number's brands and categories; empty where the optional file is absent."""
    if not (folder / ATTRIBUTES_FILE).is_file():
        return {}
    maps = _read_json(folder / MAPS_FILE, ("attribute2id", "attributeid2num"))
    frequent = [
        _clean(name)
        for name, attribute in maps["attribute2id"].items()
        if maps["attributeid2num"][str(attribute)] >= MIN_ATTRIBUTE_COUNT
    ]
    items: dict[str, list[int]] = _read_json(folder / ATTRIBUTES_FILE)
    return {number: [frequent[k - 1] for k in kept if k <= len(frequent)] for number, kept in items.items()}


def _placeholder(asin: str, attributes: list[str]) -> str:
    return f"Unnamed product: {', '.join(attributes)}" if attributes else f"Unnamed product {asin}"


def _clean(name: str) -> str:
    """Return the name with HTML entities decoded and runs of blanks made one."""
    return " ".join(html.unescape(name).split())


def _read_names(path: Path) -> dict[str, str]:
    """Return the product name of each global_product_id."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = {"global_product_id", "name"} - set(rows.fieldnames or ())
        if missing:
            raise DataError(f"{path}: column {min(missing)!r} is missing: {SOURCE}")
        return {row["global_product_id"]: _clean(row["name"] or "") for row in rows}


def _read_json(path: Path, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the file's JSON object; DataError where it is none, or lacks a key."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}): {SOURCE}") from error
    if not isinstance(value, dict) or not set(keys) <= value.keys():
        raise DataError(f"{path} must be an object with the keys {', '.join(keys) or 'of its items'}: {SOURCE}")
    return value
