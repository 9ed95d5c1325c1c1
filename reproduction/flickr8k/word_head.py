"""Teach a language model to fill masked words of captions, before it sees an image.

    python word_head.py MINILM_FOLDER CAPTIONS OUT

MiniLM, as it is published, has no head that predicts words, and such a head writes the foils of
TAGS and the corrections of TAGS-DC. This trains one, together with MiniLM's layers, on a file of
captions, one per line (also .gz), and writes a BERT with all its parts to OUT.
``model.text.pretrained=OUT`` and ``model.matcher.pretrained=OUT`` start a UNITER from it.

Captions of the end of the file are held out. What the model says of their masked words is printed
before training and after each epoch: perplexity, and the share of words that are right. A model
that always says the most frequent word stands beside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, BertForPreTraining

from counterfoil.features.pretrained import silent_loading

MASKED, KEPT, RANDOM = 0.15, 0.1, 0.1
"""BERT's shares: of tokens to predict, and of these, those shown as they are or as any other."""
BUCKET = 50
"""Batches whose captions are sorted by length together, so that they need little padding."""


class Batch(NamedTuple):
    """Masked captions, and the true tokens where one is to be predicted (elsewhere −1)."""

    ids: Tensor
    labels: Tensor
    real: Tensor


def read_captions(path: Path) -> list[str]:
    """The lines of a text file, also a compressed one, that are not empty."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in lines if line.strip()]


class Masking:
    """Draws which tokens are predicted, and what stands in their place."""

    def __init__(self, tokenizer, seed: int) -> None:
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        self.mask, self.padding = tokenizer.mask_token_id, tokenizer.pad_token_id
        self.vocabulary = len(tokenizer)
        self.draws = torch.Generator().manual_seed(seed)

    def __call__(self, captions: list[list[int]]) -> Batch:
        ids = torch.full((len(captions), max(map(len, captions))), self.padding)
        for row, tokens in zip(ids, captions, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        shares = torch.rand(ids.shape, generator=self.draws)
        shares.masked_fill_(torch.isin(ids, self.special), 2.0)
        # the token with the smallest number, so that every caption has one to predict
        predicted = (shares < MASKED) | (shares == shares.amin(1, keepdim=True)) & (shares < 1)
        labels = ids.masked_fill(~predicted, -1)
        fate = torch.rand(ids.shape, generator=self.draws)
        others = torch.randint(self.vocabulary, ids.shape, generator=self.draws)
        shown = torch.where(fate < RANDOM, others, torch.full_like(ids, self.mask))
        shown = torch.where(fate >= 1 - KEPT, ids, shown)
        return Batch(torch.where(predicted, shown, ids), labels, ids != self.padding)


def batches(captions: list[list[int]], size: int, order: random.Random) -> Iterator[list]:
    """Captions in random order, those of a batch of similar length."""
    captions = order.sample(captions, len(captions))
    for start in range(0, len(captions), size * BUCKET):
        bucket = sorted(captions[start : start + size * BUCKET], key=len)
        parts = [bucket[i : i + size] for i in range(0, len(bucket), size)]
        yield from order.sample(parts, len(parts))


def losses(model: BertForPreTraining, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each word to predict, and whether the likeliest word is the true one."""
    ids, labels, real = (part.to(device) for part in batch)
    half = device.type == "cuda"
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        states = model.bert(input_ids=ids, attention_mask=real.long()).last_hidden_state
        logits = model.cls.predictions(states[labels >= 0]).float()
    truth = labels[labels >= 0]
    return F.cross_entropy(logits, truth, reduction="none"), logits.argmax(1) == truth


@torch.no_grad()
def measure(model: BertForPreTraining, held_out: list[Batch], device: torch.device) -> dict:
    """Perplexity and accuracy, in percent, over all words to predict."""
    model.eval()
    each = [losses(model, batch, device) for batch in held_out]
    loss, right = (torch.cat(parts) for parts in zip(*each, strict=True))
    model.train()
    return {
        "perplexity": round(float(loss.double().mean().exp()), 2),
        "accuracy": round(100 * float(right.float().mean()), 2),
        "words": len(right),
    }


