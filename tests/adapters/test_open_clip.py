"""Our objectives in place of OpenCLIP's `ClipLoss`: alone, in two processes, in its own model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from counterfoil.adapters.open_clip import ObjectiveLoss
from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.objectives import Context, create_objective

CLIP = {"infonce": {"temperature": 1.0, "learned": False}}
"""Together with the model's own scale: what `ClipLoss` computes."""


def open_clip():
    try:
        import open_clip
    except (ImportError, RuntimeError) as error:  # torchvision fails beside another build of torch
        pytest.skip(f"open_clip needs a torchvision that fits this torch: {error}")
    return open_clip


def features() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images, texts = torch.randn(2, 8, 5, generator=generator, dtype=torch.float64)
    texts[5] = texts[2]  # the same caption twice
    return F.normalize(images, dim=-1), F.normalize(texts, dim=-1), torch.tensor(10.0).double()


def our_loop(objective) -> tuple[torch.Tensor, ...]:
    """Loss and gradients of the global batch, computed by one process."""
    images, texts, _ = features()
    images, texts = images.requires_grad_(), texts.requires_grad_()
    positives = torch.eye(8, dtype=torch.bool)
    protected = torch.zeros_like(positives)
    protected[2, 5] = protected[5, 2] = True
    loss = create_objective(objective).compute(
        images @ texts.T, positives, Context(protected=protected)
    )
    return loss.loss.detach(), *torch.autograd.grad(loss.loss, [images, texts])


@pytest.mark.parametrize("objective", ["hardest", "triplet", {"infonce": {"learned": False}}])
def test_loss_and_gradients_are_those_of_our_own_loop(objective) -> None:
    images, texts, scale = features()
    images, texts = images.requires_grad_(), texts.requires_grad_()
    loss = ObjectiveLoss(objective)(images, texts, scale)
    assert ObjectiveLoss(objective)(images, texts, float(scale)) == loss
    result = (loss.detach(), *torch.autograd.grad(loss, [images, texts]))
    for mine, expected in zip(result, our_loop(objective), strict=True):
        assert torch.allclose(mine, expected, atol=1e-6)


def test_with_the_scale_of_the_model_it_is_the_loss_of_clip() -> None:
    images, texts, scale = features()
    texts[5] = F.normalize(torch.ones(5).double(), dim=-1)  # no duplicates, which CLIP counts
    logits, labels = scale * images @ texts.T, torch.arange(8)
    expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    result = ObjectiveLoss(CLIP, scaled=True)(images, texts, scale, output_dict=True)
    assert set(result) == {"contrastive_loss"}
    assert torch.allclose(result["contrastive_loss"], expected, atol=1e-6)


@pytest.mark.parametrize("mixed", [True, False])
def test_cosines_are_not_rounded_to_half_precision(mixed) -> None:
    """Cosines near 1 differ by less than bfloat16 can represent; gradients keep their dtype."""
    generator = torch.Generator().manual_seed(0)
    images, texts = F.normalize(torch.randn(2, 8, 64, generator=generator) + 3, dim=-1)
    if not mixed:
        images, texts = images.bfloat16(), texts.bfloat16()
    expected = create_objective("hardest")(images.float() @ texts.float().T)
    images.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = ObjectiveLoss("hardest")(images, texts, torch.tensor(100.0))
    assert torch.allclose(loss, expected, atol=1e-6)
    loss.backward()
    assert images.grad.dtype == images.dtype


def test_ids_of_another_length_are_refused() -> None:
    images, texts, scale = features()
    for name in ("image_ids", "text_ids"):
        with pytest.raises(ArgumentError, match=f"{name}: expected 8 numbers or names"):
            ObjectiveLoss("hardest")(images, texts, scale, **{name: torch.tensor([7])})


def test_a_scale_that_is_not_read_has_a_gradient_of_zero() -> None:
    images, texts, scale = features()
    scale.requires_grad_()
    ObjectiveLoss("hardest")(images.requires_grad_(), texts, scale).backward()
    assert scale.grad == 0


def test_ids_say_what_features_do_not() -> None:
    images, texts, scale = features()
    loss = ObjectiveLoss({"triplet": {"margin": 3.0}})
    one_image = torch.zeros(8, dtype=torch.long)
    assert loss(images, texts, scale) > 0
    assert loss(images, texts, scale, image_ids=one_image) == 0
    assert loss(images, texts, scale, text_ids=one_image) == 0


