"""Audit a data set: find, explain and report captions that do not match their image."""

from counterfoil.audit.audit import Audit, audit_split
from counterfoil.audit.checked import CheckedCaptions, read_checked
from counterfoil.audit.corrected import DataSource, Exported, export_corrected
from counterfoil.audit.decisions import Decision, DecisionLog, Review, review_of
from counterfoil.audit.describe import NO_CORRECTOR, Corrector
from counterfoil.audit.false_alarms import FalseAlarms, alarm_curve, calibrate
from counterfoil.audit.findings import Finding, Summary, read_findings, total
from counterfoil.audit.merge import Merged, merge_log
from counterfoil.audit.report import check_report_folder, left_out, write_report
from counterfoil.audit.sign_weights import SignWeights
from counterfoil.models.correct import can_correct

__all__ = [
    "NO_CORRECTOR",
    "Audit",
    "CheckedCaptions",
    "Corrector",
    "DataSource",
    "Decision",
    "DecisionLog",
    "Exported",
    "FalseAlarms",
    "Finding",
    "Merged",
    "Review",
    "SignWeights",
    "Summary",
    "alarm_curve",
    "audit_split",
    "calibrate",
    "can_correct",
    "check_report_folder",
    "export_corrected",
    "left_out",
    "merge_log",
    "read_checked",
    "read_findings",
    "review_of",
    "total",
    "write_report",
]
