"""Two stages find what scoring everything finds, and say how they came to it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import counterfoil as cf
from counterfoil.core.errors import ArgumentError, ConfigError, DataError
from counterfoil.core.progress import Silent
from counterfoil.encoders import Encoded
from counterfoil.scoring.encode import encode_texts, score_split
from counterfoil.search import SearchIndex
from counterfoil.search.first_stage import (
    features,
    fit_first_stage,
    fragment_vectors,
    pooled_vectors,
    solve,
)
from counterfoil.search.query import text_query
from counterfoil.search.vectors import TopK
from tests.search.conftest import NAMES, SMALL, with_captions

QUERY = "a dog and a ball near the tree"


@pytest.mark.parametrize("name", NAMES)
def test_a_text_finds_the_images_that_the_matcher_scores_highest(
    name, indexes, models, concepts
) -> None:
    split = concepts.test
    fragments = [split.fragments.read(i) for i in range(len(split))]
    truth = models[name].score(fragments, [QUERY])[:, 0]
    order = truth.argsort(descending=True)[:5].tolist()
    for options in ({"exhaustive": True}, {"shortlist_size": 32}):
        result = indexes[name].search(QUERY, k=5, **options)
        assert [hit.id for hit in result.hits] == [split.ids[i] for i in order]
        assert [hit.score for hit in result.hits] == pytest.approx(truth[order].tolist(), abs=1e-5)
        assert [hit.rank for hit in result.hits] == [1, 2, 3, 4, 5]
        assert result.hits[0].captions == list(split.captions[order[0]])


@pytest.mark.parametrize("name", NAMES)
def test_an_image_finds_captions(name, indexes, models, concepts) -> None:
    split = concepts.test
    truth = score_split(models[name], split).scores[7]
    best = truth.topk(4).values.tolist()
    result = indexes[name].search(image="test-7", k=4, shortlist_size=64)
    assert [hit.score for hit in result.hits] == pytest.approx(best, abs=1e-5)
    assert all(
        split.captions[split.ids.index(h.image)][int(h.id[-1])] == h.text for h in result.hits
    )
    assert result.target == "captions"


def test_both_stages_say_where_they_put_a_result(indexes) -> None:
    result = indexes["naaf"].search(QUERY, k=8, shortlist_size=16)
    assert result.shortlist == 16
    assert {hit.first_rank for hit in result.hits} <= set(range(1, 17))
    by_first = sorted(result.hits, key=lambda hit: hit.first_rank)
    firsts = [hit.first_score for hit in by_first]
    assert firsts == sorted(firsts, reverse=True)
    assert [h.first_rank for h in result.hits] != sorted(h.first_rank for h in result.hits)
    assert set(result.seconds) == {"encoding", "first stage", "second stage"}
    everything = indexes["naaf"].search(QUERY, exhaustive=True)
    assert everything.hits[0].first_rank is None
    assert everything.shortlist == 32


def test_of_whole_vectors_the_first_stage_is_the_score(indexes) -> None:
    for hit in indexes["vse-fc"].search(QUERY, k=32).hits:
        assert hit.rank == hit.first_rank
        assert hit.score == pytest.approx(hit.first_score, abs=1e-5)


def test_the_same_side_is_ranked_by_cosine(indexes, concepts) -> None:
    text = concepts.test.texts[5]
    result = indexes["naaf"].search(text, target="captions", k=3)
    assert result.hits[0].text == text
    assert result.hits[0].score == pytest.approx(1.0, abs=1e-5)
    alike = indexes["chan"].search(image="test-9", target="images", k=2)
    assert alike.hits[0].id == "test-9"


def test_fragments_may_be_the_first_stage(models, concepts, tmp_path) -> None:
    index = SearchIndex.build(
        tmp_path / "index", models["naaf"], concepts.test, first_stage="maxsim", dtype="float32"
    )
    result = index.search(QUERY, k=3, shortlist_size=3)
    text = index.model.text
    batch = encode_texts(index.model, [QUERY]).fragments[0]
    words = torch.nn.functional.normalize(batch, dim=-1)
    assert len(words) == len(text.encode(QUERY))
    best = []
    for key in index.items["images"].table.live_ids:
        regions = index.items["images"].encoded(np.array([key])).fragments[0]
        sims = words @ torch.nn.functional.normalize(regions, dim=-1).T
        best.append(float(sims.max(1).values.sum()))
    top = sorted(best, reverse=True)[:3]
    assert sorted((h.first_score for h in result.hits), reverse=True) == pytest.approx(
        top, abs=1e-4
    )
    with pytest.raises(DataError, match="no fragments for a first stage 'maxsim'"):
        SearchIndex.build(tmp_path / "other", models["vse-fc"], first_stage="maxsim")


def test_padding_does_not_change_what_the_first_stage_compares(models) -> None:
    torch.manual_seed(0)
    fragments, mask = torch.randn(3, 5, 24), torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:], mask[2] = False, False
    encoded = Encoded(fragments * mask[..., None], mask)
    for form in (pooled_vectors, fragment_vectors):
        short = form(models["naaf"], encoded)
        long = form(models["naaf"], encoded.pad_to(9))
        assert np.allclose(short.rows, long.rows, atol=1e-6)
        assert short.lengths.tolist() == long.lengths.tolist()
        assert np.isfinite(short.rows).all()
    assert fragment_vectors(models["naaf"], encoded).lengths.tolist() == [5, 3, 1]
    short, long = (features(models["naaf"], x) for x in (encoded, encoded.pad_to(9)))
    torch.testing.assert_close(short, long)
    assert short[2, :-1].abs().max() == 0


def test_an_ensemble_in_one_model_is_indexed(concepts, tmp_path) -> None:
    model = cf.create("naaf", concepts, ensemble_size=2, **SMALL).eval()
    index = SearchIndex.build(tmp_path / "index", model, concepts.test, dtype="float32")
    result = index.search(QUERY, k=3, exhaustive=True)
    fragments = [concepts.test.fragments.read(i) for i in range(32)]
    best = model.score(fragments, [QUERY])[:, 0].topk(3).values.tolist()
    assert [hit.score for hit in result.hits] == pytest.approx(best, abs=1e-5)
    assert index.search(QUERY, k=3, shortlist_size=32).hits[0].id == result.hits[0].id


@pytest.mark.parametrize("name", NAMES)
def test_an_explanation_is_the_one_the_model_gives(name, indexes, models, concepts) -> None:
    split = concepts.test
    result = indexes[name].search(QUERY, k=4, explain=2)
    assert [hit.match is not None for hit in result.hits] == [True, True, False, False]
    hit = result.hits[0]
    match = models[name].explain(split.fragments.read(split.ids.index(hit.id)), QUERY)
    assert hit.match.score == pytest.approx(match.score, abs=1e-5)
    assert hit.match.method == match.method
    for mine, other in zip(hit.match.words, match.words, strict=True):
        assert mine.word == other.word
        assert mine.effect == pytest.approx(other.effect, abs=1e-5)
        if other.region_weights is not None:
            assert mine.region_weights == pytest.approx(other.region_weights, abs=1e-4)
    if name != "vse-fc":  # of whole vectors no region is kept
        assert hit.match.boxes == pytest.approx(match.boxes)
    caption = indexes[name].search(image="test-3", k=1, explain=1).hits[0]
    assert caption.match.text == caption.text
    assert caption.match.score == pytest.approx(caption.score, abs=1e-5)


def test_recall_is_what_a_naive_comparison_counts(indexes) -> None:
    index = indexes["naaf"]
    narrow = index.recall(64, shortlist_size=10)[0]
    items = index.items["captions"]
    texts = [about["text"] for about in items.about(items.table.live_ids)]
    shares = []
    for text in texts:
        two = {h.id for h in index.search(text, k=10, shortlist_size=10).hits}
        one = {h.id for h in index.search(text, k=10, exhaustive=True).hits}
        shares.append(len(two & one) / 10)
    assert narrow.queries == 64
    assert narrow.at[10] == pytest.approx(np.mean(shares), abs=1e-6)
    assert 0 < narrow.at[10] < 1
    wide = index.recall(20, shortlist_size=64)
    assert [recall.at for recall in wide] == [{1: 1.0, 5: 1.0, 10: 1.0}] * 2
    assert [(r.asked_with, r.target) for r in wide] == [
        ("captions", "images"),
        ("images", "captions"),
    ]


@pytest.fixture(scope="module")
def exhaustive_hits(indexes) -> list[list[str]]:
    """The best five images for each caption, without a first stage."""
    index = indexes["naaf"]
    items = index.items["captions"]
    texts = [about["text"] for about in items.about(items.table.live_ids)]
    return [[hit.id for hit in index.search(t, k=5, exhaustive=True).hits] for t in texts]


@pytest.mark.parametrize("size", [1, 3])
def test_recall_of_a_small_shortlist_is_that_of_searches_with_it(
    size, indexes, exhaustive_hits
) -> None:
    index = indexes["naaf"]
    narrow = index.recall(64, shortlist_size=size)[0]
    items = index.items["captions"]
    texts = [about["text"] for about in items.about(items.table.live_ids)]
    for k in (1, 5):
        shares = []
        for text, best in zip(texts, exhaustive_hits, strict=True):
            two = {h.id for h in index.search(text, k=k, shortlist_size=size).hits}
            shares.append(len(two & set(best[:k])) / k)
        assert narrow.at[k] == pytest.approx(np.mean(shares), abs=1e-6)


@pytest.mark.slow
def test_a_fitted_first_stage_finds_more_than_a_pooled_one(models, concepts, tmp_path) -> None:
    recalls = {}
    for form in ("pooled", "fitted"):
        index = SearchIndex.build(
            tmp_path / form, models["naaf"], concepts.train, first_stage=form, dtype="float32"
        )
        index = SearchIndex.open(index.folder, device="cpu")
        assert index.info()["first_stage"] == form
        recalls[form] = np.mean([way.at[10] for way in index.recall(96, shortlist_size=16)])
    assert recalls["fitted"] > recalls["pooled"] + 0.1
    # and the same side is still ranked by likeness
    text = concepts.train.texts[9]
    assert index.search(text, target="captions", k=1, shortlist_size=96).hits[0].text == text


def test_a_fit_reproduces_scores_that_are_bilinear() -> None:
    rng = np.random.default_rng(0)
    captions, images = (torch.from_numpy(rng.normal(size=(200, 12))) for _ in range(2))
    form = torch.from_numpy(rng.normal(size=(12, 12)))
    scores = captions @ form @ images.T
    fit = solve(captions, images, scores, torch.zeros_like(scores), dim=12)
    assert fit.gain == pytest.approx(0.0)  # all equal: every item is among the best tenth
    worse = solve(captions, images, scores, -scores, dim=12)
    assert worse.gain == pytest.approx(1.0)
    torch.testing.assert_close(fit.captions @ fit.images.T, form.float(), atol=1e-2, rtol=1e-2)


def test_without_enough_to_fit_on_the_first_stage_is_pooled(models, concepts, tmp_path) -> None:
    few, many = (
        SearchIndex.build(tmp_path / name, models["chan"], getattr(concepts, name))
        for name in ("test", "train")
    )
    assert few.info()["first_stage"] == "pooled"
    gain = fit_first_stage(models["chan"], [concepts.train], 24, Silent()).gain
    assert many.info()["first_stage"] == ("fitted" if gain > 0 else "pooled")
    with pytest.raises(DataError, match="64 images"):
        SearchIndex.build(tmp_path / "no", models["chan"], concepts.test, first_stage="fitted")
    assert not (tmp_path / "no").exists()
    fitted = SearchIndex.build(
        tmp_path / "yes", models["chan"], concepts.train, first_stage="fitted"
    )
    (fitted.folder / "first_stage.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match="first_stage"):
        SearchIndex.open(fitted.folder)


FOUND = {"faiss": "faiss", "qdrant": "qdrant_client"}


@pytest.mark.parametrize("backend", ["faiss", "qdrant"])
def test_other_backends_give_the_same_results(backend, models, concepts, indexes, tmp_path) -> None:
    if not importlib.util.find_spec(FOUND[backend]):
        pytest.skip(f"{backend} is not there")
    options = {"least": 8} if backend == "faiss" else {}
    index = SearchIndex.build(
        tmp_path / "index",
        models["chan"],
        concepts.test.select(range(20)),
        backend=backend,
        backend_options=options,
        dtype="float32",
    )
    index.add(concepts.test.select(range(20, 32)))
    index.remove(["test-4"])
    index.close()
    index = SearchIndex.open(tmp_path / "index", device="cpu")
    mine, other = (i.search(QUERY, k=10, shortlist_size=20) for i in (index, indexes["chan"]))
    expected = [hit.id for hit in other.hits if hit.id != "test-4"]
    assert [hit.id for hit in mine.hits][:9] == expected[:9]
    index.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no words"),
        ("  \n", "no words"),
        ("dog " * 10_000, "40,000 letters"),
        ("a " * 201, "201 words"),
    ],
)
def test_a_text_that_cannot_be_a_query_is_refused(indexes, text, message) -> None:
    with pytest.raises(DataError, match=message):
        indexes["naaf"].search(text)


def test_unknown_words_are_named_and_change_no_score(indexes) -> None:
    result = indexes["naaf"].search("a dog on a skateboard")
    assert result.notes == ["unknown words, left out: on, skateboard"]
    plain = indexes["naaf"].search("a dog a")
    assert [hit.id for hit in result.hits] == [hit.id for hit in plain.hits]
    assert [hit.score for hit in result.hits] == pytest.approx([hit.score for hit in plain.hits])
    with pytest.raises(DataError, match="knows no word"):
        indexes["naaf"].search("skateboard")


def test_captions_without_a_known_word_are_left_out_of_an_index(models, concepts, tmp_path) -> None:
    split = concepts.test.select([0, 1])
    odd = replace(split, captions=[["skateboard", "a dog"], ["a zorp dog"]])
    index = SearchIndex.build(tmp_path / "index", models["naaf"], first_stage="pooled")
    added = index.add(odd)
    assert (added.images, added.captions) == (2, 2)
    assert len(added.left_out) == 1
    assert "skateboard" in added.left_out[0]
    scores = {hit.text: hit.score for hit in index.search(image=odd.ids[0]).hits}
    assert scores["a zorp dog"] == pytest.approx(scores["a dog"], abs=1e-3)


def test_a_long_caption_without_a_known_word_is_named_in_short(models, concepts, tmp_path) -> None:
    split = replace(concepts.test.select([0]), captions=[["skateboard" * 500, "a dog"]])
    index = SearchIndex.build(tmp_path / "index", models["naaf"], first_stage="pooled")
    (message,) = index.add(split).left_out
    assert "skateboardskateboard" in message
    assert len(message) < 300


def test_more_results_than_items_are_all_items(indexes) -> None:
    result = indexes["naaf"].search(QUERY, k=1000)
    assert len(result.hits) == 32
    assert result.notes[-1] == "there are only 32 images in the index"
    for wrong, least in (({"k": 0}, 1), ({"shortlist_size": 0}, 1), ({"explain": -1}, 0)):
        with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}: at least {least}"):
            indexes["naaf"].search(QUERY, **wrong)
    for wrong in ({"k": "2"}, {"k": 1.5}, {"explain": "all"}, {"shortlist_size": True}):
        with pytest.raises(ValueError, match="expected a whole number, got"):
            indexes["naaf"].search(QUERY, **wrong)


def test_an_image_query_without_captions_names_the_option_for_similar_images(
    models, concepts, tmp_path
) -> None:
    split = with_captions(concepts.test.select(range(4)), [])
    index = SearchIndex.build(tmp_path / "index", models["vse-fc"], split)
    query = split.ids[0]
    with pytest.raises(DataError, match=r"similar images with --target images, or add some with"):
        index.search(image=query)
    with pytest.raises(DataError, match=r"no captions in this index; add some with"):
        index.search(image=query, target="captions")
    assert index.search(image=query, target="images").hits


def test_an_empty_index_says_so(models, tmp_path) -> None:
    index = SearchIndex.build(tmp_path / "index", models["naaf"])
    with pytest.raises(DataError, match="there are no images in this index"):
        index.search(QUERY)
    with pytest.raises(DataError, match="recall needs images and captions"):
        index.recall()
    vectors = index.proxy.vectors(text_query(index.model, QUERY).encoded, "captions")
    assert index.vectors["images"].search(vectors, 3)[0].shape == (1, 0)


def test_a_query_that_is_no_text_is_refused(models, tmp_path) -> None:
    index = SearchIndex.build(tmp_path / "index", models["naaf"])
    with pytest.raises(ValueError, match="the query: expected a text, got 123"):
        index.search(123)


def test_one_question_at_a_time(indexes) -> None:
    for options in ({}, {"text": QUERY, "image": "test-1"}):
        with pytest.raises(DataError, match="one of the two"):
            indexes["naaf"].search(**options)


def test_an_image_that_is_none_is_refused(indexes, concepts, tmp_path) -> None:
    (tmp_path / "photo.jpg").write_text("not an image")
    with pytest.raises(DataError, match=r"photo\.jpg: not an image"):
        indexes["naaf"].search(image=tmp_path / "photo.jpg")
    with pytest.raises(DataError, match="ids look like 'test-0'"):
        indexes["naaf"].search(image="missing.jpg")
    with pytest.raises(DataError, match="a folder"):
        indexes["naaf"].search(image=tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    for picture in (tmp_path / "photo.png", np.zeros((9, 9, 3), "uint8")):
        with pytest.raises(ConfigError, match="precomputed features"):
            indexes["naaf"].search(image=picture)
    with pytest.raises(ValueError, match="expected"):
        indexes["naaf"].search(image=5)


@given(
    blocks=st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=6), min_size=1, max_size=6),
    k=st.integers(1, 8),
)
def test_the_best_of_blocks_is_the_best_of_all_and_ties_go_to_the_lower_id(blocks, k) -> None:
    best, first, pairs = TopK(1, k), 0, []
    for block in blocks:
        ids = np.arange(first, first + len(block))
        best.update(ids, torch.tensor([block], dtype=torch.float32))
        pairs += zip(block, ids.tolist(), strict=True)
        first += len(block)
    order = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:k]
    assert best.result()[0].tolist() == [[name for _, name in order]]


def test_results_become_plain_values(indexes) -> None:
    tree = indexes["naaf"].search(QUERY, k=2, explain=1).as_dict()
    assert json.loads(json.dumps(tree))["hits"][0]["match"]["words"]
