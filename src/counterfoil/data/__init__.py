"""Pairs of images and captions: sources, conversion, inspection. Nothing here imports torch."""

from counterfoil.data.arrays import ArrayFile
from counterfoil.data.convert import ConversionReport, convert
from counterfoil.data.deep_check import drop_unreadable
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.images import (
    FileImage,
    ImageRef,
    MemberImage,
    MissingImage,
    RowImage,
    open_image,
)
from counterfoil.data.inspect import Inspection, SplitSummary, inspect
from counterfoil.data.load import load_pairs
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.problems import Problem, ProblemLog, Severity, count_kinds
from counterfoil.data.sources import Source, named_sources, sources
from counterfoil.data.sources.assemble import MAX_WORDS
from counterfoil.data.writers import writers

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
    "sources",
    "writers",
]