def share(objective, local_loss: bool, gather_with_grad: bool) -> tuple[torch.Tensor, ...]:
    """What one of two processes computes: the loss, and the gradients of its own features."""
    images, texts, scale = features()
    rank = dist.get_rank()
    mine = slice(4 * rank, 4 * rank + 4)
    images, texts = images[mine].clone().requires_grad_(), texts[mine].clone().requires_grad_()
    loss = ObjectiveLoss(objective, local_loss, gather_with_grad, rank=rank, world_size=2)
    value = loss(images, texts, scale)
    return value.detach(), *torch.autograd.grad(value, [images, texts])


@pytest.mark.parametrize("local_loss", [False, True])
@pytest.mark.parametrize("objective", ["hardest", {"infonce": {"learned": False}}])
def test_two_processes_are_one(objective, local_loss, in_two_processes) -> None:
    """The mean over processes, which DistributedDataParallel takes, is the exact gradient."""
    loss, of_images, of_texts = our_loop(objective)
    for rank, result in enumerate(in_two_processes(share, objective, local_loss, True)):
        mine = slice(4 * rank, 4 * rank + 4)
        assert torch.allclose(result[0], loss, atol=1e-6)
        assert torch.allclose(result[1] / 2, of_images[mine], atol=1e-6)
        assert torch.allclose(result[2] / 2, of_texts[mine], atol=1e-6)


def test_without_gather_with_grad_a_process_moves_its_own_features_only(in_two_processes) -> None:
    loss, of_images, of_texts = our_loop("hardest")
    for rank, result in enumerate(in_two_processes(share, "hardest", False, False)):
        mine = slice(4 * rank, 4 * rank + 4)
        assert torch.allclose(result[0], loss, atol=1e-6)
        assert torch.allclose(result[1], of_images[mine], atol=1e-6)
        assert torch.allclose(result[2], of_texts[mine], atol=1e-6)


def test_horovod_is_refused() -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        ObjectiveLoss(use_horovod=True)


def tiny_clip(module):
    torch.manual_seed(0)
    vision = {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8}
    text = {"context_length": 6, "vocab_size": 40, "width": 16, "heads": 2, "layers": 1}
    return module.CLIP(16, vision, text, output_dict=True)


def toy_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 16, 16, generator=generator)
    texts = torch.randint(1, 38, (8, 6), generator=generator)
    texts[:, -1] = 39  # the end, whose state is the text's
    texts[7] = texts[0]
    return images, texts


def test_it_is_what_their_own_loss_computes() -> None:
    module = open_clip()
    out = tiny_clip(module)(*(x[:7] for x in toy_batch()))
    expected = module.ClipLoss()(**out, output_dict=True)["contrastive_loss"]
    result = ObjectiveLoss(CLIP, scaled=True)(**out, output_dict=True)["contrastive_loss"]
    assert torch.allclose(result, expected, atol=1e-6)


def test_a_loop_like_theirs_learns_with_our_objective() -> None:
    module = open_clip()
    model, (images, texts) = tiny_clip(module), toy_batch()
    loss = ObjectiveLoss("triplet")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        losses = loss(**model(images, texts), output_dict=True)
        total = sum(losses.values())
        total.backward()
        optimizer.step()
        values.append(total.item())
    assert sum(values[-5:]) < 0.8 * sum(values[:5])
    counted = ObjectiveLoss({"triplet": {}, "protect": {"identical": False}})
    with torch.no_grad():
        out = model(images, texts)
        assert counted(**out) > loss(**out) + 0.2  # an equal caption would cost a whole margin


def test_wrong_features_and_a_missing_scale_are_named() -> None:
    images, texts, scale = features()
    loss = ObjectiveLoss("selhn")
    assert torch.equal(loss(images, texts, None), loss(images, texts, scale))
    half = loss(images.half(), texts.float(), scale)  # as under autocast
    assert half.dtype == torch.float32
    for wrong, message in (
        ((images[0], texts), "features of images: expected vectors"),
        ((images.numpy(), texts), "features of images: expected a tensor, got ndarray"),
        ((images, texts.float()), "expected vectors of one width and precision"),
        ((images, texts[:, :3]), "expected vectors of one width and precision"),
    ):
        with pytest.raises(ArgumentError, match=message):
            loss(*wrong, scale)
    with pytest.raises(ArgumentError, match="logit_scale: expected a number"):
        ObjectiveLoss(CLIP, scaled=True)(images, texts, None)
