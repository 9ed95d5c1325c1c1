"""The rule of a run for corrections: chosen on its dev split, kept in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from counterfoil.data.dev_split import read_dev_split
from counterfoil.data.pairs import Split
from counterfoil.errors import CheckpointError, ConfigError, DataError
from counterfoil.evaluation.corrections import choose_rule
from counterfoil.files import write_atomically
from counterfoil.models.correct import CorrectionRule
from counterfoil.models.model import Model
from counterfoil.progress import Progress
from counterfoil.reading import read_text

RULE = "correction_rule.json"
RULE_BYTES = 1 << 16


def save_rule(folder: Path, model: Model, dev: Split, progress: Progress) -> CorrectionRule | None:
    """Choose a rule on dev and write it into a run folder; None if no caption has a foil."""
    try:
        rule = choose_rule(model, dev, progress=progress)
    except DataError as error:  # for one, captions in which no rule finds a word to exchange
        progress.say(f"no rule for corrections was chosen ({error})")
        (folder / RULE).unlink(missing_ok=True)
        return None
    write_atomically(folder / RULE, json.dumps(asdict(rule), indent=2))
    progress.say(_summary(rule))
    return rule


def _summary(rule: CorrectionRule) -> str:
    if not rule.usable:
        return "corrections: none will be suggested, as too many were wrong on dev"
    return (
        f"corrections: {rule.precision:.0%} of {rule.made} changes were right on dev (threshold "
        f"{rule.threshold:g}, margin {rule.margin:.4g}); measure them on test: "
        "counterfoil correct RUN --measure"
    )


def load_rule(folder: Path) -> CorrectionRule | None:
    """The rule of a run, if it has one."""
    path = folder / RULE
    if not path.is_file():
        return None
    try:
        return CorrectionRule(**json.loads(read_text(path, RULE_BYTES)))
    except (ValueError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); delete it, or choose it anew") from None


def choose_run_rule(
    run: Path, model: Model, cache: Path, progress: Progress
) -> CorrectionRule | None:
    """Choose the rule of a finished run again, on the dev split of its own data."""
    from counterfoil.training.load import run_config
    from counterfoil.training.run import read_data

    config = run_config(run)
    if config is None:
        raise ConfigError(f"{run}: a model without a run has no dev split; --choose needs a run")
    pairs = read_data(config, cache, progress, aside=read_dev_split(run))
    return save_rule(run, model, pairs[config.evaluation.split], progress)
