"""Names and phrases that the sources avoid: values are nouns, and the field has its own words.

``python -m tests.test_names [FOLDER]`` counts them, in this source tree or in another one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "counterfoil"

VALUES = re.findall(r"\w+", "found told said shown kept held meant some place asked heard")
"""Participles and fillers that say what happened to a value, not what it is."""

TERMS = re.findall(
    r"\w+",
    "asking answering answers_CK kin kin_QNN wants_kin raised sharpness fused_pairs LocalMatcher "
    "SimilarityMatcher eager directed halved large_job Kept Known surely_whole on_host remember "
    "Live LiveBatch Preparation Survey Trial traceless Manner manner uninformed every_negative "
    "one_hardest SelectiveHardNegative WorstView SelfSimilarityPolynomial NegativesDistribution "
    "SemiHardNegative brought Companions Extra ExtraBatch CopiedMatcher members_of replaying "
    "replayed Recording Lease Movable apart Glance fates disturbed Tokenised Updates located "
    "MAY_CHANGE BestBothWays alike Asked refresh_and_tidy Keeper Found ShownRow FoilJudge "
    "everyones crowd MOST MANY FEW LEAST LARGE NOTHING ROOM NOBODY TOGETHER OLDEST SHARPEST "
    "PATIENCE",
)
"""Names of the project's own for what the field has a name for."""

OPTIONS = {"kept", "alike"}
"""Options of recipes; stored results are recognized by them, so they keep their names."""

WEIGHTS = {("uniter", "place")}
"""Parts of a model by file; its saved weights are named after them."""

SPELLINGS = re.findall(
    r"\w+",
    "optimis normalis standardis initialis tokenis serialis colour centre behaviour favour "
    "neighbour labell modell",
)
BRITISH = re.compile(f"(?i)({'|'.join(SPELLINGS).replace('centre', 'centre(?!d)')})")

GIVEN = re.compile(
    rf"\b_*(?:{'|'.join([*VALUES, *TERMS])})(?=\s*(?:[=:,)\]([+\-*/%&|^@<>#]|in\b|$))", re.MULTILINE
)
"""An avoided name that may be given here: what follows it is no word of a sentence."""

PHRASES = {
    "so many": r"\bso many\b",
    "a row a run, one a core": r"\b(?:a|one|two|three|\d+) (?:\w+) an? "
    r"(?:run|core|query|process|image|caption|row|line|second|epoch|step|pair|batch)\b",
    "too dear": r"\btoo dear\b",
    "to be had": r"\bto be had\b",
    "on its way": r"\bon (?:its|their) way\b",
    "by itself": r"\bby (?:itself|themselves)\b",
    "all that is": r"\ball that (?:is|was|are)\b",
    "of all that": r"\bof all that\b",
    "none where": r"\bNone where\b",
    "what is told": r"\b(?:is|are|was|be) told\b",
}


def defined_names(source: str) -> Iterator[str]:
    """Every name that a file gives: variables, arguments, attributes, functions, classes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def prose(source: str) -> str:
    """Comments, docstrings and messages of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    return " ".join(token.string for token in tokens if token.type in kinds)


def counts(folder: Path) -> Counter[str]:
    """How often each avoided name is given, and each avoided phrase written, below a folder."""
    result: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text()
        lowered = source.lower()
        suspected = GIVEN.search(source) or any(part in lowered for part in SPELLINGS)
        names = defined_names(source) if suspected else ()  # ast is slow, and few files have any
        for name, times in Counter(names).items():
            if name in OPTIONS or (path.stem, name) in WEIGHTS:
                continue
            if name.lstrip("_") in VALUES:
                result[name.lstrip("_")] += times
            elif name in TERMS:
                result[name] += times
            elif BRITISH.search(name):
                result["British spelling"] += times
        candidates = {phrase: p for phrase, p in PHRASES.items() if re.search(p, source)}
        text = prose(source) if candidates else ""  # tokenize is slow, and few files have any
        for phrase, pattern in candidates.items():
            result[phrase] += len(re.findall(pattern, text))
    return result


def test_values_have_names_that_say_what_they_are() -> None:
    assert not +counts(SOURCE)


if __name__ == "__main__":
    counted = counts(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
    for group in (VALUES, TERMS, ["British spelling"], list(PHRASES)):
        print("  ".join(f"{word}: {counted[word]}" for word in group if counted[word]) or "none")
