"""Triton kernels: scores of packed captions with images, from their word-region similarities.

A program handles one tile of words (`packing.Packing`: whole captions) and loops over a few images.
Most of a method is row-wise: one word against an image's regions. Reductions over the words of a
caption (norm, mean) are products with the tile's indicator matrix E [words, slots], on the tensor
cores. Similarities are stored as [images · regions, words], so reading a tile of words is
contiguous.

Names in the kernels: s similarities [BW words, BR regions]; e attention weights before division by
their sum, which cosines ignore.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-8)
TIE = tl.constexpr(1e-5)  # both as in kernels/attention.py, which says why


@triton.jit
def write_one(out):
    """A minimal kernel, to check whether Triton compiles and runs."""
    tl.store(out, 1)


@triton.jit
def _leaky(x):
    return tl.where(x >= 0, x, 0.1 * x)


@triton.jit
def _by_caption(E, x, PRECISION: tl.constexpr):
    """Sums over the words of each caption: [BW, BR] to [BC, BR]."""
    return tl.dot(tl.trans(E), x, input_precision=PRECISION)


@triton.jit
def _to_words(E, x, PRECISION: tl.constexpr):
    """Values of captions, repeated for each of their words: [BC, BR] to [BW, BR]."""
    return tl.dot(E, x, input_precision=PRECISION)


@triton.jit
def _total(E, x):
    """Sums over the words of each caption: [BW] to [BC]."""
    return tl.sum(E * x[:, None], 0)


@triton.jit
def _activate(s, ACTIVATION: tl.constexpr):
    """The input of SCAN's norm: leaky ReLU, ReLU, or the similarities themselves."""
    if ACTIVATION == "leaky":
        return _leaky(s)
    if ACTIVATION == "relu":
        return tl.maximum(s, 0.0)
    return s


@triton.jit
def _divisor(length, METHOD: tl.constexpr):
    """The divisor of similarities; without an added epsilon for BFAN, so that ties stay ties."""
    if METHOD == "bfan":
        return tl.maximum(length, EPS)
    return length + EPS


@triton.jit
def _softmax_weights(
    E, s, real, scale, METHOD: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr
):
    """exp(scale · x / ‖x‖ over a caption's words), 0 for padded regions; at most e^scale."""
    # BFAN compares weights: TF32 products would make equal ones differ by more than a tie
    SUMS: tl.constexpr = "ieee" if METHOD == "bfan" else PRECISION
    BACK: tl.constexpr = "ieee" if METHOD == "bfan" else "tf32x3"
    x = _activate(s, ACTIVATION)
    squares = _by_caption(E, x * x, SUMS)
    inverse = scale / _divisor(tl.sqrt(squares), METHOD)
    logits = x * _to_words(E, inverse, BACK)
    top = tl.max(tl.where(real[None, :], logits, -1e30), 1)
    return tl.where(real[None, :], tl.exp(logits - top[:, None]), 0.0)


@triton.jit
def _focus(e, number, PROB: tl.constexpr):
    """BFAN: weights (rows, not divided by their sum) without those of irrelevant fragments."""
    if PROB:
        trust = tl.sqrt(e)
        mass = tl.sum(trust, 1)
        average = tl.sum(e * trust, 1)
    else:
        mass = number
        average = tl.sum(e, 1)
    return tl.where(e * mass[:, None] > average[:, None] * (1 - TIE), e, 0.0)


@triton.jit
def _cosine(e, s, G, norms, PRECISION: tl.constexpr):
    """Cosine [BW] of each word with its attended context (by the Gram identity)."""
    along = tl.sum(e * s, 1)
    squared = tl.sum(tl.dot(e, G, input_precision=PRECISION) * e, 1)
    length = tl.sqrt(tl.maximum(squared, 0.0)) * norms
    return tl.where(squared > 0, along / tl.maximum(length, EPS), 0.0)


@triton.jit
def _pool(E, x, counts, lse_scale, HOW: tl.constexpr):
    """Pool the values of words [BW] into one per caption [BC]."""
    # code after a return is compiled as well, so no name may change its shape
    own = tl.where(E > 0, x[:, None], -1e30)
    top = tl.max(own, 0)
    if HOW == "lse":
        above = tl.sum(tl.exp((own - top[None, :]) * lse_scale), 0)
        return top + tl.log(above) / lse_scale
    if HOW == "max":
        return top
    if HOW == "sum":
        return _total(E, x)
    return _total(E, x) / tl.maximum(counts, 1.0)


