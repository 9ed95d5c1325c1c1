"""The rule of a run for corrections: chosen on its dev split, kept in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from counterfoil.data.pairs import Split
from counterfoil.errors import CheckpointError, ConfigError, DataError
from counterfoil.evaluation.corrections import choose_rule
from counterfoil.files import write_atomically
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.models.model import Model
from counterfoil.progress import Progress
from counterfoil.reading import read_text

RULE = "correction_rule.json"
RULE_BYTES = 1 << 16


def save_rule(folder: Path, model: Model, dev: Split, progress: Progress) -> CorrectionRule:
    """Choose a rule on dev and write it into a run folder; unusable if no caption has a foil."""
    reason = ""
    try:
        rule = choose_rule(model, dev, progress=progress)
    except DataError as error:  # for one, captions in which no rule finds a word to exchange
        rule, reason = CorrectionRule(usable=False), f": {error}"
    write_atomically(folder / RULE, json.dumps(asdict(rule), indent=2))
    progress.say(f"corrections: {_summary(rule)}{reason}")
    return rule


def _summary(rule: CorrectionRule) -> str:
    if not rule.usable:
        return f"none will be suggested; {rule.obstacle()}"
    return (
        f"{rule.precision:.0%} of {rule.made} changes were right on dev (threshold "
        f"{rule.threshold:g}, margin {rule.margin:.4g}); measure them on test: "
        "counterfoil correct RUN --measure"
    )


def load_rule(folder: Path) -> CorrectionRule | None:
    """The rule of a run, or of the run whose best checkpoint a folder is, if it has one."""
    path = folder / RULE
    if folder.name == "best" and not path.is_file():
        path = folder.parent / RULE
    if not path.is_file():
        return None
    try:
        return CorrectionRule(**json.loads(read_text(path, RULE_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError, ConfigError) as error:
        raise CheckpointError(
            f"{path}: damaged ({str(error)[:200]}); delete it, and choose it anew with "
            "counterfoil correct RUN --choose"
        ) from None
