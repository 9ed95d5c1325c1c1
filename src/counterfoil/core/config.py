"""The configuration of a run: a typed tree, read from YAML recipes, with ``a.b=c`` overrides.

Importing this module does not import torch, so the command line can check a config at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from counterfoil.core.errors import CheckpointError, ConfigError, nearest
from counterfoil.core.recipes import find_recipe, parse_yaml, suggest_recipes, typed_value
from counterfoil.core.registry import short_repr
from counterfoil.core.storage.reading import RECIPE_BYTES, read_text
from counterfoil.core.unread_options import without_extended, without_replaced

MAX_SEED = 2**32 - 1
"""Largest seed that every random generator accepts."""

MAX_STEPS = 10**9
"""Largest number of steps, captions or images."""

MAX_EXTENDS = 16


class Section(BaseModel):
    """A node of the tree: immutable; unknown keys and wrong types are errors.

    Numbers are finite and bounded: a larger one is a mistake, or would exhaust memory later.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FeaturesConfig(Section):
    """How images without precomputed fragments get them."""

    extractor: str = Field("segments", description="feature extractor; needs no weights")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the extractor")


class DataConfig(Section):
    """Where images and captions come from and how they are read."""

    source: str = Field(
        "scenes",
        description="'scenes' (generated), the path of a data set, or the address of shards",
    )
    format: str | None = Field(None, description="format of the data; null: detected")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the data source")
    features: FeaturesConfig = Field(FeaturesConfig(), description="features of images without any")
    captions: Literal["all", "one", "grouped"] = Field(
        "all", description="captions per image and epoch: all, one at random, or all in one batch"
    )
    views: int = Field(1, ge=1, le=64, description="augmented copies of each item in a batch")
    noise: float = Field(0.0, ge=0.0, le=1.0, description="share of training captions shuffled")
    noise_index: str | None = Field(None, description="saved shuffle (.npy) to use instead")
    dev_share: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="share of train set aside as dev if the data have no dev split; 0: none",
    )
    min_count: int = Field(4, ge=1, le=MAX_STEPS, description="rarer words become <unk>")
    vocabulary: str | None = Field(None, description="vocabulary JSON of SCAN or NAAF to use")
    drop_regions: float = Field(
        0.0, ge=0.0, lt=1.0, description="share of fragments dropped in training"
    )
    drop_regions_varying: bool = Field(
        False, description="draw the share per image, up to drop_regions"
    )
    random_crop: float = Field(
        1.0, gt=0, le=1, description="smallest share of a picture in a training crop (pixels)"
    )
    flip: bool = Field(False, description="mirror half of the training pictures (pixels)")
    word_noise: float = Field(0.0, ge=0.0, lt=1.0, description="share of words disturbed")
    workers: int = Field(
        0,
        ge=0,
        le=256,
        description="processes that load batches; 0: none; at most one per usable core",
    )
    stream: bool | None = Field(
        None, description="read training batches shard by shard; null: if the shards are remote"
    )
    shuffle_buffer: int = Field(
        1000,
        ge=1,
        le=MAX_STEPS,
        description="images in memory from which a stream draws its batches",
    )
    features_on_gpu: bool | None = Field(
        None, description="keep all training features in GPU memory; null: if they fit"
    )


class ModelConfig(Section):
    """A named composition, and options of its parts."""

    name: str = Field("rvse-mlp", description="composition, as `counterfoil models` lists them")
    embed_size: int = Field(1024, ge=2, le=65_536, description="size of the joint space")
    ensemble_size: int = Field(
        1, ge=1, le=64, description="models trained together as an ensemble; scores are averaged"
    )
    image: dict[str, Any] = Field(default_factory=dict, description="options of the image encoder")
    text: dict[str, Any] = Field(default_factory=dict, description="options of the text encoder")
    matcher: dict[str, Any] = Field(default_factory=dict, description="options of the matcher")
    init_from: str | None = Field(
        None, description="run or model folder to load initial weights from"
    )


class OptimizerConfig(Section):
    """The optimizer and its parameter groups."""

    name: Literal["adamw", "adam", "sgd"] = Field("adamw", description="algorithm")
    lr: float = Field(5e-4, gt=0, le=100, description="learning rate")
    weight_decay: float = Field(0.01, ge=0, le=100, description="weight decay")
    no_decay: Literal["norms-and-biases"] | None = Field(
        None, description="parameters exempt from weight decay, besides scalars"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="betas of adam and adamw"
    )
    pretrained_lr_factor: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="factor on lr for pretrained parameters (BERT, CLIP); null: 0.1",
    )
    clip: float = Field(2.0, ge=0, le=1e6, description="maximum gradient norm; 0: no clipping")


