"""The backward pass of `tile_kernels.text_queries`, recomputed from similarities.

A program handles one image and loops over a few tiles of words, so that the gradient of the image's
Gram matrix stays on the chip. Only the similarities and the score of a pair are stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from counterfoil.kernels.triton.tile_kernels import (
    _activate,
    _by_caption,
    _divisor,
    _focus,
    _pool,
    _softmax_weights,
    _to_words,
)

EPS = tl.constexpr(1e-8)


@triton.jit
def _slope(s, ACTIVATION: tl.constexpr):
    if ACTIVATION == "leaky":
        return tl.where(s >= 0, 1.0, 0.1)
    if ACTIVATION == "relu":
        return tl.where(s >= 0, 1.0, 0.0)
    return s * 0 + 1.0


@triton.jit
def _through_norm(
    E, s, d_logits, scale, METHOD: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr
):
    """Gradient of s from that of scale · x / ‖x‖, x the activated similarities of a caption."""
    x = _activate(s, ACTIVATION)
    length = tl.sqrt(_by_caption(E, x * x, PRECISION))
    divisor = _divisor(length, METHOD)
    inverse = scale / divisor
    along = _by_caption(E, d_logits * x, PRECISION)
    moves = length > (EPS if METHOD == "bfan" else 0.0)  # a divisor that is the epsilon is constant
    back = tl.where(moves, inverse * along / (divisor * tl.maximum(length, EPS)), 0.0)
    inverse, back = _to_words(E, inverse, "tf32x3"), _to_words(E, back, "tf32x3")
    return (d_logits * inverse - x * back) * _slope(s, ACTIVATION)


@triton.jit
def _through_pool(E, x, g, number, lse_scale, HOW: tl.constexpr):
    """Gradient [BW] of each word's value from that of its caption's score [BC]."""
    if HOW == "lse":
        score = _pool(E, x, number, lse_scale, "lse")
        far = tl.where(E > 0, x[:, None] - score[None, :], -1e30)
        return tl.sum(g[None, :] * tl.exp(far * lse_scale), 1)
    if HOW == "max":
        top = tl.max(tl.where(E > 0, x[:, None], -1e30), 0)
        chosen = tl.where((x[:, None] == top[None, :]) & (E > 0), 1.0, 0.0)
        share = g / tl.maximum(tl.sum(chosen, 0), 1.0)
        return tl.sum(chosen * share[None, :], 1)
    if HOW == "sum":
        return tl.sum(E * g[None, :], 1)
    return tl.sum(E * (g / tl.maximum(number, 1.0))[None, :], 1)


@triton.jit
def _to_best(s, real, best, d_best):
    """The gradient of a row's maximum, shared among those that reach it."""
    chosen = tl.where((s == best[:, None]) & real[None, :], 1.0, 0.0)
    return chosen * (d_best / tl.maximum(tl.sum(chosen, 1), 1.0))[:, None]


@triton.jit
def words_backward(
    sims, gram, norms, key_mask, segments, counts, owners, grad, d_sims, d_norms, d_gram,
    images, regions, width, grad_image, grad_caption, tiles,
    boundary, scale, lse_scale,
    METHOD: tl.constexpr, HOW: tl.constexpr, ACTIVATION: tl.constexpr, PROB: tl.constexpr,
    NEGATIVE: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = image * regions
    c = tl.arange(0, BC)
    r = tl.arange(0, BR)
    inside = r < regions
    real = inside
    if MASKED:
        real = tl.load(key_mask + start + r, mask=inside, other=0) != 0
    if METHOD != "chan":
        square = inside[:, None] & inside[None, :]
        at = r[:, None] * regions + r[None, :]
        G = tl.load(gram + start * regions + at, mask=square, other=0.0).to(tl.float32)
        dG = tl.zeros([BR, BR], tl.float32)
    for turn in range(PER):
        tile = group * PER + turn
        w = tile * BW + tl.arange(0, BW)
        live = w < tiles * BW
        E = (tl.load(segments + w, mask=live, other=BC)[:, None] == c[None, :]).to(tl.float32)
        slot = tile * BC + c
        known = slot < tiles * BC
        number = tl.load(counts + slot, mask=known, other=0).to(tl.float32)
        owner = tl.load(owners + slot, mask=known, other=0)
        g = tl.load(grad + image * grad_image + owner * grad_caption, mask=number > 0, other=0.0)
        cells = (start + r)[None, :] * width + w[:, None]
        in_tile = inside[None, :] & live[:, None]
        s = tl.load(sims + cells, mask=in_tile, other=0.0).to(tl.float32)
        if METHOD == "chan":
            best = tl.max(tl.where(real[None, :], s, -1e30), 1)
            ds = _to_best(s, real, best, _through_pool(E, best, g, number, lse_scale, HOW))
        else:
            own = tl.load(norms + w, mask=live, other=1.0)
            lengths = own
            if UNIT:
                lengths = own * 0 + 1.0
            if METHOD == "naaf":
                reach = tl.where(real[None, :], s, -2.0)
                best = tl.max(reach, 1)
                e = tl.where(reach > boundary, tl.exp((reach - best[:, None]) * scale), 0.0)
            else:
                e = _softmax_weights(E, s, real, scale, METHOD, ACTIVATION, PRECISION)
                if METHOD == "bfan":  # which weights are left is a choice without gradient
                    some_real = tl.sum(real.to(tl.float32), 0)
                    e = _focus(e, tl.full([BW], 0.0, tl.float32) + some_real, PROB)
            eG = tl.dot(e, G, input_precision=PRECISION)
            along = tl.sum(e * s, 1)
            squared = tl.sum(eG * e, 1)
            nonzero = squared > 0
            root = tl.sqrt(tl.where(nonzero, squared, 1.0))
            length = root * lengths
            cosine = tl.where(nonzero, along / tl.maximum(length, EPS), 0.0)
            d = _through_pool(E, cosine, g, number, lse_scale, HOW)
            d_along = tl.where(nonzero, d / tl.maximum(length, EPS), 0.0)
            d_length = tl.where(length > EPS, -d_along * cosine, 0.0)
            d_squared = d_length * lengths / (2 * root)
            de = d_along[:, None] * s + 2 * d_squared[:, None] * eG
            ds = d_along[:, None] * e
            if METHOD == "naaf":
                ds += de * e * scale
                p = _softmax_weights(E, s, real, scale, METHOD, ACTIVATION, PRECISION)
                p = p / tl.maximum(tl.sum(p, 1), 1e-30)[:, None]
                seen = tl.sum(p * s, 1)
                d_logits = d[:, None] * p * (s - seen[:, None])
                ds += d[:, None] * p + _through_norm(
                    E, s, d_logits, scale, METHOD, ACTIVATION, PRECISION
                )
                if NEGATIVE:
                    d_best = tl.where(best <= boundary, d, 0.0)
                    ds += _to_best(s, real, best, d_best)
            else:
                ds += _through_norm(E, s, de * e, scale, METHOD, ACTIVATION, PRECISION)
            dG += tl.dot(tl.trans(e * d_squared[:, None]), e, input_precision=PRECISION)
            if not UNIT:  # by the norm: ‖u‖ is u · u / ‖u‖
                d_own = tl.where(own > 0, d_length * root / own, 0.0)
                tl.store(d_norms + image * width + w, d_own, mask=live)
        tl.store(d_sims + cells, ds.to(d_sims.dtype.element_ty), mask=in_tile)
    if METHOD != "chan":
        rows = (group * images + image) * regions * regions
        tl.store(d_gram + rows + at, dG, mask=square)
