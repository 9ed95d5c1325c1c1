"""TAGS and TAGS-DC: a model learns from negative captions that it generates (Fan et al. 2022).

Equation numbers are the paper's. A masked language model (eq. 1) fills masked captions (eq. 2), and
the fillings that score highest (eq. 3 and 5) are negatives (eq. 6). TAGS-DC adds word
discrimination (eq. 7) and word correction (eq. 8). Retrieval among real captions (eq. 4) is the
objective `hard-candidates`; the weighted sum (eq. 9) is the configuration of all of them.

In eq. 6, the public code scores the true caption from a wrong sequence (its first token, repeated);
here the positive is the score of the true caption. `MLM` trains eq. 1 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.distributed import sum_over_processes
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.core.registry import refuse_unused
from counterfoil.data.batches.collate import TextBatch
from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.cross_encoder import CrossEncoder, CrossStates
from counterfoil.objectives.base import Context, LossReport, Objective, at_least_float32, objectives
from counterfoil.objectives.foils import pair_images
from counterfoil.objectives.services import (
    BatchServices,
    Generated,
    Generator,
    GeneratorOptions,
    MaskedBatch,
    MaskShare,
    MaskUnit,
    RunSetup,
)

UNLABELED = -1
"""The label of a token without a loss."""

CLASS_WEIGHTS = (1.0, 0.11)
"""TAGS' weights of replaced and of original words, as there are many more of the latter."""