class ScheduleConfig(Section):
    """How the learning rate changes."""

    name: Literal["step", "cosine", "linear", "constant"] = Field(
        "step", description="shape after warm-up"
    )
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS, description="updates of linear warm-up")
    decay_epochs: list[Annotated[int, Field(ge=0, le=MAX_STEPS)]] = Field(
        default_factory=list, description="epochs at which 'step' lowers the rate"
    )
    factor: float = Field(0.1, gt=0, le=1000, description="factor at each of these epochs")


class TrainConfig(Section):
    """The training loop."""

    epochs: int = Field(20, ge=1, le=1_000_000, description="passes over the training data")
    batch_size: int = Field(
        128,
        ge=2,
        le=65_536,
        description="pairs per batch, all negatives of each other, over all processes together",
    )
    chunk_size: int = Field(
        0,
        ge=0,
        le=65_536,
        description="pairs that a process encodes at once; 0: its whole share of a batch",
    )
    accumulate: int = Field(1, ge=1, le=65_536, description="batches per optimizer update")
    drop_last: bool = Field(True, description="drop an incomplete last batch")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: Literal["float32", "bf16", "fp16"] = Field(
        "float32", description="bf16, fp16: mixed precision"
    )
    compile: bool = Field(False, description="compile the encoders with torch.compile")
    cuda_graphs: bool | None = Field(
        None, description="run GRUs as CUDA graphs; null: yes on a GPU, unless compiled"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1 …")
    log_every: int = Field(
        10, ge=1, le=MAX_STEPS, description="steps between lines of metrics.jsonl"
    )
    save_every: int = Field(
        0, ge=0, le=MAX_STEPS, description="steps between checkpoints; 0: once per epoch"
    )
    early_stop: int = Field(
        0, ge=0, le=MAX_STEPS, description="stop after epochs without a better RSUM; 0: never"
    )
    tensorboard: bool = Field(False, description="also write TensorBoard event files")


class EvaluationConfig(Section):
    """How a run is evaluated."""

    split: str = Field("dev", description="split that selects the best checkpoint")
    max_images: int | None = Field(
        None,
        ge=1,
        le=MAX_STEPS,
        description="evaluate this many evenly spaced images after each epoch; null: all",
    )
    test_split: str = Field("test", description="split evaluated once, with the best checkpoint")
    folds: int = Field(
        0, ge=0, le=1000, description="folds to average over (5: COCO's 1K); 0: whole split"
    )
    batch_size: int = Field(256, ge=1, le=65_536, description="items encoded at a time")
    bootstrap: int = Field(1000, ge=0, le=100_000, description="resamples for confidence intervals")


class RunConfig(Section):
    """Everything that defines a run."""

    seed: int = Field(0, ge=0, le=MAX_SEED, description="random seed")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    objective: dict[str, Any] = Field(
        default_factory=lambda: {"hardest": {}},
        description="loss terms by name, each with its weight or options",
    )
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, tree: Any) -> Any:
        """Expand ``model: rvse-mlp`` and ``objective: hardest`` to mappings."""
        if not isinstance(tree, Mapping):
            return tree
        tree = dict(tree)
        if isinstance(tree.get("model"), str):
            tree["model"] = {"name": tree["model"]}
        if isinstance(tree.get("objective"), str):
            tree["objective"] = {tree["objective"]: {}}
        return tree

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


