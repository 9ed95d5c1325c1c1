"""GSMN: graph structured matching network (Liu et al. 2020).

Shapes: I images, T texts, W words, R regions, D width, B blocks, K kernels, H outputs of a kernel.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from counterfoil.core.errors import ArgumentError, ConfigError, DataError
from counterfoil.core.registry import refuse_unused
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.layers import xavier_linear
from counterfoil.kernels.attention import EPS, l2_over, leaky, masked_softmax
from counterfoil.kernels.weighted_sums import weighted_sums
from counterfoil.matchers.base import matchers
from counterfoil.matchers.fragment_matcher import (
    FragmentMatcher,
    aligned,
    fragments,
    single_linear,
    single_precision,
)

Form = Literal["paper", "reference"]
Graph = Literal["dense", "sparse"]
Parts = Literal["both", "visual", "textual"]

_READOUT = {
    "out_1.weight_g": "hidden.parametrizations.weight.original0",
    "out_1.weight_v": "hidden.parametrizations.weight.original1",
    "out_1.bias": "hidden.bias",
    "out_2.weight_g": "score.parametrizations.weight.original0",
    "out_2.weight_v": "score.parametrizations.weight.original1",
    "out_2.bias": "score.bias",
}
REFERENCE_KEYS = {
    "visual": _READOUT
    | {"graph_convolution_1.conv_weights.": "kernels.", "graph_convolution_1.": ""},
    "textual": _READOUT
    | {"graph_convolution_3.conv_weights.": "kernels.", "graph_convolution_3.params": "gain"},
}
"""Prefixes of weight names in the public visual and textual graph, and here."""


class StructureMatching(nn.Module):
    """The score of a graph from the matching vectors of its nodes.

    x̂_i = ‖_k σ(Σ_j w_k(i, j) W_k x_j + b_k) over the neighbors j of node i, then an MLP per node
    and the mean over nodes. In the public code (``form="reference"``) j = i in every term, so that
    nodes do not see their neighbors, and σ is omitted.
    """

    def __init__(self, blocks: int, kernels: int, hidden: int, bias: bool, form: Form) -> None:
        super().__init__()
        if hidden % kernels:
            raise ConfigError(
                f"model.matcher.hidden: {kernels} kernels do not divide {hidden} numbers"
            )
        self.count, self.biased, self.form = kernels, bias, form
        layers = [xavier_linear(blocks, hidden // kernels) for _ in range(kernels)]
        self.kernels = nn.ModuleList(layers)
        if not bias:
            for layer in layers:
                layer.register_parameter("bias", None)
        self.hidden = weight_norm(xavier_linear(hidden, hidden))
        self.score = weight_norm(xavier_linear(hidden, 1))

    def project(self, x: Tensor) -> Tensor:
        """W_k x of every node and kernel: [..., B] to [..., K, H]."""
        weights = torch.cat([layer.get_parameter("weight") for layer in self.kernels])
        return F.linear(x, weights).unflatten(-1, (self.count, -1))

    def judge(self, convolved: Tensor, nodes: Tensor) -> Tensor:
        """Score of a graph from [..., N, K, H]: the mean over its real ``nodes`` [..., N]."""
        if self.biased:
            biases = torch.stack([layer.get_parameter("bias") for layer in self.kernels])
            convolved = convolved + biases
        if self.form == "paper":
            convolved = convolved.tanh()
        hidden = self.hidden(convolved.flatten(-2)).tanh()
        with single_precision(hidden.device):
            scores = single_linear(self.score, hidden).squeeze(-1)
        return scores.masked_fill(~nodes, 0.0).sum(-1) / nodes.sum(-1).clamp(min=1)


class VisualGraph(StructureMatching):
    """Fully connected graph of regions; kernels are Gaussians of their relative positions.

    By default the weights of a kernel are normalized over the neighbors, so that the number of
    regions does not matter. The public code normalizes over the kernels.
    """

    def __init__(self, blocks: int, kernels: int, hidden: int, form: Form) -> None:
        super().__init__(blocks, kernels, hidden, form == "paper", form)
        self.mean_rho = nn.Parameter(torch.rand(kernels, 1))
        self.mean_theta = nn.Parameter((torch.rand(kernels, 1) * 2 - 1) * math.pi)
        # not near zero: the gradient of a Gaussian grows with the inverse square of its width
        self.precision_rho = nn.Parameter(0.1 + 0.9 * torch.rand(kernels, 1))
        self.precision_theta = nn.Parameter(0.1 + 0.9 * torch.rand(kernels, 1))

    def forward(self, x: Tensor, boxes: Tensor, mask: Tensor) -> Tensor:
        """Matching vectors [T, I, R, B] of regions to scores [T, I]."""
        logits = self._logits(boxes)  # [I, K, R, R]
        neighbors = mask[:, None, None, :]
        projected = self.project(x)
        if self.form == "paper":
            weights = masked_softmax(logits, neighbors)
            convolved = torch.einsum("ikrs,tiskh->tirkh", weights, projected)
        else:
            share = logits.softmax(1).masked_fill(~neighbors, 0.0).sum(-1)  # [I, K, R]
            convolved = projected * share.transpose(1, 2)[..., None]
        return self.judge(convolved, mask)

    def _logits(self, boxes: Tensor) -> Tensor:
        """Logarithm of each kernel's Gaussian of the polar coordinates between box centers."""
        boxes = boxes.to(self.mean_rho.dtype)
        centers = (boxes[..., :2] + boxes[..., 2:]) / 2
        offset = (centers[:, :, None] - centers[:, None])[:, None]  # [I, 1, R, R, 2]
        rho = torch.linalg.vector_norm(offset, dim=-1)
        theta = torch.atan2(offset[..., 0], offset[..., 1])
        if is_exporting():  # ONNX computes atan2 by division: 0 / 0
            theta = torch.where(rho > 0, theta, torch.zeros_like(theta))
        turn = (theta - self.mean_theta[..., None]).abs()
        turn = torch.minimum(turn, (2 * math.pi - turn).abs())
        far = (rho - self.mean_rho[..., None]).square()
        return -0.5 * (
            far / (1e-14 + self.precision_rho[..., None].square())
            + turn.square() / (1e-14 + self.precision_theta[..., None].square())
        )


