"""Hints in error messages."""

from __future__ import annotations

from counterfoil.core.errors import nearest


def test_the_nearest_name_is_looked_for_whatever_its_case() -> None:
    assert nearest("selHN", ["sel", "selhn", "lseh"]) == "; did you mean 'selhn'?"
    assert nearest("SCAN", ["SCAN-t2i", "naaf"]) == "; did you mean 'SCAN-t2i'?"
    assert nearest("P1", ["P1x", "p1x"]) == "; did you mean 'P1x'?"
    assert nearest("zzz", ["sel"]) == ""
