"""TAGS: a model learns from sentences that it wrote itself; TAGS-DC: also which words it changed.

The public code scores the true caption from a wrong sequence (its first token, repeated) where it
is set against generated ones; here the positive is the true caption's own score. UNITER's masked
language model, with which the foils are written, is an objective by itself.
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
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
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
"""The label of a token that no loss looks at."""

CLASS_WEIGHTS = (1.0, 0.11)
"""TAGS' weights of replaced and of original words, of which there are many more."""


# Losses of words are unreduced, one number a word: which words to average over is up to the caller.
def word_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy at each labelled token, in order: of a masked language model, of corrections.

    ``logits`` [..., V], ``labels`` [...] with −1 where there is nothing to say.

    >>> word_losses(torch.zeros(1, 2, 4), torch.tensor([[-1, 3]]))
    tensor([1.3863])
    """
    asked = labels != UNLABELED
    return F.cross_entropy(logits[asked], labels[asked], reduction="none")


def discrimination_losses(
    logits: Tensor,
    ids: Tensor,
    true_ids: Tensor,
    mask: Tensor,
    weights: tuple[float, float] = CLASS_WEIGHTS,
) -> Tensor:
    """Weighted negative log-likelihood of "replaced" or "original" at each real token, in order.

    ``logits`` [n, W, 2]; a token of ``ids`` [n, W] is original where it is that of ``true_ids``.
    Weights scale the losses; their mean is over tokens, not over weights, as TAGS takes it.
    """
    original = (ids == true_ids).expand(mask.shape)[mask]
    losses = F.cross_entropy(logits[mask], original.long(), reduction="none")
    replaced_weight, original_weight = weights
    return losses * torch.where(original, original_weight, replaced_weight)


@dataclass(frozen=True)
class Read:
    """Foils with the tokens they replaced, and what the model makes of them.

    ``owners`` [F] say which caption each of the ``foils`` comes from, ``labels`` [F, W] are the
    true tokens where there was a mask. ``true`` [B] and ``scores`` [F] have gradients, and so have
    the ``states`` of the foils, where they were asked for.
    """

    foils: TextBatch
    labels: Tensor
    owners: Tensor
    true: Tensor
    scores: Tensor
    states: CrossStates | None = None


@objectives.register("tags")
class TAGS(Objective):
    """TAGS: fill masked words given the image, and rank the true caption above the result.

    Beside another objective: {hard-candidates: 1, tags: 1}. Each caption gets ``masks`` versions,
    masked by ``unit`` (of the scene graph that ``extractor`` finds, or token by token), each filled
    ``samples`` times at ``temperature``; of what is no false negative, the ``kept`` best-scoring
    are negatives. ``mlm`` and ``rank`` weigh the two losses; without ``rank`` nothing is written.
    ``mask_share`` says what 15 % are masked of: of the words in units, or of the whole sentence.
    ``generator`` is a run whose frozen model fills the masks (static): this model then shares no
    parameter with it, and learns no masked words, so ``mlm`` is not to be set. Without one, the
    model in training fills them (dynamic). Where batches are large for the sake of their
    candidates, ``anchors`` says how many pairs of each process's batch get foils.
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
        self.options = GeneratorOptions(
            masks, samples, kept, temperature, unit, extractor, generator, anchors, mask_share
        )
        self.margin, self.mlm, self.rank = margin, mlm, rank
        self._generator: Generator | None = None

    def prepare(self, training: RunSetup) -> None:
        heads = [head for head in self.heads if self._fills or head != "mlm"]
        self._generator = training.generator(self.options, heads)

    @property
    def _fills(self) -> bool:
        """Whether the model in training fills the masks, and so learns to: dynamic (§2.3)."""
        return not self.options.run

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services = context.services
        if services is None or self._generator is None:
            raise TrainingError("objective.tags works on the batches of a training run only")
        if not self.rank and not self.reads_words:  # what would be written, nothing would read
            return self._fill_term(services, self._generator.mask(services, context.step))
        generated = self._generator(services, context.step)
        filled = self._fill_term(services, generated)
        read = read_foils(services, _images(services, generated), generated, self.reads_words)
        gaps = read.true[read.owners] - read.scores
        rank = global_mean((self.margin - gaps).clamp(min=0))
        words = self.word_terms(services, generated, read)
        loss = filled.loss + self.rank * rank + words.loss
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
        return LossReport(loss, filled.diagnostics | diagnostics | words.diagnostics)

    def _fill_term(self, services: BatchServices, masked: MaskedBatch) -> LossReport:
        """Filling masks (Eq. 1); nothing if another, frozen model fills them."""
        if not self._fills:
            return LossReport(0 * services.images.mask.sum().float())
        loss = global_mean(fill_losses(services, _images(services, masked), masked))
        return LossReport(self.mlm * loss, {"tags/mlm": loss.detach()})

    def word_terms(self, services: BatchServices, generated: Generated, read: Read) -> LossReport:
        """What is learned of the single words of the foils: nothing."""
        return LossReport(0 * read.true.sum())


