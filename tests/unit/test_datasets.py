"""The data set readers on tiny raw files, and on the real ones where they are at hand."""

import gzip
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.evaluate_rows import upstream_order
from spd.datasets.amazon_beauty import AmazonBeautyConfig, load_amazon_beauty, load_catalog
from spd.datasets.files import read_rows, read_slates, write_slates
from spd.datasets.movielens import MovieLensConfig, load_movielens
from spd.datasets.ms_marco import MsMarcoConfig, load_bm25, load_ms_marco
from spd.errors import ConfigError, DataError
from spd.metrics import evaluate_orders
from spd.slate import Candidate, Slate

SHARED_DATA = Path(os.environ.get("SPD_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real data: set SPD_SHARED_DATA")
ITEM_HEADER = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"
RATING_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
TINY_MOVIES = MovieLensConfig(num_candidates=3, num_history=2, num_eval_users=1, slates_per_user=2)
TINY_BEAUTY = AmazonBeautyConfig(num_candidates=3, num_history=2, num_eval_users=1)


def positives(slate: Slate) -> list[str]:
    assert slate.relevance is not None
    return [candidate.id for candidate, label in zip(slate.candidates, slate.relevance, strict=True) if label]


def movielens_folder() -> Path | None:
    """Return the folder in SPD_MOVIELENS, else the one inside an installed recbole, else None."""
    if "SPD_MOVIELENS" in os.environ:
        return Path(os.environ["SPD_MOVIELENS"])
    spec = find_spec("recbole")
    roots = spec.submodule_search_locations if spec else None
    return Path(roots[0]) / "dataset_example" / "ml-100k" if roots else None


def write_movielens(folder: Path, likes: dict[int, list[int]], items: list[str]) -> Path:
    """Write ratings of 5 in the given order, after one of 1 for item 8 by user 1."""
    ratings = [f"{user}\t{item}\t5\t{place}" for user, row in likes.items() for place, item in enumerate(row, 1)]
    lines = [RATING_HEADER, "1\t8\t1\t0", *ratings[::-1]]
    (folder / "ml-100k.inter").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "ml-100k.item").write_text("\n".join([ITEM_HEADER, *items]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def tiny_movielens(tmp_path: Path) -> Path:
    items = [f"{k}\tMovie number {k}\t199{k}\tDrama" for k in range(1, 9)]
    return write_movielens(tmp_path, {1: [1, 2, 3, 4], 2: [2, 3, 5], 3: [3, 1, 6, 7]}, items)


def test_movielens_slates_hold_one_like_among_the_never_rated(tiny_movielens: Path):
    rated = {"1": {"1", "2", "3", "4", "8"}, "2": {"2", "3", "5"}, "3": {"1", "3", "6", "7"}}
    splits = load_movielens(tiny_movielens, TINY_MOVIES)

    for slate in [*splits.train, *splits.eval]:
        user, positive = slate.request_id.removeprefix("ml-u").split("-i")
        assert positives(slate) == [positive]
        assert {c.id for c in slate.candidates} & rated[user] == {positive}
        assert sorted(slate.teacher_ranking or ()) == [0, 1, 2]
    assert len(splits.train) == 4
    assert len(splits.eval) == 1


def test_movielens_query_is_the_last_likes_before_the_positive(tiny_movielens: Path):
    splits = load_movielens(tiny_movielens, TINY_MOVIES)
    queries = {slate.request_id: slate.query for slate in [*splits.train, *splits.eval]}

    assert queries.get("ml-u1-i4") == "A user liked these movies: Movie number 2; Movie number 3"
    assert queries.get("ml-u2-i5") == "A user liked these movies: Movie number 2; Movie number 3"


def test_movielens_splits_by_user_and_repeats_by_seed(tiny_movielens: Path):
    first = load_movielens(tiny_movielens, TINY_MOVIES)
    other = load_movielens(
        tiny_movielens, MovieLensConfig(seed=1, num_candidates=3, num_history=2, num_eval_users=1, slates_per_user=2)
    )

    users = [{slate.request_id.split("-")[1] for slate in part} for part in (first.train, first.eval)]
    assert not users[0] & users[1]
    assert first == load_movielens(tiny_movielens, TINY_MOVIES)
    assert first != other


def test_movielens_teacher_does_not_see_the_positive(tmp_path: Path):
    # nobody else likes a user's two movies, so only a leak could rank the positive (1 of 5) above
    # the two that another training user likes
    folder = write_movielens(tmp_path, {1: [1, 2], 2: [3, 4], 3: [5, 6]}, [f"{k}\tM{k}\t1990\t" for k in range(1, 7)])
    config = MovieLensConfig(num_candidates=5, num_eval_users=1)

    for slate in load_movielens(folder, config).train:
        assert slate.relevance is not None and slate.teacher_ranking is not None
        assert slate.teacher_ranking.index(slate.relevance.index(1.0)) >= 2


def test_movielens_titles_are_told_apart(tmp_path: Path):
    items = ["1\tSabrina\t1954\t", "2\tSabrina\t1995\t", "3\tChasing Amy\t1997\t", "4\tChasing Amy\t1997\t"]
    items += ["5\tunkonwn\tunkonwn\t", "6\t\t\t", "7\tMisérables, Les\t1995\t"]
    folder = write_movielens(tmp_path, {1: [1, 2], 2: [3, 4]}, items)

    slate = load_movielens(folder, MovieLensConfig(num_candidates=6, num_eval_users=1, negatives="uniform")).eval[0]

    texts = {c.id: c.text for c in slate.candidates} | {"8": "Movie 8"}
    expected = {
        "1": "Sabrina (1954)",
        "2": "Sabrina (1995)",
        "3": "Chasing Amy (1997) (no. 3)",
        "4": "Chasing Amy (1997) (no. 4)",
        "5": "Movie 5",
        "6": "Movie 6",
        "7": "Misérables, Les",
        "8": "Movie 8",
    }
    assert texts.items() <= expected.items()


def test_popular_negatives_are_movies_that_somebody_likes(tmp_path: Path):
    folder = write_movielens(tmp_path, {1: [1, 2], 2: [3, 4], 3: [5, 6]}, [f"{k}\tM{k}\t1990\t" for k in range(1, 40)])

    slates = load_movielens(folder, MovieLensConfig(num_candidates=3, num_eval_users=1, negatives="popular"))

    assert {c.id for slate in slates.train for c in slate.candidates} <= {"1", "2", "3", "4", "5", "6"}


def test_movielens_refuses_more_candidates_than_there_are(tiny_movielens: Path):
    with pytest.raises(DataError, match="num_candidates=8 needs 7 negatives"):
        load_movielens(tiny_movielens, MovieLensConfig(num_candidates=8, num_eval_users=1))


def test_movielens_refuses_to_hold_out_everybody(tiny_movielens: Path):
    with pytest.raises(DataError, match="num_eval_users=3 leaves none of the 3 users"):
        load_movielens(tiny_movielens, MovieLensConfig(num_candidates=3, num_eval_users=3))


def test_movielens_names_file_and_line_of_a_short_row(tiny_movielens: Path):
    with (tiny_movielens / "ml-100k.inter").open("a", encoding="utf-8") as file:
        file.write("1\t2\n")

    with pytest.raises(DataError, match=r"ml-100k\.inter:14: 2 fields for 4 columns"):
        load_movielens(tiny_movielens, TINY_MOVIES)


def test_a_config_names_every_problem():
    with pytest.raises(ConfigError, match="num_candidates=1 must be at least 2; num_history=0 must be at least 1"):
        MovieLensConfig(num_candidates=1, num_history=0)
    with pytest.raises(ConfigError, match="negatives='hard' must be one of uniform, popular"):
        AmazonBeautyConfig(negatives="hard")


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda folder: load_movielens(folder, MovieLensConfig()), r"ml-100k\.inter.* not found: .*recbole"),
        (lambda folder: load_amazon_beauty(folder, AmazonBeautyConfig()), "sequential_data.* not found: .*LLM-RecSys"),
        (lambda folder: load_ms_marco(folder, MsMarcoConfig()), "dl19_teacher.* not found: .*rank_llm"),
        (lambda folder: load_bm25(folder / "dl19_bm25_top100.jsonl.gz"), "dl19_bm25.* not found: .*rank_llm"),
    ],
)
def test_a_missing_raw_file_says_where_it_comes_from(tmp_path: Path, load, message: str):
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.fixture
def tiny_beauty(tmp_path: Path) -> Path:
    asins = ["A1", "A2", "A3", "A4", "A5", "A6"]
    names = ["Cr&egrave;me", '"Comb, small"', "", "Soap", "Soap", ""]
    lines = [f"{k},{9 - k},{name}" for k, name in enumerate(names)]
    files = {
        "sequential_data.txt": "1 1 2 3\n2 2 3 4\n3 1 4 5 6\n",
        "products_lookup.csv": "\n".join([",global_product_id,name", *lines]) + "\n",
        "item_id_to_int.json": json.dumps({asin: 9 - k for k, asin in enumerate(asins)}),
        "datamaps.json": json.dumps(
            {
                "id2item": {str(k): asin for k, asin in enumerate(asins, 1)},
                "attribute2id": {"Rare": 1, "Hair &amp; Care": 2, "Combs": 3},
                "attributeid2num": {"1": 4, "2": 5, "3": 60},
            }
        ),
        "Beauty_item2attributes.json": json.dumps({"3": [1, 2]}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_beauty_names_are_decoded_and_gaps_filled(tiny_beauty: Path):
    assert load_catalog(tiny_beauty) == [
        Candidate("A1", "Crème"),
        Candidate("A2", "Comb, small"),
        Candidate("A3", "Unnamed product: Hair & Care, Combs"),
        Candidate("A4", "Soap (A4)"),
        Candidate("A5", "Soap (A5)"),
        Candidate("A6", "Unnamed product A6"),
    ]


def test_beauty_names_need_no_attributes_file(tiny_beauty: Path):
    (tiny_beauty / "Beauty_item2attributes.json").unlink()

    assert load_catalog(tiny_beauty)[2] == Candidate("A3", "Unnamed product A3")


def test_beauty_has_one_slate_a_user_with_the_last_item_as_positive(tiny_beauty: Path):
    splits = load_amazon_beauty(tiny_beauty, TINY_BEAUTY)
    slates = {slate.request_id: slate for slate in [*splits.eval, *splits.train]}

    assert (len(splits.train), len(splits.eval)) == (2, 1)
    assert set(slates) == {"beauty-u1-iA3", "beauty-u2-iA4", "beauty-u3-iA6"}
    assert slates["beauty-u3-iA6"].query == "A user bought these beauty products: Soap (A4); Soap (A5)"
    assert positives(slates["beauty-u1-iA3"]) == ["A3"]
    assert {c.id for c in slates["beauty-u1-iA3"].candidates} <= {"A3", "A4", "A5", "A6"}
    assert splits == load_amazon_beauty(tiny_beauty, TINY_BEAUTY)


def test_beauty_names_the_line_of_an_unknown_item(tiny_beauty: Path):
    (tiny_beauty / "sequential_data.txt").write_text("1 1 2\n2 1 7\n", encoding="utf-8")

    with pytest.raises(DataError, match=r"sequential_data\.txt:2: an item number is outside 1\.\.6"):
        load_amazon_beauty(tiny_beauty, TINY_BEAUTY)


def window(request_id: str, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "request_id": request_id,
        "query": "q",
        "retriever": "BM25",
        "candidates": [{"id": "a", "text": "A"}, {"id": None, "text": "B"}, {"id": "c", "text": "C"}],
        "teacher_ranking": [2, 0, 1],
        "teacher_valid": True,
        "judgements": [1, None, 3],
    }
    return {**row, **changes}


def write_windows(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    with gzip.open(folder / name, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def tiny_marco(tmp_path: Path) -> Path:
    rows = [window(f"dl19-bm25-{k}-w0") for k in range(8)]
    invalid = window("dl20-bm25-1-w0", teacher_ranking=[2, 2, 1], teacher_valid=False)
    write_windows(tmp_path, "dl19_teacher_windows.jsonl.gz", rows)
    write_windows(
        tmp_path,
        "dl20_teacher_windows.jsonl.gz",
        [invalid, window("dl20-bm25-1-w8"), window("dl20-splade-1-w8", retriever="SPLADE")],
    )
    return tmp_path


def test_marco_shuffle_carries_labels_and_teacher_along(tiny_marco: Path):
    slates = load_ms_marco(tiny_marco, MsMarcoConfig()).train

    for slate in slates:
        assert slate.relevance is not None and slate.teacher_ranking is not None
        ids = [c.id for c in slate.candidates]
        assert dict(zip(ids, slate.relevance, strict=True)) == {"a": 1.0, "none-1": None, "c": 3.0}
        assert [ids[place] for place in slate.teacher_ranking] == ["c", "a", "none-1"]
    assert len({tuple(c.id for c in slate.candidates) for slate in slates}) > 1


def test_marco_invalid_teacher_output_is_dropped_and_counted(tiny_marco: Path):
    splits = load_ms_marco(tiny_marco, MsMarcoConfig())

    assert splits.eval[0].teacher_ranking is None
    assert splits.num_without_teacher == 1


def test_marco_evaluates_chosen_windows_the_same_way(tiny_marco: Path):
    everything = load_ms_marco(tiny_marco, MsMarcoConfig()).eval
    chosen = load_ms_marco(tiny_marco, MsMarcoConfig(eval_retriever="BM25", eval_window=8)).eval

    assert chosen == [everything[1]]
    with pytest.raises(DataError, match="eval_window=9 keeps no window"):
        load_ms_marco(tiny_marco, MsMarcoConfig(eval_window=9))


def write_bm25(folder: Path, queries: int = 1) -> None:
    """Write BM25's passages of the eval queries q0, q1, ... (and of `tiny_marco`'s q), best first, with scores."""
    items = [{"id": letter, "text": letter.upper(), "score": 9.5 - place} for place, letter in enumerate("abc")]
    row = {"candidates": items, "judgements": [0, None, 3]}
    rows = [{**row, "request_id": f"dl20-{k}", "query": f"q{k}" if k else "q"} for k in range(queries)]
    write_windows(folder, "dl20_bm25_top100.jsonl.gz", rows)


def test_marco_windows_of_bm25_get_its_scores(tiny_marco: Path):
    write_bm25(tiny_marco)
    slates = {slate.request_id: slate for slate in load_ms_marco(tiny_marco, MsMarcoConfig()).eval}

    slate = slates["dl20-bm25-1-w8"]
    assert slate.score is not None
    scores = dict(zip([c.id for c in slate.candidates], slate.score, strict=True))
    assert scores == {"a": 9.5, "none-1": None, "c": 7.5}
    assert slates["dl20-splade-1-w8"].score is None


def test_marco_evaluates_on_bm25s_order(tiny_marco: Path):
    write_bm25(tiny_marco, queries=6)
    kept = load_ms_marco(tiny_marco, MsMarcoConfig(eval_source="bm25_top100", shuffle_eval=False)).eval
    shuffled = load_ms_marco(tiny_marco, MsMarcoConfig(eval_source="bm25_top20")).eval

    assert [slate.score for slate in kept] == [(9.5, 8.5, 7.5)] * 6
    assert len({slate.score for slate in shuffled}) > 1
    by_score = [slate.reordered(sorted(range(3), key=lambda i: -(slate.score or ())[i])) for slate in shuffled]
    assert by_score == kept


def marco_queries(count: int) -> list[dict[str, object]]:
    names = [(query, retriever, k) for query in range(count) for retriever in ("BM25", "SPLADE") for k in range(3)]
    return [window(f"dl19-{q}-{r}-w{k}", query=f"q{q}", retriever=r) for q, r, k in names]


def test_marco_training_choices_are_nested(tiny_marco: Path):
    write_windows(tiny_marco, "dl19_teacher_windows.jsonl.gz", marco_queries(8))

    def chosen(**changes: object) -> list[str]:
        config = MsMarcoConfig(**changes)  # type: ignore[arg-type]
        return [slate.request_id for slate in load_ms_marco(tiny_marco, config).train]

    few, more = chosen(num_train_queries=2, train_windows_per_query=2), chosen(num_train_queries=5)
    assert (len(few), len(more), len(chosen())) == (4, 30, 48)
    assert set(few) < set(more) < set(chosen()) and few == sorted(few)
    assert few == chosen(num_train_queries=2, train_windows_per_query=2)
    assert {name.split("-")[2] for name in chosen(train_retriever="SPLADE")} == {"SPLADE"}
    assert len({tuple(chosen(num_train_queries=2, seed=seed)) for seed in range(9)}) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_train_queries": 2}, "2 exceeds the 1 queries"),
        ({"train_windows_per_query": 9}, "9 exceeds the 8 windows of 'q'"),
        ({"train_retriever": "X"}, "train_retriever='X' keeps no window"),
        ({"eval_source": "bm25_top20"}, r"dl20_bm25_top100\.jsonl\.gz not found"),
    ],
)
def test_marco_names_what_it_cannot_choose(tiny_marco: Path, changes: dict[str, object], message: str):
    with pytest.raises(DataError, match=message):
        load_ms_marco(tiny_marco, MsMarcoConfig(**changes))  # type: ignore[arg-type]


def test_marco_rules():
    config = MsMarcoConfig(num_train_queries=0, shuffle_eval=False)
    other = MsMarcoConfig(eval_source="bm25_top20", eval_window=8)

    assert ["num_train_queries=0" in config.problems()[0], "shows the teacher" in config.problems()[1]] == [True, True]
    assert "leave them null" in other.problems()[0]


def test_bm25_keeps_its_order(tmp_path: Path):
    row = window("dl19-1")
    del row["teacher_ranking"], row["teacher_valid"], row["retriever"]
    write_windows(tmp_path, "dl19_bm25_top100.jsonl.gz", [row])

    (slate,) = load_bm25(tmp_path / "dl19_bm25_top100.jsonl.gz")

    assert [c.id for c in slate.candidates] == ["a", "none-1", "c"]
    assert slate.relevance == (1.0, None, 3.0)
    assert slate.teacher_ranking is None


def make_slates(count: int) -> list[Slate]:
    candidates = (Candidate("x", "first"), Candidate("y", "second"))
    return [
        Slate(request_id=f"r{k}", query="q", candidates=candidates, relevance=(1.0, None), teacher_ranking=(1, 0))
        for k in range(count)
    ]


def test_slates_survive_writing_and_reading(tmp_path: Path):
    folder = tmp_path / "new" / "slates"

    count = write_slates(make_slates(5), folder, rows_per_file=2)

    assert count == 5
    assert sorted(p.name for p in folder.iterdir()) == [f"part-0000{k}.parquet" for k in range(3)]
    assert [p.name for p in folder.parent.iterdir()] == ["slates"]
    assert list(read_slates(folder)) == make_slates(5)
    assert list(read_slates(folder / "part-00002.parquet")) == make_slates(5)[4:]
    assert list(read_slates(folder.as_uri())) == make_slates(5)


def test_no_slates_make_a_readable_folder(tmp_path: Path):
    assert write_slates([], tmp_path / "none") == 0
    assert list(read_slates(tmp_path / "none")) == []


def test_a_full_folder_is_kept_unless_overwriting(tmp_path: Path):
    write_slates(make_slates(4), tmp_path / "s", rows_per_file=1)

    with pytest.raises(DataError, match="is not empty: choose another folder"):
        write_slates(make_slates(1), tmp_path / "s")
    write_slates(make_slates(1), tmp_path / "s", overwrite=True)

    assert list(read_slates(tmp_path / "s")) == make_slates(1)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_overwriting_spares_other_files(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(DataError, match=r"holds 'notes\.txt'"):
        write_slates(make_slates(1), tmp_path, overwrite=True)


def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path: Path):
    def failing():
        yield from make_slates(3)
        raise DataError("broken source")

    write_slates(make_slates(2), tmp_path / "s")
    for name in ("s", "fresh"):
        with pytest.raises(DataError, match="broken source"):
            write_slates(failing(), tmp_path / name, rows_per_file=1, overwrite=True)

    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert list(read_slates(tmp_path / "s")) == make_slates(2)


def test_slates_go_through_an_fsspec_store():
    pytest.importorskip("fsspec")
    uri = "memory://bucket/slates"

    write_slates(make_slates(3), uri, rows_per_file=2)
    with pytest.raises(DataError, match="not empty"):
        write_slates(make_slates(1), uri)
    write_slates(make_slates(1), uri, overwrite=True)

    assert list(read_slates(uri)) == make_slates(1)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_are_read_plain_or_gzipped(tmp_path: Path, suffix: str):
    path = tmp_path / f"slates{suffix}"
    row = {"request_id": "a", "query": "é", "candidates": [{"id": "x", "text": "t"}]}
    data = (json.dumps(row, ensure_ascii=False) + "\n\n").encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)

    assert list(read_slates(path)) == [Slate(request_id="a", query="é", candidates=(Candidate("x", "t"),))]


def test_read_rows_lets_bad_rows_through(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"request_id": "a", "candidates": []}\n{"request_id": "b"}\n')

    assert list(read_rows(path)) == [{"request_id": "a", "candidates": []}, {"request_id": "b"}]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: column 'query' is missing"):
        list(read_slates(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"{", "not valid JSON"), (b"3", "'3' is no JSON object"), (b'{"query": "\xff"}', "not valid JSON")],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str):
    (tmp_path / "rows.jsonl").write_bytes(b"{}\n" + line + b"\n")

    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {message}"):
        list(read_rows(tmp_path))