# Losses of words are unreduced, one number per word: callers average over different words.
def word_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each labeled token, in order (eq. 1 and 8).

    ``logits`` [..., V], ``labels`` [...] with −1 for tokens without a loss.

    >>> word_losses(torch.zeros(1, 2, 4), torch.tensor([[-1, 3]]))
    tensor([1.3863])
    """
    labeled = labels != UNLABELED
    return F.cross_entropy(logits[labeled], labels[labeled], reduction="none")


def discrimination_losses(
    logits: Tensor,
    ids: Tensor,
    true_ids: Tensor,
    mask: Tensor,
    weights: tuple[float, float] = CLASS_WEIGHTS,
) -> Tensor:
    """Weighted negative log-likelihood of "replaced" or "original" of each real token (eq. 7).

    ``logits`` [n, W, 2]; a token of ``ids`` [n, W] is original if it equals that of ``true_ids``.
    Weights scale the losses; as in TAGS, the mean is over tokens, not over weights.
    """
    original = (ids == true_ids).expand(mask.shape)[mask]
    losses = F.cross_entropy(logits[mask], original.long(), reduction="none")
    replaced_weight, original_weight = weights
    return losses * torch.where(original, original_weight, replaced_weight)


@dataclass(frozen=True)
class ScoredFoils:
    """Foils with the tokens they replaced, and the model's scores and states of them.

    ``owners`` [F] is the index of the caption that each of the ``foils`` comes from. ``labels``
    [F, W] are the true tokens at masked positions. ``true`` [B] are the scores of the captions,
    ``scores`` [F] those of the foils; they and the optional ``states`` of foils have gradients.
    """

    foils: TextBatch
    labels: Tensor
    owners: Tensor
    true: Tensor
    scores: Tensor
    states: CrossStates | None = None

    @property
    def gaps(self) -> Tensor:
        """How far captions score above their foils [F]."""
        return self.true[self.owners] - self.scores


@objectives.register("tags")
class TAGS(Objective):
    """TAGS: fill masked words given the image, and rank the true caption above the result.

    Use it with another objective: {hard-candidates: 1, tags: 1}. Each caption gets ``masks``
    masked versions, each filled ``samples`` times at ``temperature`` (eq. 2). Masks cover one
    ``unit``: a phrase of the scene graph that ``extractor`` returns, or a token. The ``kept``
    best-scoring fillings that are not false negatives are negatives (eq. 5). ``mlm`` and ``rank``
    are the weights of eq. 1 and 6; with ``rank=0`` nothing is generated. ``mask_share``: 15 % of
    the words in units are masked, or of the whole sentence.

    ``generator``: a run whose frozen model fills the masks (static, §2.3). The model in training
    then learns no masked words, so ``mlm`` must not be set. Without a generator, the model in
    training fills the masks (dynamic). ``anchors``: how many pairs of a batch get foils (0: all),
    evenly spaced, for batches that are large to have many candidates.

    Two options against foils that teach no image, which the paper does not have. ``judge``: a run,
    such as NAAF; fillings that it scores as high as the caption may be true, and are no foils.
    ``other_images``: in eq. 6, a caption must be further above its foil for its own image than for
    another one of the batch, so that it earns nothing for an unlikely sentence. With several
    processes, the other image is of the same process.
    """

    requires = "the captions of the batch and a model that fills their masks"
    needs_scores = False
    heads: tuple[str, ...] = ("mlm",)
    reads_words = False

    def __init__(
        self,
        *,
        masks: int = 20,
        samples: int = 20,
        kept: int = 31,
        temperature: float = 1.5,
        unit: MaskUnit = "graph",
        extractor: str = "rules",
        margin: float = 0.2,
        mlm: float = 0.05,
        rank: float = 5e-4,
        generator: str = "",
        anchors: int = 0,
        mask_share: MaskShare = "units",
        judge: str = "",
        other_images: bool = False,
    ) -> None:
        super().__init__()
        if generator and not rank and not self.reads_words:
            raise ConfigError(
                "objective.tags: with a generator and rank=0 there is nothing to learn; set rank "
                "above 0, or leave the generator out"
            )
        if generator:
            key = f"objective.{'tags-dc' if self.reads_words else 'tags'}"
            refuse_unused(type(self), key, "a generator (which fills the masks)", mlm=mlm)
        if not rank:
            key = f"objective.{'tags-dc' if self.reads_words else 'tags'}"
            unused = {"other_images": other_images} | ({} if self.reads_words else {"judge": judge})
            refuse_unused(type(self), key, "rank=0 (no foils are ranked)", **unused)
        self.options = GeneratorOptions(
            masks,
            samples,
            kept,
            temperature,
            unit,
            extractor,
            generator,
            anchors,
            mask_share,
            judge,
        )
        self._require_nonnegative(margin=margin, mlm=mlm, rank=rank)
        self.margin, self.mlm, self.rank = margin, mlm, rank
        self.other_images = other_images
        self._generator: Generator | None = None

    def prepare(self, training: RunSetup) -> None:
        heads = [head for head in self.heads if self._is_dynamic or head != "mlm"]
        self._generator = training.generator(self.options, heads)

    @property
    def _is_dynamic(self) -> bool:
        """Whether the model in training fills the masks, and so learns eq. 1 (§2.3)."""
        return not self.options.run

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services = context.services
        if services is None or self._generator is None:
            raise TrainingError("objective.tags works on the batches of a training run only")
        if not self.rank and not self.reads_words:  # no loss would read the foils
            return self._mlm_term(services, self._generator.mask(services, context.step))
        generated = self._generator(services, context.step)  # eq. 2, 3 and 5
        mlm = self._mlm_term(services, generated)
        images = _images(services, generated)
        foils = score_foils(services, images, generated, self.reads_words)
        gaps = foils.gaps
        others = self._gaps_elsewhere(services, images, generated)
        rank = global_mean((self.margin - gaps + others).clamp(min=0))  # eq. 6
        words = self.word_terms(services, generated, foils)
        loss = mlm.loss + self.rank * rank + words.loss  # eq. 9
        if not context.logging:
            return LossReport(loss)
        with torch.no_grad():
            diagnostics = {
                "tags/accuracy": global_mean((gaps > 0).float()),
                "tags/difficulty": global_mean((gaps < 0).float()),
                "tags/gap": global_mean(gaps),
                "tags/kept": global_mean(generated.real.sum(1).float()),
                "tags/rank": rank.detach(),
            }
        return LossReport(loss, mlm.diagnostics | diagnostics | words.diagnostics)

    def _gaps_elsewhere(
        self, services: BatchServices, images: Encoded, generated: Generated
    ) -> Tensor:
        """Gaps [F] between captions and foils for other images; 0 without ``other_images``."""
        if not self.other_images:
            return generated.real.new_zeros((), dtype=torch.float32)
        rows = next_with_another(services.batch.owners[generated.rows])
        elsewhere = score_foils(services, images[rows], generated, with_states=False)
        alone = (rows == torch.arange(len(rows), device=rows.device))[elsewhere.owners]
        return elsewhere.gaps.masked_fill(alone, 0.0)

    def _mlm_term(self, services: BatchServices, masked: MaskedBatch) -> LossReport:
        """Eq. 1; zero if a frozen model fills the masks."""
        if not self._is_dynamic:
            return LossReport(0 * services.images.mask.sum().float())
        loss = global_mean(mlm_losses(services, _images(services, masked), masked))
        return LossReport(self.mlm * loss, {"tags/mlm": loss.detach()})

    def word_terms(
        self, services: BatchServices, generated: Generated, scored: ScoredFoils
    ) -> LossReport:
        """Losses of single words of the foils; zero without heads that read words."""
        return LossReport(0 * scored.true.sum())


@objectives.register("tags-dc")
class TAGSDC(TAGS):
    """TAGS-DC: TAGS with heads that detect the wrong words of foils and correct them.

    ``discrimination`` and ``correction`` are the weights of eq. 7 and 8, ``replaced`` and
    ``original`` the class weights in eq. 7. ``correct_over``: correction learns from the masked
    tokens of a foil, as in the public code, or from the whole sentence, as in eq. 8. The model
    needs a head for each loss.
    """

    heads = ("mlm", "discrimination", "correction")
    reads_words = True

    def __init__(
        self,
        *,
        masks: int = 20,
        samples: int = 20,
        kept: int = 31,
        temperature: float = 1.5,
        unit: MaskUnit = "graph",
        extractor: str = "rules",
        margin: float = 0.2,
        mlm: float = 0.1,
        rank: float = 5e-4,
        generator: str = "",
        anchors: int = 0,
        discrimination: float = 5e-4,
        correction: float = 5e-4,
        replaced: float = CLASS_WEIGHTS[0],
        original: float = CLASS_WEIGHTS[1],
        correct_over: Literal["masked", "sentence"] = "masked",
        mask_share: MaskShare = "units",
        judge: str = "",
        other_images: bool = False,
    ) -> None:
        super().__init__(
            masks=masks,
            samples=samples,
            kept=kept,
            temperature=temperature,
            unit=unit,
            extractor=extractor,
            margin=margin,
            mlm=mlm,
            rank=rank,
            generator=generator,
            anchors=anchors,
            mask_share=mask_share,
            judge=judge,
            other_images=other_images,
        )
        self._require_nonnegative(discrimination=discrimination, correction=correction)
        self._require_nonnegative(replaced=replaced, original=original)
        self.correct_over = correct_over
        self.discrimination, self.correction = discrimination, correction
        self.class_weights = (replaced, original)

    def word_terms(
        self, services: BatchServices, generated: Generated, scored: ScoredFoils
    ) -> LossReport:
        foils, states = scored.foils, scored.states
        if states is None:
            raise TrainingError("objective.tags-dc: the foils were scored without their words")
        true_ids = generated.captions.ids[scored.owners]
        heads, masked = cross_encoder(services).heads, scored.labels != UNLABELED
        corrected = masked if self.correct_over == "masked" else foils.mask
        with services.autocast():
            verdicts = heads["discrimination"](states.words)
            logits = heads["correction"](states.words[corrected], word_table(services))
        verdicts, logits = at_least_float32(verdicts), at_least_float32(logits)
        discrimination = global_mean(  # eq. 7
            discrimination_losses(verdicts, foils.ids, true_ids, foils.mask, self.class_weights)
        )
        correction = global_mean(word_losses(logits, true_ids[corrected]))  # eq. 8
        loss = self.discrimination * discrimination + self.correction * correction
        original = (foils.ids == true_ids)[foils.mask]
        right = (verdicts.argmax(-1)[foils.mask] == 1) == original
        restored = (logits.argmax(-1) == true_ids[corrected])[masked[corrected]]
        diagnostics = {
            "tags/discrimination": discrimination.detach(),
            "tags/correction": correction.detach(),
            "tags/wod": global_mean(right.float()),
            "tags/wod_replaced": global_mean(right[~original].float()),
            "tags/woc": global_mean(restored.float()),
        }
        return LossReport(loss, diagnostics)


def _images(services: BatchServices, masked: MaskedBatch) -> Encoded:
    """The images [B] of the masked captions."""
    return services.images[pair_images(services.batch)[masked.rows]]


def next_with_another(images: Tensor) -> Tensor:
    """For each pair of a batch, the next one, around its end, with another image; itself if none.

    >>> next_with_another(torch.tensor([0, 0, 1, 2]))
    tensor([2, 2, 3, 0])
    """
    own = torch.arange(len(images), device=images.device)
    steps = (own - own[:, None]) % len(images)  # from each row to each other one
    same = images[:, None] == images
    return torch.where(same.all(1), own, steps.masked_fill(same, len(images)).argmin(1))


def mlm_losses(services: BatchServices, images: Encoded, batch: MaskedBatch) -> Tensor:
    """Losses of all masked tokens, given the images [B] of the captions (eq. 1)."""
    matcher, versions = cross_encoder(services), batch.masked.shape[1]
    rows = torch.arange(len(images), device=images.mask.device).repeat_interleave(versions)
    labels = batch.masked_labels.flatten(0, 1)
    masked = TextBatch(batch.masked.flatten(0, 1), batch.captions.mask[rows])
    texts, labeled = services.encode_texts(masked), labels != UNLABELED
    with services.autocast():
        states = matcher.states(images[rows], texts).words
        logits = matcher.heads["mlm"](states[labeled], word_table(services))
    return word_losses(at_least_float32(logits), labels[labeled])


def score_foils(
    services: BatchServices, images: Encoded, generated: Generated, with_states: bool
) -> ScoredFoils:
    """True captions and foils scored with the images [B] of the captions, with gradients."""
    captions, matcher = generated.captions, cross_encoder(services)
    owners = generated.real.nonzero()[:, 0]
    foils = TextBatch(generated.foils[generated.real], captions.mask[owners])
    both = TextBatch(torch.cat([captions.ids, foils.ids]), torch.cat([captions.mask, foils.mask]))
    own = torch.arange(len(images), device=owners.device)
    texts, pair_image = services.encode_texts(both), images[torch.cat([own, owners])]
    count, states = len(own), None
    with services.autocast():
        if with_states:
            states = matcher.states(pair_image, texts)
            scores = matcher.score(states.pooled)
            states = CrossStates(
                states.words[count:], states.regions[count:], states.pooled[count:]
            )
        else:
            scores = matcher.paired(pair_image, texts)
    labels = generated.foil_labels[generated.real]
    true, false = at_least_float32(scores).split([count, len(foils.ids)])
    return ScoredFoils(foils, labels, owners, true, false, states)


def cross_encoder(services: BatchServices) -> CrossEncoder:
    """The matcher in training, which the generator has checked to be a cross-encoder."""
    matcher = services.matcher
    assert isinstance(matcher, CrossEncoder)  # noqa: S101
    return matcher


def word_table(services: BatchServices) -> Tensor:
    """Word vectors [V, D] of the text encoder, which the heads predict words with."""
    table: Tensor = services.text_encoder.word_table.weight  # type: ignore[union-attr, assignment]
    return table


def global_mean(values: Tensor) -> Tensor:
    """Mean over the values of all processes; 0 without values."""
    count = sum_over_processes(values.new_tensor(float(values.numel())))
    return sum_over_processes(values.sum()) / count.clamp(min=1)


@objectives.register("mlm")
class MLM(Objective):
    """UNITER's masked language model (eq. 1): predict masked words given the image.

    Use it with another objective. Captions are masked as in `tags`, ``masks`` times each.
    """

    requires = "the captions of the batch and a model that fills their masks"
    needs_scores = False

    def __init__(
        self,
        *,
        masks: int = 1,
        unit: MaskUnit = "graph",
        extractor: str = "rules",
        mask_share: MaskShare = "units",
    ) -> None:
        super().__init__()
        self.options = GeneratorOptions(masks, 1, 1, 1.0, unit, extractor, share=mask_share)
        self._generator: Generator | None = None

    def prepare(self, training: RunSetup) -> None:
        self._generator = training.generator(self.options, ("mlm",))

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services = context.services
        if services is None or self._generator is None:
            raise TrainingError("objective.mlm works on the batches of a training run only")
        masked = self._generator.mask(services, context.step)
        loss = global_mean(mlm_losses(services, _images(services, masked), masked))
        return LossReport(loss, {"mlm/loss": loss.detach()})
