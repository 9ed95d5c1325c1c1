"""What an entry of a registry comes to with given options: weights, scores, losses, features.

Everything is seeded, so two results differ only if their options do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from counterfoil.core.config import build_config
from counterfoil.data.batches.collate import Collate, ImageBatch, PairBatch, TextBatch
from counterfoil.data.batches.sampling import RankBatches
from counterfoil.data.pairs import Pairs
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor
from counterfoil.encoders import Encoded, image_encoders, poolings, text_encoders
from counterfoil.features import extractors
from counterfoil.matchers import Observation, matchers
from counterfoil.models import create_model, save_pretrained
from counterfoil.objectives import objectives
from counterfoil.training.guides.build import build_guide
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split
from tests.encoders.test_parity import vocabulary
from tests.features.tiny_networks import picture, save_network
from tests.models.duals import PATCH, save_dual
from tests.models.test_model_bert_parts import save as save_bert
from tests.objectives.cases import make_case
from tests.training.trained_runs import save_teacher

DIM = 16
CROSS = {
    "name": "uniter-small",
    "embed_size": DIM,
    "text": {"positions": 16},
    "matcher": {"layers": 1, "heads": 2, "extras": ["mlm", "discrimination", "correction"]},
}
Result = dict[str, Any]
Options = Mapping[str, Any]


class Stages:
    """A result in parts, each computed when a comparison first needs it."""

    def __init__(self, parts: Iterable[Result]) -> None:
        self.rest = iter(parts)
        self.computed: list[Result] = []
        self[0]

    def __getitem__(self, number: int) -> Result | None:
        """A part, or None after the last one."""
        while len(self.computed) <= number:
            part = next(self.rest, None)
            if part is None:
                return None
            self.computed.append(part)
        return self.computed[number]


def differs(one: Stages, other: Stages) -> bool:
    """Whether any part differs: most options have an effect in the first one."""
    number = 0
    while (mine := one[number]) is not None and (theirs := other[number]) is not None:
        if _part_differs(mine, theirs):
            return True
        number += 1
    return one[number] is not other[number]  # one has more parts


def _part_differs(one: Result, other: Result) -> bool:
    """Whether two results have other parts, shapes or (beyond rounding) other numbers."""
    if one.keys() != other.keys():
        return True
    return any(_value_differs(one[key], other[key]) for key in one)


def _value_differs(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return bool(one != other)
    if one.shape != other.shape:
        return True
    if not one.size or one.dtype == object:
        return False
    scale = max(1e-3, float(np.nan_to_num(np.abs(one)).max()))
    return not np.allclose(one, other, rtol=0, atol=1e-6 * scale, equal_nan=True)


def state(prefix: str, module: nn.Module) -> Result:
    """Weights and buffers, and which of them learn, at which share of the learning rate."""
    result: Result = {f"{prefix}/{k}": _array(v) for k, v in module.state_dict().items()}
    for owner, part in module.named_modules():
        rate = getattr(part, "rate_factor", None)
        if rate is not None:
            result |= {f"{owner}.{k}/rate": rate(k) for k, _ in part.named_parameters()}
        result[f"{owner}/loaded"] = sorted(getattr(part, "pretrained", ()))
    return result | {f"{k}/learns": p.requires_grad for k, p in module.named_parameters()}


def _array(value: Any) -> Any:
    """A tensor as numbers; what modules save besides tensors, as text."""
    return value.detach().double().numpy() if isinstance(value, Tensor) else str(value)


def _encoded(prefix: str, encoded: Encoded) -> Result:
    parts = {k: getattr(encoded, k) for k in ("fragments", "pooled", "residuals")}
    return {f"{prefix}/{k}": _array(v) for k, v in parts.items() if v is not None}


def _of_module(module: nn.Module, forward: Callable[[], Result], total: Callable[[], Tensor]):
    """First weights, results in evaluation and in training, gradients, buffers after a step."""
    result = state("first", module)
    module.eval()
    with torch.no_grad():
        result |= {f"eval/{k}": v for k, v in forward().items()}
    module.train()
    torch.manual_seed(1)
    loss = total()
    if loss.requires_grad:
        loss.backward()
    result |= {
        f"{k}/grad": _array(p.grad) for k, p in module.named_parameters() if p.grad is not None
    }
    return result | {f"after/{k}": _array(v) for k, v in module.named_buffers()}


def _blend(encoded: Encoded) -> Tensor:
    """One number that depends on everything an encoder gives."""
    values = [v for v in (encoded.fragments, encoded.pooled, encoded.residuals) if v is not None]
    return torch.stack([(v * torch.linspace(-1, 1, v.shape[-1])).sum() for v in values]).sum()


def side(lengths: list[int], seed: int, width: int = DIM) -> Encoded:
    """Fragments with a common part, so that attention finds something; boxes and links too."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(len(lengths), 3, width, generator=torch.Generator().manual_seed(99))
    longest = max(lengths)
    x = torch.randn(len(lengths), longest, width, generator=generator)
    which = torch.randint(3, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    x = nn.functional.normalize(0.7 * x + shared.take_along_dim(which[..., None], 1), dim=-1)
    boxes = torch.rand(len(lengths), longest, 4, generator=generator).sort(-1).values
    links = torch.rand(len(lengths), longest, longest, generator=generator) < 0.4
    links = (links | links.mT) & mask[:, None] & mask[..., None]
    x = x * mask[..., None]
    return Encoded(x, mask, nn.functional.normalize(x.sum(1), dim=-1), boxes, links)


def pooling(name: str, options: Options) -> Result:
    torch.manual_seed(0)
    pool = poolings.create(name, options, DIM)
    items = side([7, 3, 6], 0)

    def pooled() -> Tensor:
        made = pool(items.fragments, items.mask)
        return made if isinstance(made, Tensor) else made[0]

    weights = torch.linspace(-1, 1, DIM)
    return _of_module(pool, lambda: {"it": _array(pooled())}, lambda: (pooled() * weights).sum())


def image_encoder(name: str, options: Options) -> Result:
    torch.manual_seed(0)
    encoder = image_encoders.create(name, options, 3 * PATCH**2 if name == "dual" else 12, DIM)
    items = side([6, 3, 5], 0, 12)
    batch = ImageBatch(2 * items.fragments, items.mask, items.boxes)
    if name == "dual":
        count = (options.get("size") or 16) // PATCH
        pixels = torch.arange(2 * count**2 * 3 * PATCH**2).reshape(2, count**2, -1) % 251
        batch = ImageBatch(pixels.byte(), torch.ones(2, count**2, dtype=torch.bool))
    return _of_module(
        encoder, lambda: _encoded("it", encoder(batch)), lambda: _blend(encoder(batch))
    )


def text_encoder(name: str, options: Options) -> Result:
    torch.manual_seed(0)
    text: TextProcessor = vocabulary(20)
    folder = options.get("pretrained")
    if folder:
        text = HuggingFaceText.from_pretrained(folder)
    encoder = text_encoders.create(name, options, text, DIM)
    ids = torch.tensor([[2, 7, 9, 11, 5, 3], [2, 8, 3, 0, 0, 0], [2, 6, 13, 9, 3, 0]])
    batch = TextBatch(ids, ids != 0)
    made = _of_module(
        encoder, lambda: _encoded("it", encoder(batch)), lambda: _blend(encoder(batch))
    )
    return made | {"longest": getattr(text, "max_length", 0)}


def matcher(name: str, options: Options) -> Result:
    """Scores before, during and after batches of two epochs that it may learn from by watching."""
    torch.manual_seed(0)
    made = matchers.create(name, options, DIM)
    regions = [options.get("slots", 36)] * 4 if "slots" in matchers.options(name) else [6, 3, 5, 4]
    images, texts = side(regions, 0), side([4, 5, 2, 6], 1)
    result = state("first", made)
    result |= {"parser": made.parser}
    with torch.no_grad():
        result["eval"] = _array(made.eval()(images, texts))
    made.train()
    torch.manual_seed(1)
    positives = torch.eye(4).bool()
    for number, epoch in enumerate((0, 0, 1)):
        shifted = replace(texts, fragments=texts.fragments * (1 + 0.1 * number))
        scores = made(images, shifted)
        made.observe(Observation(images, shifted, positives + 0.1 * scores, positives, 0, epoch))
        result[f"train/{number}"] = _array(scores)
        result[f"learned/{number}"] = str(made.diagnostics())
    if scores.requires_grad:
        (scores * torch.linspace(-1, 1, 4)).sum().backward()
    result |= _gradients("grad", made.named_parameters())
    with torch.no_grad():
        result["after"] = _array(made.eval()(images, texts))
    return result | {f"after/{k}": _array(v) for k, v in made.named_buffers()}


def score_objective(name: str, options: Options) -> Result:
    """Losses and gradients of batches at several epochs, for objectives that read scores alone."""
    torch.manual_seed(0)
    objective = objectives.create(name, options)
    result = state("first", objective)
    shapes: list[tuple[list[int], float, float]] = [
        ([0, 1, 2, 3, 4, 5], 0.3, 0.0),
        ([0, 0, 1, 2, 2, 3], 0.6, 0.3),
    ]
    for epoch in (0, 1):
        for number, (owners, scale, protected) in enumerate(shapes):
            case = make_case(owners, scale=scale, protected=protected, seed=number)
            scores = (case.scores + 0.4 * case.positives).requires_grad_()
            torch.manual_seed(1)
            report = objective.compute(scores, case.positives, replace(case.context, epoch=epoch))
            report.loss.backward()
            result[f"loss/{epoch}/{number}"] = _array(report.loss)
            result[f"grad/{epoch}/{number}"] = _array(scores.grad)
    return result


def small_pairs(folder: Path) -> Pairs:
    """A training split in which two images share a caption, and others are nearly alike."""
    splits = {
        n: make_split(folder, n, k, s) for s, (n, k) in enumerate({"train": 12, "dev": 3}.items())
    }
    train = splits["train"]
    captions = [list(texts) for texts in train.captions]
    for number in range(4):
        captions[number + 1][0] = captions[0][0]
        captions[number + 6][1] = captions[number + 7][1].replace(" near", ", all near")
    splits["train"] = replace(train, captions=captions)
    return Pairs("few", splits)


def training(tree: Mapping[str, Any], pairs: Pairs, folder: Path) -> Iterator[Result]:
    """The first step of two epochs of a run: losses, gradients, and what the objective learned."""
    settings = build_config(tree)
    torch.manual_seed(settings.seed)
    model = create_model(settings.model, pairs.train, settings.data)
    run = Trainer(model, pairs, settings, folder)
    result = state("objective", run.objective) | state("model", model)
    for epoch in range(2):
        torch.manual_seed(epoch)  # the second epoch may be asked for after other runs
        run.survey.epoch = epoch
        run.objective.begin_epoch(epoch, run.survey)
        run.step_module.train()
        indices = next(iter(RankBatches(run.batches.plan, epoch)))
        batch = Collate(model.text.pad)([run.batches.items[index] for index in indices])
        assert isinstance(batch, PairBatch)
        torch.manual_seed(epoch)
        if run.trials is not None:
            run.objective.before_step(run.trials.of(batch, epoch, 0.05), epoch)
        run.step_module.zero_grad()
        loss, _ = run.step_module(batch, epoch, epoch)
        if loss.requires_grad:
            loss.backward()
        result["loss"] = _array(loss)
        result["items"] = sorted(batch.image_ids.tolist())
        result |= _gradients("grad", run.step_module.named_parameters())
        yield result | {f"after/{k}": _array(v) for k, v in run.objective.state_dict().items()}
        result = {}


def _gradients(prefix: str, named: Iterable[tuple[str, nn.Parameter]]) -> Result:
    return {f"{prefix}/{k}": _array(p.grad) for k, p in named if p.grad is not None}


def extractor(name: str, options: Options) -> Result:
    """Fragments of two pictures, one wide and one high, and what the extractor says of itself."""
    tool = extractors.create(name, options)
    result: Result = {}
    for number, size in enumerate([(56, 40), (40, 64)]):
        made = tool.extract(picture(number, *size))
        result[f"features/{number}"] = np.asarray(made.features, dtype=np.float64)
        result[f"boxes/{number}"] = np.asarray(made.boxes, dtype=np.float64)
    return result


def folders(root: Path, pairs: Pairs) -> dict[str, str]:
    """Small pretrained networks on disk, for the options that name one."""
    from transformers import BertForMaskedLM

    glove = root / "vectors.txt"
    rows = [
        " ".join([f"w{i}", *(f"{(7 * i + 3 * k) % 11 / 10:.1f}" for k in range(5))])
        for i in range(12)
    ]
    glove.write_text("\n".join(rows) + "\n", encoding="utf-8")
    (root / "runs").mkdir()
    split = pairs.train
    runs = [root / "runs" / name for name in ("vse", "vse2", "cross")]
    save_teacher(split, runs[0])
    save_teacher(split, runs[1], seed=3)
    cross = build_config({"model": CROSS, "data": {"min_count": 1}})
    torch.manual_seed(4)
    save_pretrained(create_model(cross.model, split, cross.data), runs[2])
    for number in (0, 1):
        build_guide(root / f"guide{number}", [runs[number]], split)
    return {
        **{path.name.upper(): str(path) for path in runs},
        **{f"GUIDE{number}": str(root / f"guide{number}") for number in (0, 1)},
        "CLIP": str(save_dual(root / "clip", "clip")),
        "SIGLIP": str(save_dual(root / "siglip", "siglip")),
        "BERT": str(save_bert(root / "bert", BertForMaskedLM)[0]),
        "BERT2": str(save_bert(root / "bert2", BertForMaskedLM, seed=5)[0]),
        "VIT": str(save_network(root / "vit", "vit")),
        "DINO": str(save_network(root / "dinov2", "dinov2")),
        "DETR": str(save_network(root / "detr", "detr")),
        "GLOVE": str(glove),
    }
