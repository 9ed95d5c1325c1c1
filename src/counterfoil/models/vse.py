"""The embedding family: one vector an image, one a text, compared at once."""

from __future__ import annotations

from counterfoil.models.spec import ModelSpec, models


@models.register("vse++")
def vse_pp() -> ModelSpec:
    """VSE++: linear image projection, last state of a GRU (Faghri et al. 2018)."""
    return ModelSpec(
        image={"name": "fc", "pooling": "mean"},
        text={"name": "gru"},
        matcher={"name": "cosine"},
    )


@models.register("vse-fc")
def vse_fc() -> ModelSpec:
    """VSE (FC): linear projection and GPO, BiGRU and GPO (SelHN figure 2a)."""
    return ModelSpec(
        image={"name": "fc", "pooling": "gpo"},
        text={"name": "bigru", "pooling": "gpo"},
        matcher={"name": "cosine"},
    )


@models.register("vse-mlp")
def vse_mlp() -> ModelSpec:
    """VSE (MLP): projection, bottleneck MLP with two BN layers, GPO (SelHN figure 2b)."""
    return ModelSpec(
        image={"name": "mlp", "residual": "none", "final_norm": True, "pooling": "gpo"},
        text={"name": "bigru", "pooling": "gpo"},
        matcher={"name": "cosine"},
    )


@models.register("rvse-mlp")
def rvse_mlp() -> ModelSpec:
    """RVSE (MLP): the same with a residual connection around the MLP (SelHN figure 2c)."""
    return ModelSpec(
        image={"name": "mlp", "residual": "projected", "final_norm": True, "pooling": "gpo"},
        text={"name": "bigru", "pooling": "gpo"},
        matcher={"name": "cosine"},
    )


@models.register("vse-infty")
def vse_infty() -> ModelSpec:
    """VSE∞ with BiGRU: projection plus MLP of the raw feature, GPO (Chen et al. 2021)."""
    return ModelSpec(
        image={"name": "mlp", "residual": "raw", "pooling": "gpo"},
        text={"name": "bigru", "pooling": "gpo"},
        matcher={"name": "cosine"},
    )


@models.register("vse-infty-bert")
def vse_infty_bert() -> ModelSpec:
    """VSE∞ with BERT: the same image side, a pretrained language model, GPO."""
    return ModelSpec(
        image={"name": "mlp", "residual": "raw", "pooling": "gpo"},
        text={"name": "bert", "pooling": "gpo"},
        matcher={"name": "cosine"},
    )


@models.register("rvse++")
def rvse_pp() -> ModelSpec:
    """RVSE++: the residual image encoder, BERT with a linear layer and GPO (SelHN section 3.4)."""
    return ModelSpec(
        image={"name": "mlp", "residual": "projected", "final_norm": True, "pooling": "gpo"},
        text={"name": "bert", "pooling": "gpo"},
        matcher={"name": "cosine"},
    )


@models.register("rvse++-bigru")
def rvse_pp_bigru() -> ModelSpec:
    """RVSE++ with a BiGRU for BERT, as the public code has it (one BN layer in the MLP)."""
    return ModelSpec(
        image={"name": "mlp", "residual": "projected", "pooling": "gpo"},
        text={"name": "bigru", "pooling": "gpo"},
        matcher={"name": "cosine"},
    )
