"""Items are made in a quick way, and come out to the last number as a plain way makes them."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from counterfoil.core.errors import ConfigError
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.data.batches import dataset as module
from counterfoil.data.batches import dataset as once
from counterfoil.data.batches.collate import Collate
from counterfoil.data.batches.dataset import TEXT_ONLY, Augmentation, CaptionItems, ExtraItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.data.text.dependencies import LinkedIds, RuleParser
from counterfoil.data.text.tokenizers import HuggingFaceText, WordNoise, WordText, with_parser
from counterfoil.data.text.vocabulary import END, MASK, START, UNK, Vocabulary
from counterfoil.data.text.words import words
from tests.conftest import thinned
from tests.data.text.test_text import save_tiny_tokenizer

SEED = 11
CAPTIONS = [
    ["A dog near the horse.", "doggy"],
    ["The man's cat isn't a doggy and the car, the bus", "a kite and a ball near the house"],
    ["a tree", "the lamp near the boat and the tree and the kite and the ball ."],
    ["dog dog dog", "The horse and the cat"],
]
CHANGES = [
    Augmentation(),
    Augmentation(regions=0.3),
    Augmentation(words=0.5),
    Augmentation(0.2, 0.2),
    Augmentation(0.5, 0.3, varying=True),
    Augmentation(0.95, 0.95),
]


class Draws:
    """A companion that draws before the item does, some captions more than others."""

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        images = tuple(int(image) for image in rng.integers(4, size=caption % 3))
        return ExtraItems(images, ("a new word",))


def generator(epoch: int, caption: int, view: int) -> np.random.Generator:
    key = np.array([SEED, (epoch << 40) + caption], dtype=np.uint64)
    counter = np.array([0, 0, 0, max(0, view)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def actions(rate: float, count: int, rng: np.random.Generator) -> list[str]:
    draw = rng.random(count)
    action = np.where(draw < rate * 0.5, "mask", "keep").astype(object)
    action[(draw >= rate * 0.5) & (draw < rate * 0.6)] = "replace"
    action[(draw >= rate * 0.6) & (draw < rate)] = "delete"
    if count and all(f == "delete" for f in action):
        action[0] = "keep"
    return list(action)


def disturbed_words(text: WordText, caption: str, rate: float, rng: np.random.Generator):
    """Ids, and the word behind each, of a word vocabulary."""
    index, tokens = text.vocabulary.index, words(caption)
    ids, word_of = [index[START]], [None]
    chosen = actions(rate, len(tokens), rng) if rate else ["keep"] * len(tokens)
    for place, (word, action) in enumerate(zip(tokens, chosen, strict=True)):
        if action == "keep":
            ids.append(index.get(word, index[UNK]))
        elif action == "mask":
            ids.append(index[MASK])
        elif action == "replace":
            ids.append(int(rng.integers(len(index))))
        word_of += [] if action == "delete" else [place]
    return [*ids, index[END]], [*word_of, None], tokens


def disturbed_pieces(text: HuggingFaceText, caption: str, rate: float, rng: np.random.Generator):
    """The same of a tokenizer's pieces."""
    coded = text.tokenizer(caption, truncation=True, max_length=text.max_length)
    word_of = coded.word_ids()
    count = 1 + max((word for word in word_of if word is not None), default=-1)
    spans = [coded.word_to_chars(word) for word in range(count)]
    named = [caption[span.start : span.end].lower() for span in spans]
    if not rate:
        return coded["input_ids"], word_of, named
    chosen, ids, left = actions(rate, count, rng), [], []
    for token, word in zip(coded["input_ids"], word_of, strict=True):
        action = "keep" if word is None else chosen[word]
        if action == "keep":
            ids.append(token)
        elif action == "mask":
            ids.append(text.tokenizer.mask_token_id)
        elif action == "replace":
            ids.append(int(rng.integers(len(text.tokenizer))))
        left += [] if action == "delete" else [word]
    return ids, left, named


