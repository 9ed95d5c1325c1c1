"""Triton kernels in which a thread scores one caption with one image, all in its registers.

For a few dozen regions this is several times as fast as tiles (`tile_kernels`): no padding, and no
communication between threads. The words of captions are interleaved
(`packing.InterleavedCaptions`), so that the threads of a warp read consecutive memory. Regions are
Python tuples of R values, unrolled at compile time; R is a compile-time constant.

Context norms are sums over the lower triangle of an image's Gram matrix, whose off-diagonal entries
are doubled beforehand. Loading an entry takes longer than multiplying by it, so a load takes four,
and each iteration handles two words of a caption, or two regions of an image: e are the weights of
the first, f of the second. If their number is odd, the last is computed twice and counted once.

Triton compiles a kernel again for sizes and addresses that are multiples of 16, unless a decorator
excludes them: the blocks of one job would need several variants, of several seconds each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from counterfoil.kernels import attention
from counterfoil.kernels.triton.instructions import ENTRIES_PER_LOAD, _read, quadratic_of_two
from counterfoil.kernels.triton.tile_kernels import _divisor

EPS = tl.constexpr(1e-8)
TIE = tl.constexpr(attention.TIE)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _among(x, otherwise, real, r, MASKED: tl.constexpr):
    """``x`` if region r is real, else ``otherwise``."""
    if MASKED:
        x = tl.where(tl.load(real + r) != 0, x, otherwise)
    return x


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "leaky":
        return tl.maximum(x, 0.1 * x)
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    return x


@triton.jit
def _ratio(along, squared, mass, norm):
    """A cosine: both parts divided by the weights' sum first, so that small weights stay exact."""
    mass = tl.maximum(mass, 1e-37)
    length = tl.sqrt(tl.maximum(squared, 0.0)) / mass * norm
    return tl.where(squared > 0, along / mass / tl.maximum(length, EPS), 0.0)


@triton.jit
def _focus(e, number, PROB: tl.constexpr, R: tl.constexpr):
    average = e[0] * 0.0
    mass = e[0] * 0.0
    for r in tl.static_range(R):
        if PROB:
            trust = tl.sqrt(e[r])
            mass += trust
            average += trust * e[r]
        else:
            average += e[r]
    if not PROB:
        mass = average * 0.0 + number
    weights = ()
    for r in tl.static_range(R):
        weights = weights + (tl.where(e[r] * mass > average * (1 - TIE), e[r], 0.0),)
    return weights


@triton.jit
def _several(value, COUNT: tl.constexpr):
    copies = ()
    for _ in tl.static_range(COUNT):
        copies = copies + (value,)
    return copies


@triton.jit
def _either(which, e, f, COUNT: tl.constexpr):
    chosen = ()
    for r in tl.static_range(COUNT):
        chosen = chosen + (tl.where(which, e[r], f[r]),)
    return chosen


@triton.jit
def _with_sums(e, at, R: tl.constexpr, STEP: tl.constexpr):
    """Weights, followed by the sum of weights times similarities, and the sum of weights."""
    along = e[0] * 0.0
    mass = e[0] * 0.0
    for r in tl.static_range(R):
        along += e[r] * _read(at + r * STEP)
        mass += e[r]
    return e + (along, mass)


