"""Data sets of images and captions: load, convert, inspect.

Only `batches` and `text.tfidf` import torch.
"""

from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.data.convert import ConversionReport, convert
from counterfoil.data.formats import Source, named_sources, sources, writers
from counterfoil.data.formats.assemble import MAX_WORDS
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.images import (
    FileImage,
    ImageRef,
    MemberImage,
    MissingImage,
    RowImage,
    open_image,
)
from counterfoil.data.inspect import Inspection, SplitSummary, drop_unreadable, inspect
from counterfoil.data.load import load_pairs
from counterfoil.data.pairs import Pairs, Problem, ProblemLog, Severity, Split, count_kinds
from counterfoil.data.photos import read_photos

__all__ = [
    "MAX_WORDS",
    "ArrayFile",
    "ConversionReport",
    "FileImage",
    "FragmentTable",
    "Fragments",
    "ImageRef",
    "Inspection",
    "MemberImage",
    "MissingImage",
    "Pairs",
    "Problem",
    "ProblemLog",
    "RowImage",
    "Severity",
    "Source",
    "Split",
    "SplitSummary",
    "convert",
    "count_kinds",
    "drop_unreadable",
    "inspect",
    "load_pairs",
    "named_sources",
    "open_image",
    "read_photos",
    "sources",
    "writers",
]
