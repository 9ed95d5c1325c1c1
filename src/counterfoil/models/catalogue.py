"""`ModelSpec`, a model as plain values, and every named model, family by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from counterfoil.core.config import ModelConfig
from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.encoders import image_encoders, text_encoders
from counterfoil.matchers import matchers

models: Registry[Callable[[], ModelSpec]] = Registry("model")

PARTS: dict[str, Registry[Any]] = {
    "image": image_encoders,
    "text": text_encoders,
    "matcher": matchers,
}


class ModelSpec(BaseModel):
    """Names and options of an image encoder, a text encoder and a matcher.

    ``ensemble_size`` copies with separate weights score as one, by the mean of their scores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "custom"
    embed_size: int = Field(1024, ge=2, le=65_536)
    image: dict[str, Any]
    text: dict[str, Any]
    matcher: dict[str, Any]
    ensemble_size: int = Field(1, ge=1, le=64)


def resolve(config: ModelConfig) -> ModelSpec:
    """The named composition with the config's changes; every option is checked."""
    base = models[config.name]()
    parts = {}
    for part, registry in PARTS.items():
        parts[part] = _merge_part(getattr(base, part), getattr(config, part), registry, part)
    return ModelSpec(
        name=config.name, embed_size=config.embed_size, ensemble_size=config.ensemble_size, **parts
    )


def _merge_part(
    base: Mapping[str, Any], change: Mapping[str, Any], registry: Registry[Any], part: str
) -> dict[str, Any]:
    name = change.get("name", base["name"])
    if not isinstance(name, str):
        raise ConfigError(f"model.{part}.name: expected a name, got {name!r}")
    known = registry.options(name)
    # A replaced part inherits the options that both parts have, such as the pooling.
    inherited = {key: value for key, value in base.items() if key in known}
    options = inherited | {key: value for key, value in change.items() if key != "name"}
    try:
        registry.check(name, options, where=f"model.{part}")
    except ConfigError as error:
        if "name" in change or not change:
            raise
        hint = f"if a recipe sets it for another model, model.{part}={{}} removes its options"
        raise ConfigError(f"{error}; {hint}") from None
    return {"name": name, **options}


def reads_pixels(spec: ModelSpec) -> bool:
    """Whether a model's image encoder reads pixels, not precomputed features."""
    return bool(getattr(image_encoders[spec.image["name"]], "reads_pixels", False))


def pixel_options(spec: ModelSpec) -> dict[str, Any] | None:
    """Options of the extractor "pixels" for a model; None for a model that reads features."""
    if not reads_pixels(spec):
        return None
    chosen = image_encoders.options(spec.image["name"]) | spec.image
    return {"model": chosen["pretrained"], "size": chosen["size"]}


def with_one_checkpoint(spec: ModelSpec) -> ModelSpec:
    """The spec with its text half from the checkpoint of the image half, unless it names one."""
    if spec.text["name"] != "dual" or spec.text.get("pretrained") or not reads_pixels(spec):
        return spec
    named = (image_encoders.options(spec.image["name"]) | spec.image)["pretrained"]
    return spec.model_copy(update={"text": {**spec.text, "pretrained": named}})


# Fragments: words and regions, compared pair by pair.


def _local(
    matcher: dict[str, Any], image: str = "fc", text: str = "bigru", **text_options: Any
) -> ModelSpec:
    """Unpooled encoders, by default those of SCAN, and a matcher of fragments."""
    return ModelSpec(
        image={"name": image, "pooling": "none"},
        text={"name": text, "pooling": "none", **text_options},
        matcher=matcher,
    )


@models.register("scan-t2i")
def scan_t2i() -> ModelSpec:
    """SCAN text-to-image: words attend to regions (Lee et al. 2018)."""
    return _local({"name": "scan-t2i"})


@models.register("scan-i2t")
def scan_i2t() -> ModelSpec:
    """SCAN image-to-text: regions attend to words (Lee et al. 2018)."""
    return _local({"name": "scan-i2t"})


@models.register("scan")
def scan() -> ModelSpec:
    """SCAN in both directions at once, on one pair of encoders (Lee et al. 2018)."""
    return _local({"name": "scan"})


@models.register("bfan")
def bfan() -> ModelSpec:
    """BFAN-equal: attention to relevant fragments only, both directions (Liu et al. 2019)."""
    return _local({"name": "bfan", "focal": "equal"})


@models.register("bfan-prob")
def bfan_prob() -> ModelSpec:
    """BFAN-prob: BFAN with fragments weighted by their confidence (Liu et al. 2019)."""
    return _local({"name": "bfan", "focal": "prob"})


@models.register("chan")
def chan() -> ModelSpec:
    """CHAN with BiGRU: self-attention over regions, best region per word (Pan et al. 2023)."""
    return _local({"name": "chan", "coding": "vha", "pooling": "lse"}, image="self-attention")