@triton.jit(do_not_specialize=["images"])
def text_queries(
    sims, gram, norms, spread, key_mask, segments, counts, out,
    images, regions, width, slots_total,
    boundary, scale, lse_scale,
    METHOD: tl.constexpr, HOW: tl.constexpr, ACTIVATION: tl.constexpr, PROB: tl.constexpr,
    PROPAGATION: tl.constexpr, NEGATIVE: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Text queries, image keys: SCAN t2i, BFAN t2i, CHAN, NAAF. Scores [images, slots]."""
    tile = tl.program_id(0)
    first = tl.program_id(1) * PER
    w = tile * BW + tl.arange(0, BW)
    c = tl.arange(0, BC)
    r = tl.arange(0, BR)
    E = (tl.load(segments + w)[:, None] == c[None, :]).to(tl.float32)
    number = tl.load(counts + tile * BC + c).to(tl.float32)
    lengths = tl.load(norms + w)
    if METHOD == "naaf":
        if PROPAGATION != "none":
            wide = tl.arange(0, BW)
            own = spread + tile.to(tl.int64) * BW * BW
            P = tl.load(own + wide[:, None] * BW + wide[None, :]).to(tl.float32)
            row = tl.arange(0, 16)
    for turn in range(PER):
        image = (first + turn).to(tl.int64)
        start = image * regions
        inside = r < tl.where(image < images, regions, 0)
        s = tl.load(
            sims + (start + r)[None, :] * width + w[:, None], mask=inside[None, :], other=0.0
        ).to(tl.float32)
        real = inside
        if MASKED:
            real = tl.load(key_mask + start + r, mask=inside, other=0) != 0
        if METHOD != "chan":
            G = tl.load(
                gram + (start + r)[:, None] * regions + r[None, :],
                mask=inside[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
        if METHOD == "chan":
            best = tl.max(tl.where(real[None, :], s, -1e30), 1)
            any_real = tl.max(real.to(tl.int32), 0) > 0
            if HOW == "softmax":
                top = tl.max(tl.where(E > 0, best[:, None], -1e30), 0)
                e = tl.where(E > 0, tl.exp((best[:, None] - top[None, :]) * lse_scale), 0.0)
                score = tl.sum(e * best[:, None], 0) / tl.sum(e, 0)
            else:
                score = _pool(E, best, number, lse_scale, HOW)
            score = tl.where(any_real, score, 0.0)
        elif METHOD == "naaf":
            reach = tl.where(real[None, :], s, -2.0)
            best = tl.max(reach, 1)
            close = best - boundary
            e = tl.where(reach > boundary, tl.exp((reach - best[:, None]) * scale), 0.0)
            if UNIT:
                words = _cosine(e, s, G, tl.full([BW], 1.0, tl.float32), PRECISION)
            else:
                words = _cosine(e, s, G, lengths, PRECISION)
            p = _softmax_weights(E, s, real, scale, METHOD, ACTIVATION, PRECISION)
            words += tl.sum(p * s, 1) / tl.maximum(tl.sum(p, 1), 1e-30)
            if NEGATIVE:
                if PROPAGATION == "none":
                    words += tl.minimum(close, 0.0)
                else:
                    rows = tl.where(row[:, None] == 0, close[None, :], 0.0)
                    near = tl.sum(tl.dot(rows, P, input_precision=PRECISION), 0)
                    if PROPAGATION == "soft":
                        words += tl.minimum(near, 0.0)
                    else:
                        words += tl.where(near < 0, close, 0.0)
            score = _total(E, words) / tl.maximum(number, 1.0)
        else:
            e = _softmax_weights(E, s, real, scale, METHOD, ACTIVATION, PRECISION)
            if METHOD == "bfan":
                real_count = tl.sum(real.to(tl.float32), 0)
                e = _focus(e, tl.full([BW], 0.0, tl.float32) + real_count, PROB)
            score = _pool(E, _cosine(e, s, G, lengths, PRECISION), number, lse_scale, HOW)
        tl.store(
            out + image * slots_total + tile * BC + c,
            tl.where(number > 0, score, 0.0),
            mask=c < tl.where(image < images, BC, 0),
        )


@triton.jit(do_not_specialize=["images"])
def image_queries(
    sims, query_gram, norms, key_mask, segments, counts, out,
    images, regions, width, slots_total,
    scale, lse_scale,
    METHOD: tl.constexpr, HOW: tl.constexpr, ACTIVATION: tl.constexpr, PROB: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Image queries, text keys: SCAN i2t, BFAN i2t; and smooth-Chamfer in both directions."""
    tile = tl.program_id(0)
    first = tl.program_id(1) * PER
    w = tile * BW + tl.arange(0, BW)
    wide = tl.arange(0, BW)
    c = tl.arange(0, BC)
    r = tl.arange(0, BR)
    segment = tl.load(segments + w)
    there = segment < BC
    E = (segment[:, None] == c[None, :]).to(tl.float32)
    number = tl.load(counts + tile * BC + c).to(tl.float32)
    if METHOD != "chamfer":
        own = query_gram + tile.to(tl.int64) * BW * BW
        K = tl.load(own + wide[:, None] * BW + wide[None, :]).to(tl.float32)
    for turn in range(PER):
        image = (first + turn).to(tl.int64)
        start = image * regions
        inside = r < tl.where(image < images, regions, 0)
        s = tl.load(
            sims + (start + r)[None, :] * width + w[:, None], mask=inside[None, :], other=0.0
        ).to(tl.float32)
        real = inside
        if MASKED:
            real = tl.load(key_mask + start + r, mask=inside, other=0) != 0
        real_count = tl.sum(real.to(tl.float32), 0)
        if METHOD == "chamfer":
            sharp = tl.where(real[None, :], s, -1e30)
            top = tl.max(sharp, 1)
            smooth_max = top + tl.log(tl.sum(tl.exp((sharp - top[:, None]) * scale), 1)) / scale
            words = _total(E, tl.where(there, smooth_max, 0.0)) / tl.maximum(number, 1.0)
            # a cosine is at most 1, so that nothing overflows
            e = tl.where(there[:, None], tl.exp((s - 1.0) * scale), 0.0)
            mass = _by_caption(E, e, "tf32x3")
            back = 1.0 + tl.log(tl.maximum(mass, 1e-37)) / scale
            back = tl.sum(tl.where(real[None, :], back, 0.0), 1) / tl.maximum(real_count, 1.0)
            score = (words + back) / 2
        else:
            x = tl.where(real[None, :], _activate(s, ACTIVATION), 0.0)
            length = _divisor(tl.sqrt(tl.sum(x * x, 1)), METHOD)
            e = tl.where(there[:, None], tl.exp(x * (scale / length)[:, None]), 0.0)
            if METHOD == "bfan":
                if PROB:
                    trust = tl.sqrt(e)
                    mass = _by_caption(E, trust, "tf32x3")
                    average = _by_caption(E, e * trust, "tf32x3")
                else:
                    mass = tl.zeros([BC, BR], tl.float32) + number[:, None]
                    average = _by_caption(E, e, "tf32x3")
                average = _to_words(E, average, "tf32x3")
                relevant = e * _to_words(E, mass, "tf32x3") > average * (1 - TIE)
                e = tl.where(relevant, e, 0.0)
            along = _by_caption(E, e * s, PRECISION)
            squared = _by_caption(E, tl.dot(K, e, input_precision=PRECISION) * e, PRECISION)
            v = tl.load(norms + start + r, mask=inside, other=0.0)
            whole = tl.maximum(_by_caption(E, e, "tf32x3"), 1e-37)
            length = tl.sqrt(tl.maximum(squared, 0.0)) / whole * v[None, :]
            cosine = tl.where(squared > 0, along / whole / tl.maximum(length, EPS), 0.0)
            if HOW == "lse":
                cosine = tl.where(real[None, :], cosine, -1e30)
                top = tl.max(cosine, 1)
                above = tl.sum(tl.exp((cosine - top[:, None]) * lse_scale), 1)
                score = top + tl.log(above) / lse_scale
            elif HOW == "max":
                score = tl.max(tl.where(real[None, :], cosine, -1e30), 1)
            else:
                score = tl.sum(tl.where(real[None, :], cosine, 0.0), 1)
                if HOW == "mean":
                    score = score / tl.maximum(real_count, 1.0)
        tl.store(
            out + image * slots_total + tile * BC + c,
            tl.where(number * real_count > 0, score, 0.0),
            mask=c < tl.where(image < images, BC, 0),
        )