def build_config(tree: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Validate a tree of plain values; errors name the key and the nearest known one."""
    try:
        return RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ConfigError(f"{where}: " + "\n  ".join(lines)) from None


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe by name or path, apply overrides such as ``train.epochs=5``, validate.

    >>> load_config("scenes/naaf", ["train.epochs=5"]).model.name
    'naaf'
    """
    tree = without_replaced(read_recipe(Path(path)) if path is not None else {}, overrides)
    for override in overrides:
        tree = apply_override(tree, override)
    return build_config(tree, str(path) if path is not None else "overrides")


def read_recipe(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in a YAML file, merged over the recipe that its key ``extends`` names.

    ``extends`` is the name of a recipe of the package, or a path relative to this file.
    """
    if not _is_path(path):
        raise ConfigError(f"{str(path)!r}: no such recipe")
    path = find_recipe(path)
    if path.resolve() in _seen:
        raise ConfigError(f"{path}: extends itself, directly or through other recipes")
    if len(_seen) >= MAX_EXTENDS:
        raise ConfigError(f"{path}: a chain of more than {MAX_EXTENDS} recipes with 'extends'")
    try:
        tree = read_value(read_text(path, RECIPE_BYTES))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such recipe{suggest_recipes(path)} (counterfoil recipes lists those of "
            "the package)"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: not a readable recipe: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a readable recipe: {error}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: expected a mapping of keys, got {type(tree).__name__}; to train on data: "
            f"counterfoil train photos data.source={path}"
        )
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{path}: extends: expected the name of a recipe, got {short_repr(base)}")
    extended = path.parent / find_recipe(Path(base))  # recipes of the package are absolute paths
    base_tree = read_recipe(extended, (*_seen, path.resolve()))
    return merge(without_extended(base_tree, tree), tree)


def _is_path(path: Path) -> bool:
    """Whether a file can have this name: no null byte, no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``change`` over ``base``, mappings key by key; an objective is replaced as a whole."""
    merged = dict(base)
    for key, value in change.items():
        if key == "model" and isinstance(value, str):
            value = {"name": value}
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both and key != "objective" else value
    return merged


def read_value(text: str) -> Any:
    """A value as recipes write it: ``5e-4``, ``[1, 2]``, ``true``, a name."""
    return parse_yaml(text)


def apply_override(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Set one key of a tree: ``train.optimizer.lr=1e-3``, ``objective=triplet``."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"'{_cut(override)}': an override looks like train.epochs=5")
    try:
        value = typed_value(text.strip())
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"'{_cut(override)}': not a value: {error}") from None
    if keys == ["model"] and isinstance(value, str):
        keys = ["model", "name"]
    changed = node = dict(tree)
    for depth, key in enumerate(keys[:-1]):
        below = node.get(key)
        if isinstance(below, str):  # a short form: 'model: rvse-mlp', 'objective: hardest'
            below = {below: {}} if key == "objective" else {"name": below}
        elif below is not None and not isinstance(below, Mapping):
            if not (depth == 1 and keys[0] == "objective"):
                section = _cut(".".join(keys[: depth + 1]))
                raise ConfigError(f"'{_cut(override)}': '{section}' is not a section")
            below = {"weight": below}
        node[key] = dict(below or {})
        node = node[key]
    node[keys[-1]] = value
    return changed


def _explain(error: Any) -> str:
    """One validation error as a sentence with the full key."""
    keys = [str(part) for part in error["loc"]]
    path = _cut(".".join(keys)) or "(top)"
    if error["type"] == "extra_forbidden":
        in_data = keys[0] == "data" and len(keys) == 2
        of_data = f"; options of a data set are set as data.options.{keys[1]}" if in_data else ""
        return f"unknown key '{path}'{nearest_key(path)}{of_data}"
    if error["type"] == "dict_type" and keys[:-1] == ["model"] and isinstance(error["input"], str):
        return f"{path}: expected options, got a name; write {path}.name={error['input']}"
    return f"{path}: {error['msg']}, got {short_repr(error['input'])}"


def _cut(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"


def nearest_key(path: str) -> str:
    """A hint: the key of the same name in another section, or the most similar in this one."""
    section, _, name = path.rpartition(".")
    known = list(_all_keys(RunConfig))
    same = [key for key in known if key.rpartition(".")[2] == name]
    below = [key for key in same if key.startswith(f"{section}.")]
    if same:
        return nearest((below or same)[0], same)
    return nearest(path, [key for key in known if key.rpartition(".")[0] == section])


def _all_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Full keys of the settings and sections below a section."""
    for key, field in section.model_fields.items():
        yield f"{prefix}{key}"
        if hasattr(field.annotation, "model_fields"):
            yield from _all_keys(field.annotation, f"{prefix}{key}.")


MODEL_CONFIG = "config.json"
"""Configuration file of a saved model, beside its weights."""


def model_folder(folder: Path) -> Path:
    """The folder of the weights: ``best`` of a run, or the folder of a saved model itself."""
    for candidate in (folder / "best", folder):
        if (candidate / MODEL_CONFIG).is_file():
            return candidate
    if (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder}: this run has no checkpoint yet; train it to the end")
    raise CheckpointError(
        f"{folder}: neither a run nor a saved model; name a folder made by counterfoil train"
        + ("; data come after it, or as --data" if folder.exists() else "")
    )