@models.register("chan-bert")
def chan_bert() -> ModelSpec:
    """CHAN with BERT: linear projection, mean of the words' best regions (Pan et al. 2023)."""
    return _local({"name": "chan", "coding": "vha", "pooling": "mean"}, text="bert")


@models.register("imram")
def imram() -> ModelSpec:
    """IMRAM: three steps of attention with a memory, both directions (Chen et al. 2020)."""
    return _local({"name": "imram"})


@models.register("naaf")
def naaf() -> ModelSpec:
    """NAAF: mismatched words count against a pair, around a learned boundary (CVPR 2022)."""
    return _local({"name": "naaf"})


@models.register("naaf-no-intra")
def naaf_no_intra() -> ModelSpec:
    """NAAF without intra-modal propagation; average it with 'naaf' for the paper's ensemble."""
    return _local({"name": "naaf", "intra": "none"})


@models.register("naaf-positive")
def naaf_positive() -> ModelSpec:
    """NAAF without its negative branch (an ablation of the paper)."""
    return _local({"name": "naaf", "negative": False})


# Graphs: graph reasoning over alignments or fragments of a pair.


@models.register("sgr")
def sgr() -> ModelSpec:
    """SGR: similarity graph reasoning over local and global alignments (Diao et al. 2021)."""
    return _local({"name": "sgr"}, dropout=0.4)


@models.register("saf")
def saf() -> ModelSpec:
    """SAF: similarity attention filtration of local and global alignments (Diao et al. 2021)."""
    return _local({"name": "saf"}, dropout=0.4)


@models.register("sgraf")
def sgraf() -> ModelSpec:
    """SGRAF: SGR and SAF on one pair of encoders, averaged (Diao et al. 2021)."""
    return _local({"name": "sgraf"}, dropout=0.4)


@models.register("gsmn")
def gsmn() -> ModelSpec:
    """GSMN-dense: region and word graphs matched with their neighbors (Liu et al. 2020)."""
    return _local({"name": "gsmn", "graph": "dense"}, dropout=0.0)


@models.register("gsmn-sparse")
def gsmn_sparse() -> ModelSpec:
    """GSMN-sparse: GSMN with words linked by the dependency parse (Liu et al. 2020)."""
    return _local({"name": "gsmn", "graph": "sparse", "parser": "rules"}, dropout=0.0)


# Embeddings: one vector per image and per text.


def _embedding(image: dict[str, Any], text: dict[str, Any]) -> ModelSpec:
    return ModelSpec(image=image, text=text, matcher={"name": "cosine"})


def _gpo(name: str, **options: Any) -> dict[str, Any]:
    """An encoder with GPO pooling."""
    return {"name": name, **options, "pooling": "gpo"}


@models.register("vse++")
def vse_pp() -> ModelSpec:
    """VSE++: linear image projection, last state of a GRU (Faghri et al. 2018)."""
    return _embedding({"name": "fc", "pooling": "mean"}, {"name": "gru"})


@models.register("vse-fc")
def vse_fc() -> ModelSpec:
    """VSE (FC): linear projection and GPO, BiGRU and GPO (SelHN figure 2a)."""
    return _embedding(_gpo("fc"), _gpo("bigru"))


@models.register("vse-mlp")
def vse_mlp() -> ModelSpec:
    """VSE (MLP): projection, bottleneck MLP with two BN layers, GPO (SelHN figure 2b)."""
    return _embedding(_gpo("mlp", residual="none", final_norm=True), _gpo("bigru"))


@models.register("rvse-mlp")
def rvse_mlp() -> ModelSpec:
    """RVSE (MLP): VSE (MLP) with a residual connection around the MLP (SelHN figure 2c)."""
    return _embedding(_gpo("mlp", residual="projected", final_norm=True), _gpo("bigru"))


@models.register("vse-infty")
def vse_infty() -> ModelSpec:
    """VSE∞ with BiGRU: projection plus MLP of the raw feature, GPO (Chen et al. 2021)."""
    return _embedding(_gpo("mlp", residual="raw"), _gpo("bigru"))


@models.register("vse-infty-bert")
def vse_infty_bert() -> ModelSpec:
    """VSE∞ with BERT as its text encoder, GPO on both sides (Chen et al. 2021)."""
    return _embedding(_gpo("mlp", residual="raw"), _gpo("bert"))


@models.register("rvse++")
def rvse_pp() -> ModelSpec:
    """RVSE++: the residual image encoder, BERT with a linear layer and GPO (SelHN section 3.4)."""
    return _embedding(_gpo("mlp", residual="projected", final_norm=True), _gpo("bert"))


