"""Triton kernels in which a thread has one caption and one image, and all in its registers.

For a few dozen regions this is several times as fast as tiles (`triton_scores`): nothing is padded,
no value is passed between threads. Captions stand side by side, their words interleaved
(`packing.Lanes`), so that the threads of a warp read one line of memory. Regions are Python
tuples of R values, unrolled when a kernel is compiled; R is a constant of it.

Context norms are sums over the lower triangle of an image's Gram matrix, whose entries off the
diagonal are doubled beforehand.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-8)
TIE = tl.constexpr(1e-5)


@triton.jit
def _row(at, width, R: tl.constexpr):
    """Similarities of one word of each caption with the R regions of an image."""
    s = ()
    for r in tl.static_range(R):
        s = s + (tl.load(at + r * width).to(tl.float32),)
    return s


@triton.jit
def _raise(x, RAISE: tl.constexpr):
    if RAISE == "leaky":
        return tl.maximum(x, 0.1 * x)
    if RAISE == "relu":
        return tl.maximum(x, 0.0)
    return x


@triton.jit
def _quadratic(e, triangle, R: tl.constexpr):
    """eᵀ G e from the lower triangle, row by row."""
    total = e[0] * 0.0
    for r in tl.static_range(R):
        part = e[r] * tl.load(triangle + r * (r + 1) // 2 + r)
        for q in tl.static_range(r):
            part += e[q] * tl.load(triangle + r * (r + 1) // 2 + q)
        total += part * e[r]
    return total


@triton.jit
def _ratio(along, squared, mass, norm):
    """A cosine: both parts divided by the weights' sum first, so that small weights stay exact."""
    mass = tl.maximum(mass, 1e-37)
    length = tl.sqrt(tl.maximum(squared, 0.0)) / mass * norm
    return tl.where(squared > 0, along / mass / tl.maximum(length, EPS), 0.0)


@triton.jit
def _cosine(e, s, triangle, norm, R: tl.constexpr):
    along = e[0] * s[0]
    mass = e[0]
    for r in tl.static_range(1, R):
        along += e[r] * s[r]
        mass += e[r]
    return _ratio(along, _quadratic(e, triangle, R), mass, norm)


@triton.jit
def _softmax_weights(s, inverse, real, RAISE: tl.constexpr, MASKED: tl.constexpr, R: tl.constexpr):
    e = ()
    for r in tl.static_range(R):
        x = tl.exp(_raise(s[r], RAISE) * inverse[r])
        if MASKED:
            x = tl.where(tl.load(real + r) != 0, x, 0.0)
        e = e + (x,)
    return e


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
    kept = ()
    for r in tl.static_range(R):
        kept = kept + (tl.where(e[r] * mass > average * (1 - TIE), e[r], 0.0),)
    return kept


