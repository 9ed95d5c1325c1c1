"""Two encoded batches to a score matrix; one file per method."""

from counterfoil.matchers import embedding as _embedding  # noqa: F401 - registers its matchers
from counterfoil.matchers import scan as _scan  # noqa: F401
from counterfoil.matchers.base import Matcher, matchers
from counterfoil.matchers.local import LocalMatcher, WordParts

__all__ = ["LocalMatcher", "Matcher", "WordParts", "matchers"]
