"""The order of findings: a diverse first page, otherwise by suspicion."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from counterfoil.audit.findings import FIRST_PAGE, caption_pattern, diverse_first
from tests.audit.test_report import finding

PATTERNS = ["a {} dog", "the {} of a dog", "{} with dogs", "two {}", "there is a {}", "{}"]


def listed(images: list[int], patterns: list[int]):
    return [
        finding(PATTERNS[pattern].format(f"thing{n}"), n, image=f"i{image}", suspicion=1 - n / 1000)
        for n, (image, pattern) in enumerate(zip(images, patterns, strict=True))
    ]


def test_ten_findings_of_one_photo_share_the_first_page_with_others() -> None:
    findings = listed([0] * 10 + list(range(1, 31)), [n % 6 for n in range(40)])
    for some in (findings, listed([0] * 10 + list(range(1, 31)), [0] * 40)):
        page = diverse_first(some)[:FIRST_PAGE]
        assert max(Counter(one.image for one in page).values()) == 1
        assert page[0] is some[0]


def test_there_is_one_finding_per_image_and_two_per_pattern_where_enough_differ() -> None:
    many = [finding(f"{word} thing", n, image=f"i{n // 3}") for n, word in enumerate(WORDS)]
    page = diverse_first(many)[:FIRST_PAGE]
    assert max(Counter(one.image for one in page).values()) == 1
    assert max(Counter(caption_pattern(one.text) for one in page).values()) <= 2


WORDS = [
    f"{one} {other}"
    for one in ("a", "the", "of", "on", "in", "is", "and", "with")
    for other in ("a", "the", "of", "on", "in", "is", "and", "with")
]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=60))
def test_nothing_is_lost_and_both_parts_are_ordered_by_suspicion(pairs) -> None:
    findings = listed([one for one, _ in pairs], [other for _, other in pairs])
    result = diverse_first(findings)
    assert Counter(map(id, result)) == Counter(map(id, findings))
    for part in (result[:FIRST_PAGE], result[FIRST_PAGE:]):
        assert [one.suspicion for one in part] == sorted((o.suspicion for o in part), reverse=True)
    assert result[:1] == findings[:1]  # the most suspicious one stays first


def test_a_list_of_one_kind_keeps_its_order() -> None:
    findings = listed([0] * 30, [0] * 30)
    assert diverse_first(findings) == findings
    assert diverse_first([]) == []


def test_a_pattern_is_what_is_left_without_content_words() -> None:
    assert caption_pattern("A dog is on the beach!") == caption_pattern("a CAT is on the sofa")
    assert caption_pattern("a dog on a beach") != caption_pattern("a dog under a beach")
