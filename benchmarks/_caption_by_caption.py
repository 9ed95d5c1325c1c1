"""Scores as the public implementations compute them: caption by caption, in words of our own.

Each function takes images [I, R, D], captions [T, W, D] and their lengths, and loops over captions,
with a context vector for every fragment of every pair. The order of the axes is that of the public
code, transpositions included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BOUNDARY = 0.2


def l2(x: Tensor, dim: int) -> Tensor:
    return x / (x.pow(2).sum(dim, keepdim=True).sqrt() + 1e-8)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(2) / (torch.norm(a, 2, 2) * torch.norm(b, 2, 2)).clamp(min=1e-8)


def repeated(caption: Tensor, length: int, images: Tensor) -> Tensor:
    return caption[:length].unsqueeze(0).repeat(len(images), 1, 1)  # [I, W, D]


def naive_scan_t2i(images: Tensor, captions: Tensor, lengths: list[int]) -> Tensor:
    """Text-to-image SCAN, LSE, λ = 9."""
    columns = []
    regions_last = images.transpose(1, 2)
    for caption, length in zip(captions, lengths, strict=True):
        words = repeated(caption, length, images)
        raw = torch.bmm(images, words.transpose(1, 2))  # [I, R, W]
        attention = l2(F.leaky_relu(raw, 0.1), 2).transpose(1, 2).contiguous()
        flat = attention.view(len(images) * length, -1)
        weights = torch.softmax(9.0 * flat, dim=1).view(len(images), length, -1)  # [I, W, R]
        by_region = weights.transpose(1, 2).contiguous()
        context = torch.bmm(regions_last, by_region).transpose(1, 2)  # [I, W, D]
        relevance = cosine(words, context)
        columns.append(torch.logsumexp(6.0 * relevance, dim=1, keepdim=True) / 6.0)
    return torch.cat(columns, 1)


def naive_scan_i2t(images: Tensor, captions: Tensor, lengths: list[int]) -> Tensor:
    """Image-to-text SCAN, LSE, λ = 4."""
    columns = []
    for caption, length in zip(captions, lengths, strict=True):
        words = repeated(caption, length, images)
        raw = torch.bmm(words, images.transpose(1, 2))  # [I, W, R]
        attention = l2(F.leaky_relu(raw, 0.1), 2).transpose(1, 2).contiguous()  # [I, R, W]
        flat = attention.view(len(images) * images.shape[1], -1)
        weights = torch.softmax(4.0 * flat, dim=1).view_as(attention)
        by_word = weights.transpose(1, 2).contiguous()
        context = torch.bmm(words.transpose(1, 2), by_word).transpose(1, 2)  # [I, R, D]
        relevance = cosine(images, context)
        columns.append(torch.logsumexp(5.0 * relevance, dim=1, keepdim=True) / 5.0)
    return torch.cat(columns, 1)


def focal(queries: Tensor, keys: Tensor) -> Tensor:
    """BFAN's cosine [I, N] of each asking fragment with the answers that get their share."""
    raw = torch.bmm(keys, queries.transpose(1, 2))  # [I, K, N]
    attention = l2(F.leaky_relu(raw, 0.1), 2).transpose(1, 2).contiguous()
    weights = torch.softmax(20.0 * attention, dim=2)  # [I, N, K]
    size = weights.shape[2]
    kept = size * weights - weights.sum(2, keepdim=True)
    weights = torch.where(kept > 0, weights, torch.zeros_like(weights))
    weights = weights / weights.sum(2, keepdim=True).clamp(min=1e-8)
    context = torch.bmm(keys.transpose(1, 2), weights.transpose(1, 2).contiguous())
    return cosine(queries, context.transpose(1, 2))


def naive_bfan(images: Tensor, captions: Tensor, lengths: list[int]) -> Tensor:
    """BFAN, both directions, every fragment trusted alike, λ = 20."""
    columns = []
    for caption, length in zip(captions, lengths, strict=True):
        words = repeated(caption, length, images)
        both = focal(words, images).mean(1, keepdim=True) + focal(images, words).mean(
            1, keepdim=True
        )
        columns.append(both)
    return torch.cat(columns, 1)


def naive_chan(images: Tensor, captions: Tensor, lengths: list[int]) -> Tensor:
    """CHAN: the best region of each word, LSE over words, β = 0.1."""
    columns = []
    for caption, length in zip(captions, lengths, strict=True):
        words = repeated(caption, length, images)
        best = torch.bmm(words, images.transpose(1, 2)).max(2).values
        columns.append(0.1 * torch.logsumexp(best / 0.1, dim=1, keepdim=True))
    return torch.cat(columns, 1)


def naive_naaf(
    images: Tensor, captions: Tensor, lengths: list[int], *, inference: bool = False
) -> Tensor:
    """NAAF, λ = 20, in training with its mining, or in inference with what words pass on.

    The boundary itself is held fixed, so that the scores can be compared; in training the samples
    for it are taken and their statistics computed after each caption, as the public code does.
    """
    columns = []
    matched: list[float] = []
    mismatched: list[float] = []
    for i, (caption, length) in enumerate(zip(captions, lengths, strict=True)):
        words = repeated(caption, length, images)
        sims = torch.bmm(words, images.transpose(1, 2))  # [I, W, R]
        shifted = sims - torch.ones_like(sims) * BOUNDARY
        closest = shifted.max(2).values
        if inference:
            alike = torch.softmax(20.0 * words @ words.transpose(1, 2), dim=2)  # [I, W, W]
            closest = torch.bmm(alike, closest.unsqueeze(2)).squeeze(2)
        negative = closest * (closest < 0).float()
        kept = torch.where(shifted > 0, torch.exp(20.0 * shifted), torch.zeros_like(shifted))
        kept = kept / (kept.sum(2, keepdim=True) + 1e-8)
        context = torch.bmm(kept, images)  # [I, W, D]
        feature = (words * context).sum(2) / torch.norm(context, 2, 2).clamp(min=1e-8)
        own = l2(sims.clamp(min=0), 1)
        flat = torch.softmax(20.0 * own.view(len(images) * length, -1), dim=1)
        relevance = (flat.view_as(sims) * sims).sum(2)
        column = (negative + feature + relevance).mean(1, keepdim=True)
        columns.append(column)
        if not inference:
            mine(sims.detach(), column.detach()[:, 0], i, matched, mismatched)
    return torch.cat(columns, 1)


def mine(sims: Tensor, column: Tensor, i: int, right: list[float], wrong: list[float]) -> None:
    if int(column.argmax()) != i:
        return
    right += sims[i].max(1).values.tolist()
    wrong += sims[int(column.argmin())].max(1).values.tolist()
    if len(right) > 200:
        for samples in (right, wrong):
            values = torch.tensor(samples)
            _ = float(values.mean()), float(values.std())