@triton.jit
def _softmax_weights(
    at, inverse, real, number,
    METHOD: tl.constexpr, ACTIVATION: tl.constexpr, PROB: tl.constexpr, MASKED: tl.constexpr,
    R: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Weights of the regions for one word of each caption, in SCAN and BFAN; `_with_sums`."""
    e = ()
    for r in tl.static_range(R):
        s = _read(at + r * STRIDE)
        e = e + (_among(tl.exp2(_activate(s, ACTIVATION) * inverse[r]), 0.0, real, r, MASKED),)
    if METHOD == "bfan":
        e = _focus(e, number, PROB, R)
    return _with_sums(e, at, R, STRIDE)


@triton.jit
def _naaf_weights(
    at, inverse, real, bests, boundary, scale, shift,
    ACTIVATION: tl.constexpr, MASKED: tl.constexpr, KNOWN: tl.constexpr, R: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Weights of the regions in NAAF: zero below the boundary.

    The sums are followed by the highest similarity, which is at ``bests`` if it is KNOWN, and the
    mean by SCAN's weights.
    """
    if KNOWN:
        best = tl.load(bests) + shift
    else:
        best = inverse[0] * 0.0 - 2.0
        for r in tl.static_range(R):
            s = _read(at + r * STRIDE) + shift
            best = tl.maximum(best, _among(s, -2.0, real, r, MASKED))
    e = ()
    along = best * 0.0
    mass = best * 0.0
    average = best * 0.0
    whole = best * 0.0
    for r in tl.static_range(R):
        raw = _read(at + r * STRIDE)
        s = raw + shift
        x = tl.where(raw > boundary - shift, tl.exp((s - best) * scale), 0.0)
        x = _among(x, 0.0, real, r, MASKED)
        e = e + (x,)
        along += x * s
        mass += x
        p = _among(tl.exp2(_activate(s, ACTIVATION) * inverse[r]), 0.0, real, r, MASKED)
        average += p * s
        whole += p
    return e + (along, mass, best, average / tl.maximum(whole, 1e-30))


@triton.jit
def _near_two(near_e, near_f, bests, size, above, BC: tl.constexpr):
    """NAAF's eq. 9 for two words: the weighted mean of s − t over similar words."""
    of_e = tl.zeros([BC], tl.float32)
    of_f = of_e
    for q in range(size):
        best = tl.load(bests + q * BC) + above
        of_e += tl.load(near_e + q * BC).to(tl.float32) * best
        of_f += tl.load(near_f + q * BC).to(tl.float32) * best
    return of_e, of_f


@triton.jit
def _mismatch(close, near, PROPAGATION: tl.constexpr):
    """The negative effect of a word (NAAF's eq. 8)."""
    if PROPAGATION == "none":
        return tl.minimum(close, 0.0)
    if PROPAGATION == "soft":
        return tl.minimum(near, 0.0)
    return tl.where(near < 0, close, 0.0)


@triton.jit
def _pooled(total, mass, top, value, there, lse_scale, HOW: tl.constexpr):
    """The pooling state after one more value."""
    if HOW == "lse" or HOW == "softmax":
        fresh_top = tl.where(there, tl.maximum(top, value), top)
        old = tl.exp((top - fresh_top) * lse_scale)
        new = tl.where(there, tl.exp((value - fresh_top) * lse_scale), 0.0)
        mass = mass * old + new
        total = total * old + new * value
        top = fresh_top
    elif HOW == "max":
        top = tl.where(there, tl.maximum(top, value), top)
    else:
        total += tl.where(there, value, 0.0)
    return total, mass, top


@triton.jit
def _score(total, mass, top, count, lse_scale, HOW: tl.constexpr):
    if HOW == "lse":
        return top + tl.log(mass) / lse_scale
    if HOW == "softmax":
        return total / mass
    if HOW == "max":
        return top
    if HOW == "sum":
        return total
    return total / tl.maximum(count, 1.0)


@triton.jit(
    do_not_specialize=["first", "column", "out_width"],
    do_not_specialize_on_alignment=["triangles", "norms", "real", "out"],
)
def text_queries(
    sims, triangles, norms, spread, real, lengths, bases, sizes, spreads_at, zeros, scratch, out,
    first, column, out_width,
    boundary, scale, lse_scale, shift,
    METHOD: tl.constexpr, HOW: tl.constexpr, ACTIVATION: tl.constexpr, PROB: tl.constexpr,
    PROPAGATION: tl.constexpr, NEGATIVE: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
    R: tl.constexpr, BC: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Text queries, image keys: SCAN t2i, BFAN t2i, CHAN, NAAF; smooth-Chamfer.

    Only NAAF's similarities are stored minus ``shift``. Those in memory are of the groups from
    ``first`` on, whose words start at ``column``.
    """
    group = first + tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BC)
    base = tl.load(bases + group)
    size = tl.load(sizes + group)
    length = tl.load(lengths + group * BC + lane)
    count = length.to(tl.float32)
    block = sims + image * R * STRIDE + (base - column) + lane
    loads: tl.constexpr = (R * (R + 1) // 2 + ENTRIES_PER_LOAD - 1) // ENTRIES_PER_LOAD
    here = triangles + image * (loads * ENTRIES_PER_LOAD)
    key_mask = real + image * R
    number = 0.0
    if MASKED:
        for r in tl.static_range(R):
            number += tl.load(key_mask + r).to(tl.float32)
    else:
        number += R
    nothing = tl.zeros([BC], tl.float32)
    bests = scratch + image * STRIDE + (base - column) + lane

    # by caption: norms over its words, of each region; each word's best region
    if METHOD != "chan":
        squares = _several(nothing, R)
        for j in range(size):
            fresh = ()
            if METHOD == "naaf" and PROPAGATION != "none":
                best = nothing - 2.0
            for r in tl.static_range(R):
                s = _read(block + j * BC + r * STRIDE)
                if METHOD == "naaf" and PROPAGATION != "none":
                    best = tl.maximum(best, _among(s, -2.0, key_mask, r, MASKED))
                if METHOD == "chamfer":
                    x = tl.where(j < length, tl.exp((s - 1.0) * scale), 0.0)
                    fresh = fresh + (squares[r] + x,)
                else:
                    if METHOD == "naaf":
                        s += shift
                    x = tl.where(j < length, _activate(s, ACTIVATION), 0.0)
                    fresh = fresh + (squares[r] + x * x,)
            squares = fresh
            if METHOD == "naaf" and PROPAGATION != "none":
                tl.store(bests + j * BC, best)
        inverse = ()
        for r in tl.static_range(R):
            if METHOD == "chamfer":
                inverse = inverse + (squares[r],)
            else:
                inverse = inverse + (scale * LOG2E / _divisor(tl.sqrt(squares[r]), METHOD),)

    BY_GRAM: tl.constexpr = METHOD == "scan" or METHOD == "bfan" or METHOD == "naaf"
    VALUES: tl.constexpr = R + 4 if METHOD == "naaf" else R + 2
    total = nothing
    mass = nothing
    top = nothing - 1e30
    for j in range(0, size, 2 if BY_GRAM else 1):
        if BY_GRAM:
            e = _several(nothing, VALUES)
            f = _several(nothing, VALUES)
            # a loop, as unrolled code takes two to three times as long to compile; without
            # `e = f`, as Triton loses such an assignment between names with a common prefix
            for k in range(2):
                word = tl.minimum(j + k, size - 1) * BC
                at = block + word
                if METHOD == "naaf":
                    f = _naaf_weights(
                        at, inverse, key_mask, bests + word, boundary, scale, shift,
                        ACTIVATION, MASKED, PROPAGATION != "none", R, STRIDE,
                    )  # fmt: skip
                else:
                    f = _softmax_weights(
                        at, inverse, key_mask, number, METHOD, ACTIVATION, PROB, MASKED, R, STRIDE
                    )
                e = _either(k == 0, f, e, VALUES)
            # a loaded zero keeps the compiler from holding all of the Gram matrix in registers
            triangle = here + tl.load(zeros + j)
            squared_e, squared_f = quadratic_of_two(e, f, triangle, VALUES, R, 1)
            after = tl.minimum(j + 1, size - 1)
            norm_e = nothing + 1.0
            norm_f = norm_e
            if not UNIT:
                norm_e = tl.load(norms + base + j * BC + lane)
                norm_f = tl.load(norms + base + after * BC + lane)
            value = _ratio(e[R], squared_e, e[R + 1], norm_e)
            value_f = _ratio(f[R], squared_f, f[R + 1], norm_f)
            if METHOD == "naaf":
                value += e[R + 3]
                value_f += f[R + 3]
                if NEGATIVE:
                    near_e = nothing
                    near_f = nothing
                    if PROPAGATION != "none":
                        shares = spread + tl.load(spreads_at + group) + lane
                        near_e, near_f = _near_two(
                            shares + j * size * BC, shares + after * size * BC,
                            bests, size, shift - boundary, BC,
                        )  # fmt: skip
                    value += _mismatch(e[R + 2] - boundary, near_e, PROPAGATION)
                    value_f += _mismatch(f[R + 2] - boundary, near_f, PROPAGATION)
        elif METHOD == "chan":
            value = nothing - 1e30
            for r in tl.static_range(R):
                s = _read(block + j * BC + r * STRIDE)
                value = tl.maximum(value, _among(s, -1e30, key_mask, r, MASKED))
        else:
            powers = nothing
            for r in tl.static_range(R):
                s = _read(block + j * BC + r * STRIDE)
                powers += _among(tl.exp((s - 1.0) * scale), 0.0, key_mask, r, MASKED)
            value = 1.0 + tl.log(tl.maximum(powers, 1e-37)) / scale
        total, mass, top = _pooled(total, mass, top, value, j < length, lse_scale, HOW)
        if BY_GRAM:
            total, mass, top = _pooled(total, mass, top, value_f, j + 1 < length, lse_scale, HOW)

    score = _score(total, mass, top, count, lse_scale, HOW)
    if METHOD == "chamfer":
        back = nothing
        for r in tl.static_range(R):
            x = 1.0 + tl.log(tl.maximum(inverse[r], 1e-37)) / scale
            back += _among(x, 0.0, key_mask, r, MASKED)
        score = (score + back / tl.maximum(number, 1.0)) / 2
    usable = count * number > 0
    tl.store(out + image * out_width + group * BC + lane, tl.where(usable, score, 0.0))


@triton.jit
def _word_weights(
    at, inverse, length, count,
    METHOD: tl.constexpr, ACTIVATION: tl.constexpr, PROB: tl.constexpr, N: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Weights of each caption's words for one region; `_with_sums`."""
    e = ()
    for j in tl.static_range(N):
        s = _read(at + j * BC)
        e = e + (tl.where(j < length, tl.exp2(_activate(s, ACTIVATION) * inverse[j]), 0.0),)
    if METHOD == "bfan":
        e = _focus(e, count, PROB, N)
    return _with_sums(e, at, N, BC)


@triton.jit(
    do_not_specialize=["first", "column", "out_width"],
    do_not_specialize_on_alignment=["norms", "real", "out"],
)
def image_queries(
    sims, query_gram, norms, real, lengths, bases, query_gram_at, zeros, out,
    first, column, out_width,
    scale, lse_scale,
    METHOD: tl.constexpr, HOW: tl.constexpr, ACTIVATION: tl.constexpr, PROB: tl.constexpr,
    MASKED: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Image queries, text keys: SCAN i2t, BFAN i2t. Captions of a launch have at most N words."""
    group = first + tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BC)
    base = tl.load(bases + group)
    length = tl.load(lengths + group * BC + lane)
    count = length.to(tl.float32)
    block = sims + image * R * STRIDE + (base - column) + lane
    own = query_gram + tl.load(query_gram_at + group) + lane * ENTRIES_PER_LOAD
    key_mask = real + image * R
    nothing = tl.zeros([BC], tl.float32)

    squares = _several(nothing, N)
    for r in range(R):
        fresh = ()
        for j in tl.static_range(N):
            s = _read(block + r * STRIDE + j * BC)
            x = tl.where(j < length, _activate(s, ACTIVATION), 0.0)
            x = _among(x, 0.0, key_mask, r, MASKED)
            fresh = fresh + (squares[j] + x * x,)
        squares = fresh
    inverse = ()
    for j in tl.static_range(N):
        inverse = inverse + (scale * LOG2E / _divisor(tl.sqrt(squares[j]), METHOD),)

    total = nothing
    mass = nothing
    top = nothing - 1e30
    number = 0.0
    for r in range(0, R, 2):
        after = tl.minimum(r + 1, R - 1)
        there_e = r < R
        there_f = r + 1 < R
        if MASKED:
            there_e = tl.load(key_mask + r) != 0
            there_f = there_f & (tl.load(key_mask + after) != 0)
        number += tl.where(there_e, 1.0, 0.0) + tl.where(there_f, 1.0, 0.0)
        e = _several(nothing, N + 2)
        f = _several(nothing, N + 2)
        for k in range(2):
            at = block + tl.minimum(r + k, R - 1) * STRIDE
            f = _word_weights(at, inverse, length, count, METHOD, ACTIVATION, PROB, N, BC)
            e = _either(k == 0, f, e, N + 2)
        squared_e, squared_f = quadratic_of_two(e, f, own + tl.load(zeros + r), N + 2, N, BC)
        value_e = _ratio(e[N], squared_e, e[N + 1], tl.load(norms + image * R + r))
        value_f = _ratio(f[N], squared_f, f[N + 1], tl.load(norms + image * R + after))
        total, mass, top = _pooled(total, mass, top, value_e, there_e, lse_scale, HOW)
        total, mass, top = _pooled(total, mass, top, value_f, there_f, lse_scale, HOW)
    score = _score(total, mass, top, number, lse_scale, HOW)
    usable = count * number > 0
    tl.store(out + image * out_width + group * BC + lane, tl.where(usable, score, 0.0))