def test_a_parquet_file_without_a_column_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"request_id": ["a"], "query": ["q"]}), tmp_path / "x.parquet")

    with pytest.raises(DataError, match=r"x\.parquet:1: column 'candidates' is missing"):
        list(read_slates(tmp_path))


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.gz"])
def test_a_broken_file_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"no such format")

    with pytest.raises(DataError, match=rf"{name} can't be read"):
        list(read_rows(tmp_path))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("nope://bucket/x", "uri='nope://bucket/x' can't be opened .* use a local path"),
        ("missing-folder", "uri='missing-folder' does not exist"),
    ],
)
def test_a_wrong_uri_is_one_line_with_the_mend(uri: str, message: str):
    with pytest.raises(DataError, match=message) as error:
        list(read_slates(uri))

    assert "\n" not in str(error.value)


def test_a_folder_without_slates_is_refused(tmp_path: Path):
    (tmp_path / "_hidden.parquet").write_bytes(b"")

    with pytest.raises(DataError, match="holds no slate file"):
        list(read_slates(tmp_path))


@needs_shared_data
@pytest.mark.slow
def test_real_beauty_has_the_papers_sizes():
    splits = load_amazon_beauty(SHARED_DATA / "amazon-beauty", AmazonBeautyConfig())

    assert (len(splits.train), len(splits.eval)) == (21_245, 1_118)
    assert {len(slate.candidates) for slate in splits.train} == {50}