@triton.jit
def words_ask(
    sims, triangles, norms, spread, real, lengths, bases, sizes, spreads_at, zeros, scratch, out,
    images, width, out_width,
    boundary, scale, sharpness, shift,
    METHOD: tl.constexpr, HOW: tl.constexpr, RAISE: tl.constexpr, PROB: tl.constexpr,
    GATE: tl.constexpr, NEGATIVE: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
    R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Words ask, regions answer: SCAN t2i, BFAN t2i, CHAN, NAAF; smooth-Chamfer."""
    group = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BC)
    base = tl.load(bases + group)
    size = tl.load(sizes + group)
    length = tl.load(lengths + group * BC + lane)
    count = length.to(tl.float32)
    block = sims + image * R * width + base + lane
    here = triangles + image * (R * (R + 1) // 2)
    answers = real + image * R
    number = 0.0
    if MASKED:
        for r in tl.static_range(R):
            number += tl.load(answers + r).to(tl.float32)
    else:
        number += R
    nothing = tl.zeros([BC], tl.float32)

    # by caption: norms over its words, of each region; each word's best region
    if METHOD != "chan":
        squares = ()
        for r in tl.static_range(R):
            squares = squares + (nothing,)
        for j in range(size):
            s = _row(block + j * BC, width, R)
            fresh = ()
            if METHOD == "naaf" and GATE != "none":
                best = nothing - 2.0
            for r in tl.static_range(R):
                value = s[r] + shift
                if METHOD == "chamfer":
                    x = tl.where(j < length, tl.exp((value - 1.0) * scale), 0.0)
                    fresh = fresh + (squares[r] + x,)
                else:
                    x = tl.where(j < length, _raise(value, RAISE), 0.0)
                    fresh = fresh + (squares[r] + x * x,)
                if METHOD == "naaf" and GATE != "none":
                    if MASKED:
                        best = tl.maximum(best, tl.where(tl.load(answers + r) != 0, s[r], -2.0))
                    else:
                        best = tl.maximum(best, s[r])
            squares = fresh
            if METHOD == "naaf" and GATE != "none":
                tl.store(scratch + image * width + base + j * BC + lane, best)
        inverse = ()
        for r in tl.static_range(R):
            if METHOD == "chamfer":
                inverse = inverse + (squares[r],)
            else:
                inverse = inverse + (scale / (tl.sqrt(squares[r]) + EPS),)

    total = nothing
    mass = nothing
    top = nothing - 1e30
    for j in range(size):
        there = j < length
        # a loaded zero keeps the compiler from holding all of the Gram matrix in registers
        triangle = here + tl.load(zeros + j)
        norm = nothing + 1.0
        if not UNIT:
            norm = tl.load(norms + base + j * BC + lane)
        raw = _row(block + j * BC, width, R)
        s = ()
        for r in tl.static_range(R):
            s = s + (raw[r] + shift,)
        if METHOD == "chan":
            value = nothing - 1e30
            for r in tl.static_range(R):
                if MASKED:
                    value = tl.maximum(value, tl.where(tl.load(answers + r) != 0, s[r], -1e30))
                else:
                    value = tl.maximum(value, s[r])
        elif METHOD == "chamfer":
            found = nothing
            for r in tl.static_range(R):
                x = tl.exp((s[r] - 1.0) * scale)
                if MASKED:
                    x = tl.where(tl.load(answers + r) != 0, x, 0.0)
                found += x
            value = 1.0 + tl.log(tl.maximum(found, 1e-37)) / scale
        elif METHOD == "naaf":
            best = nothing - 2.0
            for r in tl.static_range(R):
                if MASKED:
                    best = tl.maximum(best, tl.where(tl.load(answers + r) != 0, s[r], -2.0))
                else:
                    best = tl.maximum(best, s[r])
            e = ()
            for r in tl.static_range(R):
                x = tl.where(raw[r] > boundary - shift, tl.exp((s[r] - best) * scale), 0.0)
                if MASKED:
                    x = tl.where(tl.load(answers + r) != 0, x, 0.0)
                e = e + (x,)
            value = _cosine(e, s, triangle, norm, R)
            p = _softmax_weights(s, inverse, answers, RAISE, MASKED, R)
            along = nothing
            whole = nothing
            for r in tl.static_range(R):
                along += p[r] * s[r]
                whole += p[r]
            value += along / tl.maximum(whole, 1e-30)
            if NEGATIVE:
                close = best - boundary
                if GATE == "none":
                    value += tl.minimum(close, 0.0)
                else:
                    at = tl.load(spreads_at + group) + j * size * BC + lane
                    near = nothing
                    for q in range(size):
                        share = tl.load(spread + at + q * BC).to(tl.float32)
                        best_q = tl.load(scratch + image * width + base + q * BC + lane)
                        near += share * (best_q + (shift - boundary))
                    if GATE == "spread":
                        value += tl.minimum(near, 0.0)
                    else:
                        value += tl.where(near < 0, close, 0.0)
        else:
            e = _softmax_weights(s, inverse, answers, RAISE, MASKED, R)
            if METHOD == "bfan":
                e = _focus(e, number, PROB, R)
            value = _cosine(e, s, triangle, norm, R)
        if HOW == "lse" or HOW == "softmax":
            fresh_top = tl.where(there, tl.maximum(top, value), top)
            old = tl.exp((top - fresh_top) * sharpness)
            new = tl.where(there, tl.exp((value - fresh_top) * sharpness), 0.0)
            mass = mass * old + new
            total = total * old + new * value
            top = fresh_top
        elif HOW == "max":
            top = tl.where(there, tl.maximum(top, value), top)
        else:
            total += tl.where(there, value, 0.0)

    if HOW == "lse":
        score = top + tl.log(mass) / sharpness
    elif HOW == "softmax":
        score = total / mass
    elif HOW == "max":
        score = top
    elif HOW == "sum":
        score = total
    else:
        score = total / tl.maximum(count, 1.0)
    if METHOD == "chamfer":
        back = nothing
        for r in tl.static_range(R):
            x = 1.0 + tl.log(tl.maximum(inverse[r], 1e-37)) / scale
            if MASKED:
                x = tl.where(tl.load(answers + r) != 0, x, 0.0)
            back += x
        score = (score + back / tl.maximum(number, 1.0)) / 2
    usable = count * number > 0
    tl.store(out + image * out_width + group * BC + lane, tl.where(usable, score, 0.0))


@triton.jit
def regions_ask(
    sims, kin, norms, real, lengths, bases, kin_at, zeros, out,
    first, images, width, out_width,
    scale, sharpness,
    METHOD: tl.constexpr, HOW: tl.constexpr, RAISE: tl.constexpr, PROB: tl.constexpr,
    MASKED: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Regions ask, words answer: SCAN i2t, BFAN i2t. Captions of a launch have at most N words."""
    group = first + tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BC)
    base = tl.load(bases + group)
    length = tl.load(lengths + group * BC + lane)
    count = length.to(tl.float32)
    block = sims + image * R * width + base + lane
    own = kin + tl.load(kin_at + group) + lane
    answers = real + image * R
    nothing = tl.zeros([BC], tl.float32)

    squares = ()
    for j in tl.static_range(N):
        squares = squares + (nothing,)
    for r in range(R):
        fresh = ()
        for j in tl.static_range(N):
            s = tl.load(block + r * width + j * BC)
            x = tl.where(j < length, _raise(s.to(tl.float32), RAISE), 0.0)
            if MASKED:
                x = tl.where(tl.load(answers + r) != 0, x, 0.0)
            fresh = fresh + (squares[j] + x * x,)
        squares = fresh
    inverse = ()
    for j in tl.static_range(N):
        inverse = inverse + (scale / (tl.sqrt(squares[j]) + EPS),)

    total = nothing
    mass = nothing
    top = nothing - 1e30
    number = 0.0
    for r in range(R):
        there = r >= 0
        if MASKED:
            there = tl.load(answers + r) != 0
        number += tl.where(there, 1.0, 0.0)
        turn = own + tl.load(zeros + r)
        s = ()
        e = ()
        for j in tl.static_range(N):
            value = tl.load(block + r * width + j * BC).to(tl.float32)
            s = s + (value,)
            e = e + (tl.where(j < length, tl.exp(_raise(value, RAISE) * inverse[j]), 0.0),)
        if METHOD == "bfan":
            e = _focus(e, count, PROB, N)
        along = nothing
        squared = nothing
        whole = nothing
        for j in tl.static_range(N):
            along += e[j] * s[j]
            whole += e[j]
            part = nothing
            for q in tl.static_range(j + 1):
                part += e[q] * tl.load(turn + (j * (j + 1) // 2 + q) * BC).to(tl.float32)
            squared += part * e[j]
        norm = tl.load(norms + image * R + r)
        value = _ratio(along, squared, whole, norm)
        if HOW == "lse":
            fresh_top = tl.where(there, tl.maximum(top, value), top)
            mass = mass * tl.exp((top - fresh_top) * sharpness)
            mass += tl.where(there, tl.exp((value - fresh_top) * sharpness), 0.0)
            top = fresh_top
        elif HOW == "max":
            top = tl.where(there, tl.maximum(top, value), top)
        else:
            total += tl.where(there, value, 0.0)
    if HOW == "lse":
        score = top + tl.log(mass) / sharpness
    elif HOW == "max":
        score = top
    elif HOW == "sum":
        score = total
    else:
        score = total / tl.maximum(number, 1.0)
    usable = count * number > 0
    tl.store(out + image * out_width + group * BC + lane, tl.where(usable, score, 0.0))
