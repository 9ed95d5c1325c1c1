"""Two encoded batches to a score matrix; one file per method."""

from counterfoil.matchers import embedding as _embedding  # noqa: F401 - registers its matchers
from counterfoil.matchers.base import Matcher, matchers

__all__ = ["Matcher", "matchers"]
