"""SCAN (kuanghuei/SCAN), and the encoders its descendants share with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from counterfoil.models.importers.base import Importer, importers
from counterfoil.models.spec import ModelSpec

AGGREGATIONS = {"LogSumExp": "lse", "Mean": "mean", "Max": "max", "Sum": "sum"}
RAW_NORMS = {
    "clipped_l2norm": "clipped_l2norm",
    "l2norm": "l2norm",
    "clipped": "clipped",
    "softmax": "softmax",
    "no_norm": "none",
}
IMAGE_NAMES: Mapping[str, str] = {
    "fc.weight_g": "image_encoder.fc.parametrizations.weight.original0",
    "fc.weight_v": "image_encoder.fc.parametrizations.weight.original1",
    "fc.": "image_encoder.fc.",
}
TEXT_NAMES: Mapping[str, str] = {
    "embed.weight": "text_encoder.embed.weight",
    "rnn.": "text_encoder.rnn.",
}


class ScanFamily(Importer):
    """Projects on SCAN's encoders: one linear layer, an averaged GRU, fragments kept."""

    names: Sequence[Mapping[str, str]] = (IMAGE_NAMES, TEXT_NAMES)

    def spec(self) -> ModelSpec:
        name, matcher = self.matcher()
        return ModelSpec(
            name=name,
            embed_size=self.size(0, "fc.bias", 0),
            image=self.image_options(),
            text={**self.text_options(), "pooling": "none"},
            matcher=matcher,
        )

    def matcher(self) -> tuple[str, dict[str, Any]]:
        """The model's name and its matcher with options."""
        raise NotImplementedError

    def image_options(self) -> dict[str, Any]:
        kinds = {"basic": False, "weight_norm": True}
        return {
            "name": "fc",
            "pooling": "none",
            "weight_norm": self.options.choice("precomp_enc_type", kinds, absent="basic"),
            "normalise": not self.options.flag("no_imgnorm", False),
        }


@importers.register("scan")
class ScanImporter(ScanFamily):
    """SCAN: stacked cross attention, t2i or i2t."""

    title = "SCAN"
    mark = "opt.cross_attn"

    def matcher(self) -> tuple[str, dict[str, Any]]:
        options = self.options
        name = options.choice("cross_attn", {"t2i": "scan-t2i", "i2t": "scan-i2t"})
        aggregation = options.choice("agg_func", AGGREGATIONS)
        matcher: dict[str, Any] = {
            "name": name,
            "lambda_softmax": options.number("lambda_softmax"),
            "aggregation": aggregation,
            "raw_norm": options.choice("raw_feature_norm", RAW_NORMS),
        }
        if aggregation == "lse":
            matcher["lambda_lse"] = options.number("lambda_lse")
        return name, matcher
