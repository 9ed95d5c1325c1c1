"""UNITER (ChenRocks/UNITER) and TAGS-DC (LibertFan/TAGS): plain state dicts of cross-encoders."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from counterfoil.core.errors import CheckpointError
from counterfoil.core.storage.reading import read_text
from counterfoil.encoders.transformer import (
    HEAD_WIDTH,
    LAYER_NAMES,
    LAYERS,
    join_attention,
    layer_name,
)
from counterfoil.models.catalogue import ModelSpec
from counterfoil.models.importers.base import Checkpoint, Importer, importers

WORDS = "uniter.embeddings.word_embeddings.weight"
TYPES = "uniter.embeddings.token_type_embeddings.weight"
NAMES = {
    WORDS: "text_encoder.embed.weight",
    "uniter.embeddings.position_embeddings.": "text_encoder.positions.",
    f"{TYPES}[0]": "text_encoder.kind",
    f"{TYPES}[1]": "image_encoder.kind",
    "uniter.embeddings.LayerNorm.": "text_encoder.norm.",
    "uniter.img_embeddings.img_linear.": "image_encoder.feature.",
    "uniter.img_embeddings.img_layer_norm.": "image_encoder.feature_norm.",
    "uniter.img_embeddings.pos_linear.": "image_encoder.place.",
    "uniter.img_embeddings.pos_layer_norm.": "image_encoder.place_norm.",
    "uniter.img_embeddings.LayerNorm.": "image_encoder.norm.",
    "uniter.pooler.dense.": "matcher.pooler.",
    "rank_output.": "matcher.heads.rank.",
    "itm_output.": "matcher.heads.itm.",
    "disc_output.": "matcher.heads.discrimination.",
    "cls.predictions.bias": "matcher.heads.mlm.bias",
    "cls.predictions.transform.dense.": "matcher.heads.mlm.dense.",
    "cls.predictions.transform.LayerNorm.": "matcher.heads.mlm.norm.",
    "correction_output.predictions.bias": "matcher.heads.correction.bias",
    "correction_output.predictions.transform.dense.": "matcher.heads.correction.dense.",
    "correction_output.predictions.transform.LayerNorm.": "matcher.heads.correction.norm.",
}
EXTRAS = {
    "itm_output.": "itm",
    "cls.": "mlm",
    "disc_output.": "discrimination",
    "correction_output.": "correction",
}
SIZES = {(12, 768): "uniter-base", (24, 1024): "uniter-large"}


@importers.register("uniter")
class UniterImporter(Importer):
    """UNITER: the single-stream cross-encoder, fine-tuned for retrieval or only pretrained."""

    title = "UNITER"
    mark = "uniter."
    parts = ("state dict",)
    names = (NAMES,)
    # used by pretraining only
    unused = (("uniter.img_embeddings.mask_embedding.", "feat_regress.", "region_classifier."),)
    tokenizer = "bert-base-cased"

    def __init__(self, checkpoint: Checkpoint) -> None:
        state = _untied(checkpoint)
        if TYPES in state and state[TYPES].dim() == 2 and len(state[TYPES]) == 2:
            types = state.pop(TYPES)
            state |= {f"{TYPES}[{row}]": types[row] for row in range(2)}
        if "rank_output.weight" not in state and "itm_output.weight" in state:
            # pretrained only: the rank head starts from the ITM head, as in the public code
            for kind in ("weight", "bias"):
                state[f"rank_output.{kind}"] = state[f"itm_output.{kind}"][1:2]
        self.checkpoint = replace(checkpoint, states=[join_attention(state)])
        self.options = checkpoint.options
        self.image = self.text = self.checkpoint.states[0]

    def spec(self) -> ModelSpec:
        state = self.checkpoint.states[0]
        width = self.size(0, WORDS, 1)
        numbers = {key.split(".")[3] for key in state if key.startswith(f"uniter.{LAYERS}")}
        layers = self.layers(len(numbers))
        extras = [name for key, name in EXTRAS.items() if any(k.startswith(key) for k in state)]
        return ModelSpec(
            name=SIZES.get((layers, width), "custom"),
            embed_size=width,
            image={"name": "uniter"},
            text={
                "name": "uniter",
                "positions": self.size(0, "uniter.embeddings.position_embeddings.weight", 0),
            },
            matcher={
                "name": "uniter",
                "layers": layers,
                "heads": self._heads(width),
                "ffn": self.size(0, f"uniter.{LAYERS}0.intermediate.dense.weight", 0),
                "extras": extras,
                "vocabulary": len(self.embedding),
            },
        )

    @property
    def embedding(self) -> Tensor:
        self.size(0, WORDS, 1)
        return self.text[WORDS]

    @property
    def input_dim(self) -> int:
        return self.size(0, "uniter.img_embeddings.img_linear.weight", 1)

    def _heads(self, width: int) -> int:
        """Number of attention heads, from model.json or as in BERT; weights do not show it."""
        path = self.checkpoint.path
        for config in _config_paths(path):
            if config.is_file():
                return _read_heads(config, width)
        if width % HEAD_WIDTH:
            raise CheckpointError(
                f"{path}: the file does not give the number of attention heads for width {width}: "
                "put the project's model.json (num_attention_heads) beside it"
            )
        return width // HEAD_WIDTH

    def _rename(self, part: int, key: str) -> str | None:
        within = layer_name(key.removeprefix("uniter."))
        return super()._rename(part, key) if within is None else f"matcher.transformer.{within}"

    def _theirs(self, name: str) -> str:
        number, _, rest = name.removeprefix("matcher.transformer.layers.").partition(".")
        for theirs, ours in LAYER_NAMES.items():
            if name.startswith("matcher.transformer.") and rest.startswith(ours):
                return f"uniter.{LAYERS}{number}.{theirs}{rest[len(ours) :]}"
        return super()._theirs(name)


@importers.register("tags")
class TagsImporter(UniterImporter):
    """TAGS-DC: UNITER that writes foils and, from stage 2, finds and corrects wrong words."""

    title = "TAGS"
    mark = "cls.predictions."


def _untied(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The state without the decoders, which must equal the word embeddings."""
    state = dict(checkpoint.states[0])
    for key in [key for key in state if key.endswith(".predictions.decoder.weight")]:
        decoder = state.pop(key)
        if WORDS in state and not decoder.equal(state[WORDS]):
            raise CheckpointError(
                f"{checkpoint.path}: {key} differs from the word embeddings, to which the public "
                "code ties it"
            )
    return state


def _config_paths(path: Path) -> Sequence[Path]:
    """Possible paths of the public code's model.json: beside the file or in the log folder."""
    run = path.parent.parent
    return (path.with_suffix(".json"), path.parent / "model.json", run / "log" / "model.json")


def _read_heads(path: Path, width: int) -> int:
    try:
        layout = json.loads(read_text(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise CheckpointError(f"{path}: not a readable model.json (nested too deeply)") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not a readable model.json ({error})") from None
    heads = layout.get("num_attention_heads") if isinstance(layout, dict) else None
    if type(heads) is not int or heads < 1 or width % heads:
        raise CheckpointError(
            f"{path}: num_attention_heads={reprlib.repr(heads)} does not fit a model of {width} "
            "numbers"
        )
    return heads