@objectives.register("tags-dc")
class TAGSDC(TAGS):
    """TAGS-DC: TAGS with heads that find the wrong words of foils and correct them.

    ``discrimination`` and ``correction`` weigh these losses, ``replaced`` and ``original`` the two
    kinds of words in the former. ``correct_over`` says which tokens of a foil the correction learns
    from: those that were masked, as in the public code, or the whole sentence, as in Eq. 8. The
    model needs a head for each.
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
        )
        self.correct_over = correct_over
        self.discrimination, self.correction = discrimination, correction
        self.class_weights = (replaced, original)

    def word_terms(self, services: BatchServices, generated: Generated, read: Read) -> LossReport:
        foils, states = read.foils, read.states
        if states is None:
            raise TrainingError("objective.tags-dc: the foils were scored without their words")
        true_ids = generated.captions.ids[read.owners]
        heads, masked = cross_encoder(services).heads, read.labels != UNLABELED
        asked = masked if self.correct_over == "masked" else foils.mask
        with services.autocast():
            verdicts = heads["discrimination"](states.words).float()
            logits = heads["correction"](states.words[asked], word_table(services)).float()
        discrimination = global_mean(
            discrimination_losses(verdicts, foils.ids, true_ids, foils.mask, self.class_weights)
        )
        correction = global_mean(word_losses(logits, true_ids[asked]))
        loss = self.discrimination * discrimination + self.correction * correction
        original = (foils.ids == true_ids)[foils.mask]
        right = (verdicts.argmax(-1)[foils.mask] == 1) == original
        restored = (logits.argmax(-1) == true_ids[asked])[masked[asked]]
        diagnostics = {
            "tags/discrimination": discrimination.detach(),
            "tags/correction": correction.detach(),
            "tags/wod": global_mean(right.float()),
            "tags/wod_replaced": global_mean(right[~original].float()),
            "tags/woc": global_mean(restored.float()),
        }
        return LossReport(loss, diagnostics)


def _images(services: BatchServices, masked: MaskedBatch) -> Encoded:
    """The images [B] of the captions that were masked."""
    return services.images[pair_images(services.batch)[: len(masked.masked)]]


def fill_losses(services: BatchServices, images: Encoded, generated: MaskedBatch) -> Tensor:
    """Losses of all masked tokens, given the images [B] of the captions."""
    matcher, versions = cross_encoder(services), generated.masked.shape[1]
    rows = torch.arange(len(images), device=images.mask.device).repeat_interleave(versions)
    labels = generated.masked_labels.flatten(0, 1)
    masked = TextBatch(generated.masked.flatten(0, 1), generated.captions.mask[rows])
    texts, asked = services.encode_texts(masked), labels != UNLABELED
    with services.autocast():
        states = matcher.states(images[rows], texts).words
        logits = matcher.heads["mlm"](states[asked], word_table(services))
    return word_losses(logits.float(), labels[asked])


def read_foils(
    services: BatchServices, images: Encoded, generated: Generated, with_states: bool
) -> Read:
    """True captions and foils scored with gradients, all with the images [B] of the captions."""
    captions, matcher = generated.captions, cross_encoder(services)
    owners = generated.real.nonzero()[:, 0]
    foils = TextBatch(generated.foils[generated.real], captions.mask[owners])
    both = TextBatch(torch.cat([captions.ids, foils.ids]), torch.cat([captions.mask, foils.mask]))
    own = torch.arange(len(images), device=owners.device)
    texts, pictured = services.encode_texts(both), images[torch.cat([own, owners])]
    count, states = len(own), None
    with services.autocast():
        if with_states:
            states = matcher.states(pictured, texts)
            scores = matcher.score(states.pooled)
            states = CrossStates(
                states.words[count:], states.regions[count:], states.pooled[count:]
            )
        else:
            scores = matcher.paired(pictured, texts)
    labels = generated.foil_labels[generated.real]
    return Read(foils, labels, owners, scores[:count].float(), scores[count:].float(), states)


def cross_encoder(services: BatchServices) -> CrossEncoder:
    """The matcher in training, which `prepare` has seen to be one."""
    matcher = services.matcher
    assert isinstance(matcher, CrossEncoder)  # noqa: S101
    return matcher


def word_table(services: BatchServices) -> Tensor:
    """Vectors [V, D] of the words that the heads write with."""
    table: Tensor = services.text_encoder.word_table.weight  # type: ignore[union-attr, assignment]
    return table


def global_mean(values: Tensor) -> Tensor:
    """Mean over the values of all processes; 0 where there is none."""
    count = sum_over_processes(values.new_tensor(float(values.numel())))
    return sum_over_processes(values.sum()) / count.clamp(min=1)


@objectives.register("mlm")
class MLM(Objective):
    """UNITER's masked language model: fill masked words given the image; beside another objective.

    Captions are masked as by `tags`, ``masks`` times each; nothing is written or ranked.
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
        images = services.images[pair_images(services.batch)]
        loss = global_mean(
            fill_losses(services, images, self._generator.mask(services, context.step))
        )
        return LossReport(loss, {"mlm/loss": loss.detach()})
