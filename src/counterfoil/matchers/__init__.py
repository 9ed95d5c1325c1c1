"""Two encoded batches to a score matrix; one file per method."""

from counterfoil.matchers import bfan as _bfan  # noqa: F401
from counterfoil.matchers import chamfer as _chamfer  # noqa: F401
from counterfoil.matchers import chan as _chan  # noqa: F401
from counterfoil.matchers import cross_encoder as _cross_encoder  # noqa: F401
from counterfoil.matchers import embedding as _embedding  # noqa: F401
from counterfoil.matchers import gsmn as _gsmn  # noqa: F401
from counterfoil.matchers import imram as _imram  # noqa: F401
from counterfoil.matchers import naaf as _naaf  # noqa: F401
from counterfoil.matchers import naaf_reference as _naaf_reference  # noqa: F401
from counterfoil.matchers import scan as _scan  # noqa: F401
from counterfoil.matchers import sgraf as _sgraf  # noqa: F401
from counterfoil.matchers.base import Matcher, Observation, matchers
from counterfoil.matchers.fragment_matcher import FragmentMatcher, WordParts

__all__ = ["FragmentMatcher", "Matcher", "Observation", "WordParts", "matchers"]
