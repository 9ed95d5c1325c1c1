"""Audit a data set: find, explain and report captions that do not match their image."""

from counterfoil.audit.audit import Audit, audit_split
from counterfoil.audit.describe import NO_CORRECTOR, Corrector
from counterfoil.audit.findings import Finding, Summary, total
from counterfoil.audit.report import write_report
from counterfoil.models.correct import can_correct

__all__ = [
    "NO_CORRECTOR",
    "Audit",
    "Corrector",
    "Finding",
    "Summary",
    "audit_split",
    "can_correct",
    "total",
    "write_report",
]