class TextualGraph(StructureMatching):
    """Graph of words, linked by their similarity; each kernel scales the edges by its own gain.

    The public code divides by the gain again, so that its word graph has no effect.
    """

    def __init__(self, blocks: int, kernels: int, hidden: int, form: Form) -> None:
        super().__init__(blocks, kernels, hidden, bias=True, form=form)
        self.gain = nn.Parameter(torch.ones(kernels, 1))

    def forward(self, x: Tensor, edges: Tensor | None, mask: Tensor) -> Tensor:
        """Matching vectors [I, T, W, B] of words and edges [T, W, W] to scores [I, T]."""
        convolved = self.project(x)
        if edges is not None:
            convolved = torch.einsum("twv,itvkh->itwkh", edges, convolved) * self.gain
        return self.judge(convolved, mask)


@matchers.register("gsmn")
class GSMN(FragmentMatcher):
    """GSMN: matching of nodes by blocks of channels, then of their neighborhoods; two graphs.

    The score is the sum over the visual and the textual graph. Edges between words are
    softmax(λ u·u′) with ``graph="dense"``. ``"sparse"`` keeps only those of the dependencies that
    ``parser`` returns and the self-loops, with unit norm. Vectors are padded with zeros if
    ``blocks`` does not divide their width. ``form="reference"`` is the public code, in which nodes
    do not see their neighbors (see `StructureMatching`), so both graphs give the same score.
    """

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        graph: Graph = "dense",
        parts: Parts = "both",
        lambda_softmax: float = 20.0,
        blocks: int = 16,
        kernels: int = 8,
        hidden: int = 32,
        parser: str = "rules",
        form: Form = "paper",
    ) -> None:
        super().__init__(embed_size)
        self.graph, self.parser, self.form = graph, parser, form
        if form == "reference" or graph == "dense":
            mode = "form=reference" if form == "reference" else "graph=dense"
            refuse_unused(GSMN, "model.matcher", mode, parser=parser)
        self.lambda_softmax, self.blocks, self.hidden = lambda_softmax, blocks, hidden
        self.floats_per_cell = 7 + 3 * blocks
        self.visual = VisualGraph(blocks, kernels, hidden, form) if parts != "textual" else None
        self.textual = TextualGraph(blocks, kernels, hidden, form) if parts != "visual" else None
        self.needs_boxes = self.visual is not None
        self.needs_graph = self.textual is not None and graph == "sparse" and form == "paper"

    def cells_per_pair(self, words: int, regions: int) -> int:
        # per direction: the similarities of every block, and a few vectors per node
        per_node = 1 + 4 * self.hidden // self.floats_per_cell
        return 2 * (words * regions + (words + regions) * per_node)

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        if fragments(texts).dtype == next(self.parameters()).dtype == torch.float16:
            raise ArgumentError(
                "GSMN has no float16: squared norms of its blocks are too small for it; use "
                "bfloat16, or float32 weights under autocast"
            )
        scores: list[Tensor] = []
        if self.visual is not None:
            x = self._match_nodes(images, aligned(texts))  # [T, I, R, B]
            scores.append(self.visual(x, _boxes(images), images.mask).T)
        if self.textual is not None:
            x = self._match_nodes(texts, aligned(images))  # [I, T, W, B]
            scores.append(self.textual(x, self._edges(texts), texts.mask))
        return torch.stack(scores).sum(0)

    def _match_nodes(self, queries: Encoded, keys: Encoded) -> Tensor:
        """Node-level matching: cosines [A, Q, n, B] of nodes with their contexts, by block.

        The context is never built (`kernels.attention`): its inner products come from the
        similarities and Gram matrices of each block.
        """
        q, a = self._in_blocks(queries), self._in_blocks(keys)  # [B, Q, n, d], [B, A, m, d]
        sims = q.flatten(1, 2) @ a.flatten(1, 2).transpose(1, 2)
        sims = sims.view(*q.shape[:3], *a.shape[1:3])  # [B, Q, n, A, m]
        whole = fragments(queries).flatten(0, 1) @ fragments(keys).flatten(0, 1).T
        relevant = leaky(whole.view(sims.shape[1:])).masked_fill(
            ~queries.mask[:, :, None, None], 0.0
        )
        attention = l2_over(relevant, 1)  # over the query nodes, as in SCAN
        weights = masked_softmax(self.lambda_softmax * attention, keys.mask)  # [Q, n, A, m]
        products = weighted_sums(sims, weights[None]).permute(3, 1, 2, 0)  # [A, Q, n, B]
        lengths = self._context_lengths(weights, a) * q.norm(dim=-1).permute(1, 2, 0)
        return products / lengths.clamp(min=EPS)

    def _context_lengths(self, weights: Tensor, a: Tensor) -> Tensor:
        """‖Σ w a‖ in each block: [A, Q, n, B]."""
        flat = weights.permute(2, 0, 1, 3).flatten(1, 2)  # [A, Q·n, m]
        grams = (a @ a.transpose(2, 3)).permute(1, 2, 0, 3).flatten(2)  # [A, m, B·m]
        spread = (flat @ grams).view(*flat.shape[:2], self.blocks, a.shape[2])  # [A, Q·n, B, m]
        squared = weighted_sums(spread, flat[:, :, None])
        # the square root has no derivative at zero: a node without attention gets no gradient
        safe = torch.where(squared > 0, squared, torch.ones_like(squared)).sqrt()
        lengths = torch.where(squared > 0, safe, torch.zeros_like(squared))
        return lengths.unflatten(1, weights.shape[:2])

    def _in_blocks(self, encoded: Encoded) -> Tensor:
        """Fragments [N, n, D] as [B, N, n, D / B]."""
        x = fragments(encoded)
        x = F.pad(x, (0, -x.shape[-1] % self.blocks))
        x = x.reshape(*x.shape[:2], self.blocks, -1)
        return x.permute(2, 0, 1, 3).contiguous()

    def _edges(self, texts: Encoded) -> Tensor | None:
        """Weights [T, W, W] of each word's neighbors; None if they have no effect."""
        if self.form == "reference":
            return None
        u = fragments(texts)
        similarity = self.lambda_softmax * (u @ u.transpose(1, 2))
        similarity = masked_softmax(similarity, texts.mask[:, None])
        if self.graph == "dense":
            return similarity
        if texts.graph is None:
            raise DataError(
                "graph='sparse' of GSMN reads which words are linked, and these texts were not "
                "parsed: encode them with the model's own text processor, or use graph='dense'"
            )
        position = torch.arange(u.shape[1], device=u.device)
        self_loops = position[:, None] == position
        return l2_over(similarity.masked_fill(~(texts.graph | self_loops), 0.0), -1)


def _boxes(images: Encoded) -> Tensor:
    if images.boxes is None:
        raise DataError(
            "GSMN reads where regions are, but these images have no boxes: use features that have "
            "them, or only the textual graph (model.matcher.parts=textual)"
        )
    return images.boxes