def by_frequency(captions: list[list[int]], held_out: list[Batch], vocabulary: int) -> dict:
    """What a model says that knows how frequent each token is, and nothing else."""
    counts = torch.ones(vocabulary, dtype=torch.float64)
    for token, count in Counter(token for tokens in captions for token in tokens[1:-1]).items():
        counts[token] += count
    truth = torch.cat([batch.labels[batch.labels >= 0] for batch in held_out])
    return {
        "perplexity": round(float((-(counts / counts.sum()).log()[truth]).mean().exp()), 2),
        "accuracy": round(100 * float((truth == counts.argmax()).float().mean()), 2),
        "words": len(truth),
    }


def optimizer_of(model: BertForPreTraining, fresh: set[str], rate: float, factor: float):
    """AdamW: what is new at the full rate, what is pretrained at a share of it."""
    groups: dict[bool, list] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if not name.startswith(("bert.pooler.", "cls.seq_relationship.")):  # no word reads them
            groups[name in fresh].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "lr": rate},
            {"params": groups[False], "lr": rate * factor},
        ],
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )


def save(model: BertForPreTraining, tokenizer, target: Path, report: dict) -> None:
    """The folder of a BERT, whole or not at all."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "words.json").write_text(json.dumps(report, indent=1) + "\n")
    part.rename(target)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of a BERT, such as MiniLM")
    parser.add_argument("captions", type=Path, help="text file, one caption per line, also .gz")
    parser.add_argument("out", type=Path, help="folder that is written")
    parser.add_argument("--epochs", type=_count, default=3)
    parser.add_argument("--batch", type=_count, default=128)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the new head")
    parser.add_argument("--factor", type=float, default=0.2, help="of that, for what is pretrained")
    parser.add_argument("--held-out", type=_count, default=2000, help="captions of the file's end")
    parser.add_argument("--most", type=_count, help="captions to train on, from the file's start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.out.exists():
        sys.exit(f"{given.out} exists already")
    if not given.source.is_dir():
        sys.exit(f"{given.source}: no folder of a language model")
    try:
        lines = read_captions(given.captions)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        sys.exit(f"{given.captions}: not readable as lines of text in UTF-8 ({error})")
    if len(lines) <= 2 * given.held_out:
        sys.exit(
            f"{given.captions}: {len(lines)} captions are too few to hold {given.held_out} out"
        )
    torch.manual_seed(given.seed)
    device = torch.device(given.device)
    tokenizer = AutoTokenizer.from_pretrained(given.source)
    encoded = tokenizer(lines, truncation=True, max_length=64)["input_ids"]
    end = len(encoded) - given.held_out
    training = encoded[: given.most or end][:end]
    fixed = Masking(tokenizer, given.seed + 1)
    held_out = [fixed(part) for part in batches(encoded[end:], given.batch, random.Random(0))]

    with silent_loading():
        model, loading = BertForPreTraining.from_pretrained(
            given.source, dtype=torch.float32, output_loading_info=True
        )
    fresh = set(loading["missing_keys"])
    model.to(device).train()
    optimizer = optimizer_of(model, fresh, given.lr, given.factor)
    total = given.epochs * sum(1 for _ in batches(training, given.batch, random.Random(0)))
    warm = max(1, min(500, total // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (total - step) / max(1, total - warm))
    )
    masking, order = Masking(tokenizer, given.seed), random.Random(given.seed)
    report = {
        "captions": len(training),
        "most frequent word": by_frequency(training, held_out, len(tokenizer)),
        "before": measure(model, held_out, device),
        "epochs": [],
    }
    print(f"most frequent word: {report['most frequent word']}", flush=True)
    print(f"before: {report['before']}", flush=True)
    step, started = 0, time.monotonic()
    for epoch in range(1, given.epochs + 1):
        for part in batches(training, given.batch, order):
            loss = losses(model, masking(part), device)[0].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 100 == 0:
                seconds = time.monotonic() - started
                print(f"  step {step}/{total}, loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
        if not loss.isfinite():
            sys.exit(f"epoch {epoch}: the loss is {loss.item()}; lower --lr")
        report["epochs"].append(measure(model, held_out, device))
        print(f"epoch {epoch}: {report['epochs'][-1]}", flush=True)
    save(model, tokenizer, given.out, report)
    print(given.out)


if __name__ == "__main__":
    main()
