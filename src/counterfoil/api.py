"""What a Python program types: load pairs, create a model, train it, evaluate it.

The same steps as the command line takes, with the same configuration underneath.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterfoil.core import zoo
from counterfoil.core.config import ModelConfig, RunConfig, build_config, merge
from counterfoil.core.distributed import on_first_process
from counterfoil.core.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    nearest,
    require_path,
)
from counterfoil.core.progress import Progress, as_progress
from counterfoil.core.registry import short_repr
from counterfoil.core.storage.atomic import default_cache
from counterfoil.core.storage.remote import is_url
from counterfoil.core.tensors.device import choose_device
from counterfoil.core.unread_options import refuse_unread
from counterfoil.data.load import is_named
from counterfoil.data.load import load_pairs as _load_pairs
from counterfoil.data.pairs import DEV_NAMES, Pairs, Split
from counterfoil.data.splits import (
    DEFAULT_DEV_SHARE,
    dev_note,
    read_dev_split,
    save_dev_split,
    with_dev_split,
)
from counterfoil.evaluation.evaluate import evaluate
from counterfoil.features import with_fragments
from counterfoil.kernels.maxsim import maxsim
from counterfoil.matchers import matchers
from counterfoil.models import Model, create_model, from_pretrained, models, save_pretrained
from counterfoil.models.correct import can_correct
from counterfoil.models.store import changed_parts, is_transformers_folder, load_zero_shot
from counterfoil.objectives import objectives
from counterfoil.training.run import (
    forgetting_section,
    save_noise,
    save_rule,
    save_yardstick,
)
from counterfoil.training.run_data import with_noise
from counterfoil.training.run_folder import (
    changed_settings,
    load_model,
    locked_run,
    make_room,
    resolve_paths,
    saved_config,
)
from counterfoil.training.trainer import RunResult, Trainer

if TYPE_CHECKING:
    import torch

    from counterfoil.search import SearchIndex


__all__ = [
    "build_index",
    "create",
    "evaluate",
    "from_pretrained",
    "list_matchers",
    "list_models",
    "list_objectives",
    "list_pretrained",
    "load",
    "load_pairs",
    "maxsim",
    "open_index",
    "push_to_hub",
    "save_pretrained",
    "train",
]

EXISTING_RUN_ADVICE = "resume=True continues it, overwrite=True deletes it; or name another folder"

DECIDED_BEFORE_TRAINING = {
    "source": "load_pairs(source)",
    "format": "load_pairs(source, format)",
    "options": "load_pairs(source, **options)",
    "features": "load_pairs(source, extractor=…)",
    "min_count": "counterfoil.models.create_model(config, split, DataConfig(min_count=…))",
    "vocabulary": "counterfoil.models.create_model(config, split, DataConfig(vocabulary=…))",
}
"""Keys of ``data`` that `train` cannot change any more, with the call that sets them."""


def list_models(pattern: str = "*") -> list[str]:
    """Names of models that `create` makes.

    >>> list_models("sc*")
    ['scan', 'scan-i2t', 'scan-t2i']
    """
    return models.names(pattern)


def list_objectives(pattern: str = "*") -> list[str]:
    """Names of objectives that `train` takes, as the configuration writes them.

    >>> list_objectives("s*")
    ['sct', 'sel', 'selhn', 'shn', 'siglip', 'siglip-foils', 'ssp']
    """
    return objectives.names(pattern)


def list_matchers(pattern: str = "*") -> list[str]:
    """Names of matchers, as the configuration writes them.

    >>> list_matchers("naaf*")
    ['naaf', 'naaf-reference']
    """
    return matchers.names(pattern)


def list_pretrained(pattern: str = "*") -> list[str]:
    """Names of pretrained models that `load` takes.

    >>> list_pretrained("scenes-*")
    ['scenes-corrector', 'scenes-naaf']
    """
    return zoo.names(pattern)


def load(source: str | Path, *, device: str = "auto", cache_dir: str | Path | None = None) -> Model:
    """A trained model: a run (its best checkpoint), a saved model, or a pretrained one by name.

    `list_pretrained` lists the names, such as ``"scenes-naaf"``; a folder of that name comes first.
    ``"hf://owner/name"`` is a model that `push_to_hub` wrote. What is not part of the package is
    downloaded once, into ``cache_dir`` (default: COUNTERFOIL_CACHE, or ``~/.cache/counterfoil``).
    A CLIP or SigLIP is a folder that `transformers` wrote, or a hub's name such as
    ``"openai/clip-vit-base-patch32"``, and needs the extra ``hf``.
    """
    require_path("load", source)
    folder = Path(source)
    is_name = zoo.is_pretrained(source)
    if is_name or (folder.is_dir() and not is_transformers_folder(folder)):
        return load_model(zoo.resolve(source, cache=cache_dir, progress=as_progress(True)), device)
    # a name below a folder that exists is a mistyped path: the hub is not asked for it
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and not folder.parent.is_dir()
    if folder.is_dir() or on_hub:
        try:
            return load_zero_shot(str(source)).to(choose_device(device))
        except CheckpointError as error:
            if folder.is_dir():
                raise
            tried = f"tried as a folder (there is none) and as a name on the hub: {error}"
            raise CheckpointError(f"{source}: {tried}") from None
    raise CheckpointError(
        f"{source}: no such folder, not a pretrained model ({', '.join(zoo.names())}), and not a "
        f"name on the hub (owner/name){nearest(str(source), zoo.names())}; expected a run (with "
        "best/), a saved model (with config.json), or a CLIP or SigLIP"
    )


def push_to_hub(source: Model | str | Path, name: str, **settings: Any) -> str:
    """Push a model, or that of a run, to ``owner/name`` on the hub; returns the commit's address.

    ``load("hf://owner/name")`` reads it. ``settings``: ``card`` (the text of its README.md; without
    one, a card on the hub stays as it is, and a new model gets that of its folder), ``half``
    (weights in half precision), ``private``, ``message``. Needs the extra ``hub``.
    """
    from counterfoil.models import publish

    if isinstance(source, Model):
        return publish.push_to_hub(source, name, **settings)
    folder = zoo.resolve(source)
    return publish.push_to_hub(load_model(folder, "cpu"), name, source=folder, **settings)


def load_pairs(
    source: str | Path,
    format: str | None = None,
    *,
    extractor: str = "segments",
    dev_share: float = DEFAULT_DEV_SHARE,
    cache_dir: str | Path | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Pairs:
    """Images and captions with fragments: a named set, a folder, a JSON, features, shards.

    ``options`` are those of the source (``images=1000`` of the scenes). Images that came without
    fragments get them from ``extractor``, kept in ``cache_dir``. If the data has no dev split,
    ``dev_share`` of its training images becomes one (0: none).
    """
    require_path("load_pairs", source)
    cache, bars = Path(cache_dir or default_cache()), as_progress(progress)
    pairs = _load_pairs(source, format, options=options, cache_dir=cache, progress=bars)
    pairs = with_fragments(pairs, cache, extractor, {}, bars)
    as_given = is_named(source, format) or is_url(source)
    location = source if as_given else Path(source).resolve()
    origin: dict[str, Any] = {"source": str(location), "format": format, "options": options}
    origin["features"] = {"extractor": extractor}
    pairs = replace(pairs, origin={**origin, "dev_share": dev_share})
    return with_dev_split(pairs, dev_share)


def create(name: str, pairs: Pairs, *, seed: int = 0, **options: Any) -> Model:
    """A new model by name for a data set: ``create("rvse-mlp", pairs, embed_size=256)``.

    ``init_from="runs/a"`` gives it the weights of another run. ``seed`` is that of PyTorch's global
    generator, from which the weights are drawn, so seed your own draws after this call.
    """
    import torch

    from counterfoil.models.warm_start import start_from

    _require_pairs("create", pairs)
    torch.manual_seed(seed)
    config = build_config({"model": {"name": name, **options}}, f"create('{name}')").model
    model = create_model(config, pairs.train)
    model.fragments_from = pairs.train.fragments.made_by if pairs.train.fragments else None
    if config.init_from:
        start_from(model, config.init_from)
        model.init_from = config.init_from
    return model


def train(
    model: Model,
    pairs: Pairs,
    objective: str | Mapping[str, Any] = "hardest",
    *,
    folder: str | Path = "runs/python",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | bool | None = None,
    **settings: Any,
) -> RunResult:
    """Train a model in place; its best and last checkpoints, config and metrics go to ``folder``.

    ``settings`` are those of the ``train`` section (``epochs=5``), or whole sections as mappings
    (``data={"drop_regions": 0.2}``, ``evaluation={"folds": 5}``, ``seed=1``). Pairs without a dev
    split get one from their training images, as with `load_pairs`. ``resume=True`` continues an
    unfinished run in ``folder`` with the same model, objective and settings. Progress is shown on a
    terminal and in a notebook; ``progress=False`` shows nothing.
    """
    if not isinstance(objective, (str, Mapping)):
        raise ArgumentError(
            "train: objective: expected a name or a mapping of options, such as "
            f"{{'selhn': {{'margin': 0.3}}}}, got {short_repr(objective)}"
        )
    if not isinstance(model, Model):
        raise ArgumentError(
            f"train: expected a model that create or load made, got {short_repr(model)}"
        )
    _require_pairs("train", pairs)
    if resume and overwrite:
        raise ArgumentError("train: resume=True continues a run, overwrite=True replaces it")
    bars = as_progress(True if progress is None else progress)
    sections: dict[str, Any] = {
        key: settings.pop(key) for key in ("data", "evaluation", "seed") if key in settings
    }
    _check_data_keys(sections.get("data"))
    for split in pairs:
        if split.fragments is not None:
            model.fragments_of(split)
    spec = model.spec
    described = ModelConfig(
        name=spec.name,
        embed_size=spec.embed_size,
        ensemble_size=spec.ensemble_size,
        init_from=model.init_from,
        image=spec.image,
        text=spec.text,
        matcher=spec.matcher,
    )
    origin = pairs.origin or {"source": f"{pairs.name} (made in Python)"}
    tree: dict[str, Any] = {"model": described.model_dump(), "data": origin, "train": settings}
    tree["objective"] = objective
    config = resolve_paths(build_config(merge(tree, sections), "train"))
    if not resume:
        refuse_unread(config)
    folder = Path(folder)
    with locked_run(folder):
        if resume:
            config = _resumed(folder, model, config)
        else:
            on_first_process(lambda: make_room(folder, overwrite, EXISTING_RUN_ADVICE))
        if config.evaluation.split in DEV_NAMES:
            saved = read_dev_split(folder) if resume else None
            pairs = with_dev_split(pairs, config.data.dev_share, saved)
        pairs = with_noise(config, pairs)  # after the dev split, which stays clean
        if not resume:  # what a run began with stays as it was, also if the data have changed
            on_first_process(lambda: save_noise(config, pairs, folder))
            on_first_process(lambda: save_dev_split(folder, pairs, config.data.dev_share))
        if note := dev_note(pairs):
            bars.say(f"note: {note}")
        model.init_from = None  # further training starts from the weights of this run
        result = Trainer(model, pairs, config, folder, bars).run(resume=resume)
        if not result.interrupted:
            dev = pairs[config.evaluation.split]
            on_first_process(lambda: _measure(config, folder, dev, model.device, bars))
        return result


def _require_pairs(function: str, given: object) -> None:
    if not isinstance(given, Pairs):
        raise ArgumentError(
            f"{function}: expected all pairs of a data set, as load_pairs returns them, "
            f"got {short_repr(given)}"
        )


def _check_data_keys(data: Any) -> None:
    """Refuse keys that pairs or model decided: a config must not record what was not done."""
    for key in data if isinstance(data, Mapping) else ():
        if key in DECIDED_BEFORE_TRAINING:
            raise ArgumentError(
                f"train(data={{{key!r}: {short_repr(data[key])}}}): expected settings of "
                f"the training, not of the pairs or the model; "
                f"set it with {DECIDED_BEFORE_TRAINING[key]}"
            )


def _resumed(folder: Path, model: Model, requested: RunConfig) -> RunConfig:
    """The config to resume a run with; the model and the settings must be those of the run."""
    saved = saved_config(folder)
    started = (folder / "last").exists()  # without a checkpoint, the trainer says what to do
    changed = [f"model.{key}" for key in changed_parts(model, folder / "last")] if started else []
    vocabulary = {"min_count": saved.data.min_count, "vocabulary": saved.data.vocabulary}
    data = requested.data.model_copy(update=vocabulary)  # the model has it already
    requested = requested.model_copy(update={"model": saved.model, "data": data})
    changed += changed_settings(saved, requested)
    if changed:
        raise ConfigError(
            f"{folder}: the run was started with another {', '.join(changed)}; resume it with the "
            "settings in its config.yaml, or train with overwrite=True or in another folder"
        )
    return requested


def _measure(
    config: RunConfig, folder: Path, dev: Split, device: torch.device, progress: Progress
) -> None:
    """Keep with a run its yardstick, its rule for corrections, and what it forgot of its start."""
    best = from_pretrained(folder / "best").to(device)
    save_yardstick(folder, best, dev)
    if can_correct(best):
        save_rule(folder, best, dev, progress)
    forgetting_section(config, folder, best, dev, progress)


def build_index(
    model: Model, pairs: Pairs | Split, folder: str | Path, **settings: Any
) -> SearchIndex:
    """An index on disk of some pairs, to be searched with a sentence or an image.

    ``settings`` are those of `SearchIndex.build`: ``backend``, ``shortlist_size`` …
    """
    from counterfoil.search import SearchIndex

    require_path("build_index: folder", folder)
    return SearchIndex.build(folder, model, pairs, **settings)


def open_index(folder: str | Path, **settings: Any) -> SearchIndex:
    """An index that was built before, with the model in it."""
    from counterfoil.search import SearchIndex

    require_path("open_index", folder)
    return SearchIndex.open(folder, **settings)