@needs_shared_data
def test_real_beauty_teacher_is_worth_learning():
    splits = load_amazon_beauty(SHARED_DATA / "amazon-beauty", AmazonBeautyConfig(num_train_users=10))
    orders = [slate.teacher_ranking or () for slate in splits.eval]

    assert (len(splits.train), len(splits.eval)) == (10, 1_118)
    value = evaluate_orders(splits.eval, orders, seed=0, num_resamples=1)["auc"].value
    assert value is not None and 0.69 < value < 0.77


@needs_shared_data
def test_real_beauty_names_cover_every_item():
    catalog = load_catalog(SHARED_DATA / "amazon-beauty")

    assert len(catalog) == len({c.text for c in catalog}) == 12_101
    assert sum(c.text.startswith("Unnamed product: ") for c in catalog) == 7
    assert not any("&egrave;" in c.text or not c.text for c in catalog)


@needs_shared_data
def test_real_marco_has_its_windows():
    splits = load_ms_marco(SHARED_DATA / "ms-marco-dl", MsMarcoConfig())

    assert (len(splits.train), len(splits.eval), splits.num_without_teacher) == (1_935, 2_430, 3)
    assert {len(slate.candidates) for slate in splits.eval} == {20}


@needs_shared_data
def test_real_marco_windows_of_bm25_have_scores():
    splits = load_ms_marco(SHARED_DATA / "ms-marco-dl", MsMarcoConfig())
    scored = [slate.score for slate in splits.eval if slate.score is not None]

    assert len(scored) == 486 and {slate.request_id[5:10] for slate in splits.eval if slate.score} == {"bm25-"}
    assert sum(value is None for scores in scored for value in scores) == 4  # passages without an id