def places(table: FragmentTable, image: int, change: Augmentation, rng: np.random.Generator):
    result = np.arange(table.count(image)) + image * table.max_fragments
    if not change.regions:
        return result
    rate = change.regions
    if change.varying:
        rate = rate * rng.random() if rng.random() > 0.2 else 0.0
    keep = rng.random(len(result)) >= rate
    keep[:1] |= not keep.any()
    return result[keep]


def split_of(folder) -> Split:
    np.save(folder / "features.npy", np.zeros((6, 7, 2), np.float16))
    lengths = np.array([7, 1, 4, 7, 2, 6])
    table = FragmentTable(ArrayFile(folder / "features.npy"), np.array([5, 1, 3, 4]), lengths)
    return Split("train", list("abcd"), CAPTIONS, fragments=table)


def texts_of(folder) -> dict[str, WordText | HuggingFaceText]:
    some = WordText(Vocabulary.build([text for image in CAPTIONS[:3] for text in image], 1))
    pieces = HuggingFaceText.from_pretrained(str(save_tiny_tokenizer(folder)))
    linked = {
        f"{name}, linked": with_parser(text, RuleParser())
        for name, text in (("words", some), ("pieces", pieces))
    }
    return {"words": some, "pieces": pieces, **linked}


@pytest.mark.parametrize(
    ("kind", "extra_sources"),
    thinned(
        product(["words", "pieces", "words, linked", "pieces, linked"], [False, True]),
        *[("words", False), ("words, linked", True), ("pieces, linked", False)],
    ),
)
def test_every_number_is_that_of_the_plain_way(tmp_path, kind, extra_sources) -> None:
    split, text = split_of(tmp_path), texts_of(tmp_path)[kind]
    plain = disturbed_words if isinstance(text, WordText) else disturbed_pieces
    more = {"mine": Draws()} if extra_sources else None
    touched = 0
    for change in CHANGES:
        items = CaptionItems(split, text, change, SEED, more, resident=np.ones(4, np.bool_))
        indices = list(product(range(3), range(len(split.texts)), (0, 1, TEXT_ONLY)))
        batch = Collate(text.pad)([items[index] for index in indices])
        shown = 0
        for row, (epoch, caption, view) in enumerate(indices):
            rng, image = generator(epoch, caption, view), split.image_of[caption]
            if view != TEXT_ONLY:
                expected = places(split.fragments, image, change, rng)
                mask = batch.images.mask[shown].numpy()
                assert batch.images.table_rows[shown].numpy()[mask].tolist() == expected.tolist()
                assert not batch.images.table_rows[shown].numpy()[~mask].any()
                assert mask.sum() == len(expected)
                shown += 1
            if extra_sources:
                extra, mine = Draws().of(caption, rng), batch.extras["mine"]
                wanted = [places(split.fragments, other, change, rng) for other in extra.images]
                rows = (mine.image_owners == row).nonzero()[:, 0]
                for place, there in zip(rows, wanted, strict=True):
                    kept = mine.images.table_rows[place][mine.images.mask[place]]
                    assert kept.tolist() == there.tolist()
            ids, word_of, named = plain(text, split.texts[caption], change.words, rng)
            mask = batch.texts.mask[row]
            assert batch.texts.ids[row][mask].tolist() == ids
            assert batch.texts.ids[row][~mask].eq(text.pad).all()
            touched += ids != text.encode(split.texts[caption])
            if text.parser is not None:
                links = LinkedIds.of_words(ids, word_of, text.parser.edges(named)).edges
                graph = {frozenset(edge) for edge in batch.texts.graph[row].nonzero().tolist()}
                assert graph == {frozenset(edge) for edge in links}
        assert shown == len(batch.images.mask) == len(batch.image_ids)
        assert batch.caption_ids.tolist() == [caption for _, caption, _ in indices]
        assert batch.owners.tolist() == split.image_of[batch.caption_ids.numpy()].tolist()
    assert touched > 80


