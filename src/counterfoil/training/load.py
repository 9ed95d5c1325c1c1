"""From a run folder back to its model and its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterfoil.config import FeaturesConfig, RunConfig, load_config, model_folder
from counterfoil.data.dev_split import read_dev_split, with_dev_split
from counterfoil.data.leakage import shared_with_train
from counterfoil.data.load import is_named, load_pairs
from counterfoil.data.pairs import Pairs
from counterfoil.device import choose_device
from counterfoil.errors import ConfigError
from counterfoil.features import with_fragments
from counterfoil.models import Model, from_pretrained, resolve
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.models.dual import reads_pixels
from counterfoil.models.explain import load_yardstick
from counterfoil.progress import Progress
from counterfoil.training.corrections import load_rule, save_rule
from counterfoil.training.run import read_data

__all__ = [
    "choose_run_rule",
    "evaluation_split",
    "leakage_into",
    "load_model",
    "model_folder",
    "run_config",
]

Leaked = dict[str, int]


def load_model(folder: Path, device: str = "auto") -> Model:
    """The best checkpoint of a run, or a saved model's folder."""
    model = from_pretrained(model_folder(folder)).to(choose_device(device))
    model.yardstick = load_yardstick(folder) or model.yardstick
    model.correction_rule = load_rule(folder) or model.correction_rule
    return model


def run_config(folder: Path) -> RunConfig | None:
    path = folder / "config.yaml"
    return load_config(path) if path.is_file() else None


def _own_pixels(run: Path, config: RunConfig) -> FeaturesConfig | None:
    """How a finished run reads pixels, which it knows without what it was pretrained from."""
    if not reads_pixels(resolve(config.model)):
        return None
    return FeaturesConfig(extractor=load_model(run, "cpu").fragments_from or "pixels")


def leakage_into(run: Path, data: str | None, options: dict[str, Any], pairs: Pairs) -> Leaked:
    """Counts, by split, of the images of a data set that a run was trained on, as ids tell.

    Ids of one data set mean nothing in another: data that the run was not trained on share none.
    """
    config = run_config(run)
    if config is None:
        return {}
    if data is not None and not _is_source(config, data, options):
        return {}
    return shared_with_train(pairs, *pairs.splits)


def _is_source(config: RunConfig, data: str, options: dict[str, Any]) -> bool:
    own = config.data
    if is_named(data, None) or is_named(own.source, own.format):
        return data == own.source and options == own.options
    return Path(data).resolve() == Path(own.source).resolve()


def evaluation_split(
    run: Path,
    data: str | None,
    format: str | None,
    options: dict[str, Any],
    cache: Path,
    progress: Progress,
) -> Pairs:
    """The data asked for, or that of the run; with fragments of the run's kind."""
    model_folder(run)
    config = run_config(run)
    if data is None:
        if config is None:
            raise ConfigError(f"{run} is a model without a run: name the data with --data")
        if options or format:
            raise ConfigError("--option and --format say how to read --data: name it, too")
        return read_data(config, cache, progress, _own_pixels(run, config), read_dev_split(run))
    pairs = load_pairs(data, format, options=options, cache_dir=cache, progress=progress)
    model = load_model(run, "cpu")
    pairs = with_fragments(
        pairs, cache, model.fragments_from or "segments", model.fragments_options, progress
    )
    # the run's own images again, from another place: what it has set aside was not trained on
    return with_dev_split(pairs, 0.0, read_dev_split(run))


def choose_run_rule(run: Path, model: Model, cache: Path, progress: Progress) -> CorrectionRule:
    """Choose the rule of a finished run again, on the dev split of its own data."""
    config = run_config(run)
    if config is None:
        raise ConfigError(f"{run}: a model without a run has no dev split; --choose needs a run")
    pairs = evaluation_split(run, None, None, {}, cache, progress)
    return save_rule(run, model, pairs[config.evaluation.split], progress)
