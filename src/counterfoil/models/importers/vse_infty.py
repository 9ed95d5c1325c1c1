"""VSE∞ (woodfrog/vse_infty, branch bigru): projection plus MLP, BiGRU, GPO on both sides."""

from __future__ import annotations

from counterfoil.errors import CheckpointError
from counterfoil.models.importers.base import Importer, importers
from counterfoil.models.spec import ModelSpec


@importers.register("vse_infty")
class VseInftyImporter(Importer):
    """VSE∞ with BiGRU over precomputed regions."""

    title = "VSE∞"
    mark = "gpool."
    names = (
        {
            "fc.": "image_encoder.fc.",
            "mlp.layers.0.": "image_encoder.mlp.narrow.",
            "mlp.layers.1.": "image_encoder.mlp.widen.",
            "mlp.bns.0.": "image_encoder.mlp.norm.",
            "gpool.": "image_encoder.joint.pool.",
        },
        {
            "embed.weight": "text_encoder.embed.weight",
            "rnn.": "text_encoder.rnn.",
            "gpool.": "text_encoder.joint.pool.",
        },
    )
    unused = (("mlp.bns.1.",), ())
    appends_mask = True

    def spec(self) -> ModelSpec:
        if any(key.startswith("bert.") for key in self.text):
            raise CheckpointError(
                f"{self.checkpoint.path}: its text encoder is BERT (the master branch), whose "
                "tokenizer is not in the checkpoint; only the bigru branch can be imported"
            )
        self.options.choice("precomp_enc_type", {"basic": "basic"}, absent="basic")
        return ModelSpec(
            name="vse-infty",
            embed_size=self.size(0, "fc.bias", 0),
            image={
                "name": "mlp",
                "residual": "raw",
                "hidden": self.size(0, "mlp.layers.0.bias", 0),
                "pooling": self._pooling(0),
                "normalise": not self.options.flag("no_imgnorm", False),
                "form": "reference",
            },
            text={**self.text_options(), "pooling": self._pooling(1)},
            matcher={"name": "cosine"},
        )

    def _pooling(self, part: int) -> dict[str, object]:
        return {
            "name": "gpo",
            "d_pe": self.size(part, "gpool.gru.weight_ih_l0", 1),
            "d_hidden": self.size(part, "gpool.gru.weight_hh_l0", 1),
        }