@given(rate=st.floats(0.0, 1.5), count=st.integers(0, 40), seed=st.integers(0, 1 << 32))
def test_the_fates_of_words_are_those_that_arrays_tell(rate, count, seed) -> None:
    mine, plain = np.random.default_rng(seed), np.random.default_rng(seed)
    assert WordNoise(rate, mine).actions(count) == actions(rate, count, plain)
    assert mine.integers(1000) == plain.integers(1000)


@given(
    epoch=st.integers(0, 1000),
    caption=st.integers(0, 1 << 39),
    view=st.integers(TEXT_ONLY, 50),
    before=st.integers(0, 9),
)
def test_one_generator_begins_anew_as_a_new_one_would(epoch, caption, view, before) -> None:
    draws = module._ItemRng(SEED)
    if before % 2:  # as in a process that was not forked
        draws = pickle.loads(pickle.dumps(draws))  # noqa: S301 - our own
    assert [*vars(draws)] == ["seed", "generator"]  # of two, a copy could know but one
    draws.of(0, before, 0).integers(7, size=before)  # leaves half of a number behind
    mine, plain = draws.of(epoch, caption, view), generator(epoch, caption, view)
    for _ in range(3):
        assert mine.integers(1000) == plain.integers(1000)
        assert mine.random(5).tolist() == plain.random(5).tolist()
    assert mine.choice(9, 3, replace=False).tolist() == plain.choice(9, 3, replace=False).tolist()


def test_only_so_many_captions_are_remembered_and_all_come_out_alike(tmp_path, monkeypatch) -> None:
    split, text, change = split_of(tmp_path), texts_of(tmp_path)["words"], Augmentation(0.2, 0.5)
    whole = CaptionItems(split, text, change, SEED)
    monkeypatch.setattr(once, "MAX_CACHED_CAPTIONS", 3)
    few = CaptionItems(split, text, change, SEED)
    for epoch, caption in product(range(3), range(8)):
        assert few[epoch, caption, 0].ids == whole[epoch, caption, 0].ids
    assert len(few.tokens_of.cache) == 3
    again = pickle.loads(pickle.dumps(few))  # noqa: S301
    assert again[5, 6, 0].ids == few[5, 6, 0].ids


def test_what_is_remembered_is_not_what_is_handed_out(tmp_path) -> None:
    split, text = split_of(tmp_path), texts_of(tmp_path)["words"]
    items = CaptionItems(split, text, Augmentation(), SEED)
    items[0, 0, 0].ids.append(99)
    assert items[0, 0, 0].ids == text.encode(split.texts[0])


def test_processes_that_stay_make_what_new_ones_make(tmp_path) -> None:
    split, text = split_of(tmp_path), texts_of(tmp_path)["words"]
    held, shares = np.ones(4, np.bool_), RankBatches(BatchPlan(split, 4, SEED, views=2), 0)
    items = CaptionItems(split, text, Augmentation(0.3, 0.3), SEED, resident=held)
    loader = DataLoader(
        items,
        batch_sampler=shares,
        collate_fn=Collate(text.pad),
        num_workers=1,
        persistent_workers=True,
    )
    for epoch in range(3):
        shares.epoch = epoch
        fresh = CaptionItems(split, text, Augmentation(0.3, 0.3), SEED, resident=held)
        for batch, indices in zip(loader, shares, strict=True):
            expected = Collate(text.pad)([fresh[index] for index in indices])
            assert torch.equal(batch.texts.ids, expected.texts.ids)
            assert torch.equal(batch.images.table_rows, expected.images.table_rows)
            assert torch.equal(batch.images.mask, expected.images.mask)


def test_a_tokenizer_that_knows_no_words_encodes_but_takes_no_noise() -> None:
    from transformers import ByT5Tokenizer

    text = HuggingFaceText(ByT5Tokenizer())
    assert text.encode("ad") == [ord("a") + 3, ord("d") + 3, 1]
    with pytest.raises(ConfigError, match=r"word_noise.*set it to 0"):
        text.encode("a dog", WordNoise(0.2, np.random.default_rng(0)))
    with pytest.raises(ConfigError, match="use a fast one"):
        with_parser(text, RuleParser()).encode("a dog")
