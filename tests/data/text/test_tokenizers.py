"""Words that a model does not know are left out of a person's sentence, for every command."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from counterfoil.core.errors import DataError
from counterfoil.data.text.tokenizers import HuggingFaceText, WordText, known_text, require_known
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.data.text.words import caption_words
from counterfoil.models.correct import correct
from counterfoil.plots.sentences import explain_png, shades
from counterfoil.scoring.encode import score_split
from tests.data.text.test_text import save_tiny_tokenizer
from tests.models.test_explain import image_of, make, tiny_bert  # noqa: F401 - a fixture
from tests.objectives.test_tags import small

WORDS = WordText(Vocabulary.build(["a red dog 's near the kite ."], min_count=1))


@pytest.mark.parametrize(
    ("sentence", "left", "unknown"),
    [
        ("a red dog", "a red dog", []),
        ("a zorp red dog", "a      red dog", ["zorp"]),
        ("Zorp's dog!", "    's dog ", ["Zorp"]),
        ("a dog zorp zorp", "a dog          ", ["zorp"]),
        ('a "zorp" dog', "a        dog", ["zorp"]),
        ("Dog İzorp dog", "Dog       dog", ["İ", "zorp"]),
        ("a red dog \U0001f436!", "a red dog   ", ["\U0001f436"]),
        ("\U0001f44d\U0001f3fd dog ❤\ufe0f", "   dog   ", ["\U0001f44d\U0001f3fd", "❤\ufe0f"]),
        ("\U0001f469\u200d\U0001f680\u2026 dog €", "     dog  ", ["\U0001f469\u200d\U0001f680"]),
    ],
)
def test_unknown_words_become_blanks_and_the_others_keep_their_places(
    sentence, left, unknown
) -> None:
    read = known_text(WORDS, sentence)
    assert read.text == left
    assert read.unknown_words == unknown
    assert len(read.text) == len(sentence)
    every = sorted([*caption_words(read.text), *read.unknown], key=lambda word: word.start)
    assert [sentence[word.start : word.end] for word in every] == [word.text for word in every]


def test_what_is_left_holds_no_unknown_token() -> None:
    rng = np.random.default_rng(0)
    parts = ["dog", "zorp", '"', "'s", "n't", ".", ",", "the", " ", "“", "u.s.", "x-y"]
    unk = WORDS.vocabulary.index["<unk>"]
    for _ in range(300):
        sentence = " ".join(rng.choice(parts, size=6)) + "".join(rng.choice(parts, size=4))
        assert unk not in WORDS.encode(known_text(WORDS, sentence).text)


@pytest.mark.parametrize("sentence", ["zorp", "zorp blah.", "Zorp, '"])
def test_a_sentence_without_a_known_word_is_refused(sentence) -> None:
    with pytest.raises(DataError, match=r"knows no word.*orp"):
        require_known(WORDS, sentence)


def test_word_pieces_have_no_unknown_words_but_those_without_any_piece(tmp_path) -> None:
    text = HuggingFaceText.from_pretrained(str(save_tiny_tokenizer(tmp_path)))
    known = text.tokenizer.convert_ids_to_tokens([i for i in range(len(text)) if i > 5])
    word = next(token for token in known if token.isalpha())
    read = known_text(text, f"{word} \N{SNOWMAN} {word}")
    assert [each.text for each in read.unknown] == ["\N{SNOWMAN}"]
    assert text.tokenizer.unk_token_id not in text.encode(read.text)
    assert known_text(text, word).unknown == ()


@pytest.mark.parametrize("name", ["naaf", "scan-t2i", "vse-fc", "sgraf"])
def test_an_unknown_word_neither_raises_nor_lowers_a_score(name, concepts) -> None:
    model = make(name, concepts)
    image = image_of(concepts)
    plain, odd = model.score([image], ["a dog near the kite", "a zorp dog near the blah kite"])[0]
    assert float(odd) == pytest.approx(float(plain), abs=1e-6)
    bare = model.explain(image, "a dog near the kite")
    match = model.explain(image, "a zorp dog near the blah kite")
    assert match.score == pytest.approx(bare.score, abs=1e-6)
    assert match.unknown == ["zorp", "blah"]
    assert [word.word for word in match.words] == [
        "a",
        "zorp",
        "dog",
        "near",
        "the",
        "blah",
        "kite",
    ]
    kept = [word for word in match.words if word.known]
    assert [w.effect for w in kept] == pytest.approx([w.effect for w in bare.words], abs=1e-6)
    assert [w.effect for w in match.words if not w.known] == [0.0, 0.0]
    assert match.worst.known
    plain = json.loads(json.dumps(match.as_dict()))
    assert plain["unknown"] == ["zorp", "blah"]
    assert [word["known"] for word in plain["words"]] == [w.known for w in match.words]


def test_a_language_model_leaves_out_what_has_no_piece(concepts, tiny_bert) -> None:  # noqa: F811
    model = make("vse-infty-bert", concepts, tiny_bert)
    image = image_of(concepts)
    plain, odd = model.score([image], ["a dog", "a \N{SNOWMAN} dog"])[0]
    assert float(odd) == pytest.approx(float(plain), abs=1e-6)


def test_unknown_words_are_marked_in_the_picture(concepts) -> None:
    model = make("naaf", concepts)
    match = model.explain(image_of(concepts), "a zorp dog")
    assert shades(match)[1] == 0.0
    as_if = replace(match, words=[replace(word, known=True) for word in match.words])
    drawn, known = (Image.open(io.BytesIO(explain_png(each))) for each in (match, as_if))
    assert drawn.tobytes() != known.tobytes()


def test_evaluation_keeps_the_token_of_unknown_words(concepts) -> None:
    """Figures of the papers are measured with it."""
    model = make("naaf", concepts)
    split = concepts.test.select([0, 1])
    odd = type(split)("odd", split.ids, [["a zorp dog"], ["a dog"]], None, split.fragments)
    scores = score_split(model, odd).scores
    assert float(scores[0, 0]) != pytest.approx(float(scores[0, 1]), abs=1e-5)
    assert float(model.score([odd.fragments.read(0)], ["a zorp dog"])) == pytest.approx(
        float(scores[0, 1]), abs=1e-5
    )


def test_a_correction_says_nothing_of_an_unknown_word(concepts) -> None:
    model = small(concepts.train)
    image = concepts.test.fragments.read(0)
    plain = correct(model, image, "a dog near a cat", threshold=0.0)
    odd = correct(model, image, "a zorp dog near a cat", threshold=0.0)
    assert odd.score == pytest.approx(plain.score, abs=1e-5)
    assert [(word.word, word.known) for word in odd.words][1] == ("zorp", False)
    assert odd.words[1].wrong == 0.0
    assert "zorp" in odd.corrected
    others = [word.wrong for word in odd.words if word.known]
    assert others == pytest.approx([word.wrong for word in plain.words], abs=1e-5)