@needs_shared_data
@pytest.mark.parametrize(("source", "ndcg"), [("bm25_top100", 0.552), ("bm25_top20", 0.667)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_real_bm25_scores_order_the_passages_as_documented(source: str, ndcg: float, shuffle: bool):
    config = MsMarcoConfig(eval_source=source, shuffle_eval=shuffle)  # type: ignore[arg-type]
    slates = load_ms_marco(SHARED_DATA / "ms-marco-dl", config).eval

    result = evaluate_orders(slates, [upstream_order(slate) for slate in slates], seed=0, num_resamples=1)["ndcg@10"]

    assert (result.value, result.n) == (pytest.approx(ndcg, abs=5e-4), 54)


@needs_shared_data
@pytest.mark.parametrize(
    ("year", "queries", "top", "ndcg"),
    [("dl19", 43, 100, 0.546), ("dl20", 54, 100, 0.552), ("dl19", 43, 20, 0.656), ("dl20", 54, 20, 0.667)],
)
def test_real_bm25_order_scores_as_documented(year: str, queries: int, top: int, ndcg: float):
    whole = load_bm25(SHARED_DATA / "ms-marco-dl" / f"{year}_bm25_top100.jsonl.gz")
    slates = [slate.reordered(range(top)) for slate in whole]
    orders = [upstream_order(slate) for slate in slates]

    result = evaluate_orders(slates, orders, seed=0, num_resamples=1)["ndcg@10"]

    assert orders == [list(range(top))] * queries
    assert (result.value, result.n) == (pytest.approx(ndcg, abs=5e-4), queries)


def test_real_movielens_teacher_ranks_well():
    folder = movielens_folder()
    if folder is None or not folder.is_dir():
        pytest.skip("no MovieLens-100K: install recbole --no-deps, or set SPD_MOVIELENS")
    splits = load_movielens(folder, MovieLensConfig(slates_per_user=1))
    orders = [slate.teacher_ranking or () for slate in splits.eval]

    assert (len(splits.train), len(splits.eval)) == (622, 320)
    value = evaluate_orders(splits.eval, orders, seed=0, num_resamples=1)["auc"].value
    assert value is not None and value > 0.82