@models.register("rvse++-bigru")
def rvse_pp_bigru() -> ModelSpec:
    """RVSE++ with BiGRU instead of BERT, as in the public code (one BN layer in the MLP)."""
    return _embedding(_gpo("mlp", residual="projected"), _gpo("bigru"))


def _esa(text: dict[str, Any]) -> ModelSpec:
    """The image side of VSE∞, with attention to regions per channel."""
    return _embedding({"name": "mlp", "residual": "raw", "pooling": "channel-attention"}, text)


@models.register("esa")
def esa() -> ModelSpec:
    """ESA with BiGRU: projection plus MLP, attention per channel (Zhu et al. 2023)."""
    return _esa({"name": "bigru", "dropout": 0.1, "pooling": "channel-attention"})


@models.register("esa-bert")
def esa_bert() -> ModelSpec:
    """ESA with BERT as its text encoder (Zhu et al. 2023)."""
    return _esa({"name": "bert", "pooling": {"name": "channel-attention", "dropout": 0.1}})


def _reasoning(text: dict[str, Any]) -> ModelSpec:
    return _embedding({"name": "vsrn"}, text)


def _reasoned_words(name: str) -> dict[str, Any]:
    return {"name": name, "pooling": {"name": "reasoning", "readout": "gru"}}


@models.register("vsrn")
def vsrn() -> ModelSpec:
    """VSRN: region graph and GRU, last state of a GRU over words (Li et al. 2019)."""
    return _reasoning({"name": "gru"})


@models.register("vsrn++")
def vsrn_pp() -> ModelSpec:
    """VSRN++ with BiGRU instead of BERT: graph reasoning on both sides."""
    return _reasoning(_reasoned_words("bigru"))


@models.register("vsrn++-bert")
def vsrn_pp_bert() -> ModelSpec:
    """VSRN++: graph reasoning over regions and over BERT's words (Li et al. 2022)."""
    return _reasoning(_reasoned_words("bert"))


def _related(text: str) -> ModelSpec:
    """HREM's encoders; its graph of instances is in the objective 'hrem-graph'."""
    pooling: dict[str, Any] = {"name": "relations", "dropout": 0.1}
    return _embedding(
        {"name": "mlp", "residual": "raw", "pooling": pooling}, {"name": text, "pooling": pooling}
    )


@models.register("hrem")
def hrem() -> ModelSpec:
    """HREM with BiGRU: pooling with fragment relations, on both sides (Fu et al. 2023)."""
    return _related("bigru")


@models.register("hrem-bert")
def hrem_bert() -> ModelSpec:
    """HREM with BERT as its text encoder (Fu et al. 2023)."""
    return _related("bert")


# Sets: several vectors per image and per text, for ambiguous ones.


@models.register("dive")
def dive() -> ModelSpec:
    """DivE with BiGRU: sets predicted by slots, smooth-Chamfer similarity (Kim et al. 2023)."""
    return ModelSpec(
        image={"name": "dive"}, text={"name": "dive-gru"}, matcher={"name": "smooth-chamfer"}
    )


@models.register("dive-bert")
def dive_bert() -> ModelSpec:
    """DivE with BERT: sets predicted by slots over the states of BERT (Kim et al. 2023)."""
    return ModelSpec(
        image={"name": "dive"}, text={"name": "dive-bert"}, matcher={"name": "smooth-chamfer"}
    )


# Cross-encoders: one transformer per pair, with heads for more than a score.


def _uniter(layers: int, width: int) -> ModelSpec:
    return ModelSpec(
        embed_size=width,
        image={"name": "uniter"},
        text={"name": "uniter"},
        matcher={"name": "uniter", "layers": layers},
    )


@models.register("uniter-small")
def uniter_small() -> ModelSpec:
    """UNITER-small: 4 layers, for embed_size 256; trains on two CPU cores."""
    return _uniter(4, 256)


@models.register("uniter-base")
def uniter_base() -> ModelSpec:
    """UNITER-base: 12 layers, for embed_size 768 (Chen et al. 2020)."""
    return _uniter(12, 768)


@models.register("uniter-large")
def uniter_large() -> ModelSpec:
    """UNITER-large: 24 layers, for embed_size 1024 (Chen et al. 2020)."""
    return _uniter(24, 1024)


# Dual encoders with published weights.


def _dual(pretrained: str) -> ModelSpec:
    return ModelSpec(
        image={"name": "dual", "pretrained": pretrained},
        text={"name": "dual"},
        matcher={"name": "cosine"},
    )


@models.register("clip")
def clip() -> ModelSpec:
    """CLIP, trained end to end from pixels; any matcher reads its patches and tokens."""
    return _dual("openai/clip-vit-base-patch32")


@models.register("siglip")
def siglip() -> ModelSpec:
    """SigLIP, trained end to end from pixels; any matcher reads its patches and tokens."""
    return _dual("google/siglip-base-patch16-224")
