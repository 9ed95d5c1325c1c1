"""SGRAF agrees with the public code; training is the same in any tiles and counted once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.encoders import Encoded
from counterfoil.kernels import tiled
from counterfoil.matchers import matchers
from counterfoil.matchers.sgraf import REFERENCE_KEYS
from tests.conftest import Fixture, assert_close, assert_gradient_close, load_fixture
from tests.matchers.local import encoded_pair, mask_of

BUFFERS = "out.train_nodropout.buffers."
parts = pytest.mark.parametrize("name", ["sgr", "saf"])


def our_name(key: str) -> str:
    start = next(start for start in REFERENCE_KEYS if key.startswith(start))
    return REFERENCE_KEYS[start] + key[len(start) :]


def reference(name: str, fixture: Fixture) -> torch.nn.Module:
    hyper = fixture.hyper
    steps = {"steps": hyper["sgr_step"]} if name == "sgr" else {}
    matcher = matchers[name](
        hyper["embed_size"],
        sim_dim=hyper["sim_dim"],
        lambda_softmax=hyper["smooth"],
        dropout=0.0,
        form="reference",
        slots=hyper["num_region"],
        **steps,
    )
    matcher.load_state_dict({our_name(key): value for key, value in fixture.weights().items()})
    return matcher


def sides(seed: int = 0, dtype=torch.float64) -> tuple[Encoded, Encoded]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(5, n, 16, generator=generator, dtype=dtype) for n in (4, 6))
    return (
        Encoded(
            torch.nn.functional.normalize(x, dim=-1), mask_of(torch.tensor([4, 1, 3, 4, 2]), 4)
        ),
        Encoded(
            torch.nn.functional.normalize(y, dim=-1), mask_of(torch.tensor([6, 2, 1, 5, 3]), 6)
        ),
    )


def make(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return matchers[name](16, sim_dim=8, **options).double()


@parts
def test_scores_and_gradients_agree_with_the_reference(name) -> None:
    fixture = load_fixture(f"sgraf-{name}")
    images, texts = encoded_pair(fixture)
    scores = reference(name, fixture).eval()(images, texts)
    assert_close(scores, fixture["out.scores"])
    scores.sum().backward()
    assert_gradient_close(images.fragments.grad, fixture["grad.images"])
    assert_gradient_close(texts.fragments.grad, fixture["grad.captions"])


@parts
@pytest.mark.parametrize("cells", [1, 1 << 22])
def test_training_scores_and_statistics_of_images_agree_with_the_reference(name, cells) -> None:
    fixture = load_fixture(f"sgraf-{name}")
    images, texts = encoded_pair(fixture)
    matcher = reference(name, fixture).train()
    with mock.patch.object(tiled, "CPU_CELLS", cells):
        assert_close(matcher(images, texts), fixture["out.train_nodropout.scores"])
    buffers = dict(matcher.named_buffers())
    for key in (key for key in fixture.tensors if key.startswith(BUFFERS + "v_global_w")):
        assert_close(buffers[our_name(key.removeprefix(BUFFERS))], fixture[key])


@pytest.mark.parametrize("name", ["sgr", "saf", "sgraf"])
def test_training_is_the_same_in_any_tiles(name) -> None:
    images, texts = sides()

    def trained(cells: int) -> list[Tensor]:
        matcher = make(name).train()
        x = images.fragments.clone().requires_grad_()
        torch.manual_seed(1)  # of dropout
        with mock.patch.object(tiled, "CPU_CELLS", cells):
            scores = matcher(Encoded(x, images.mask), texts)
            (scores * torch.arange(25.0).view(5, 5)).sum().backward()
        slopes = [parameter.grad for parameter in matcher.parameters()]
        return [
            scores.detach(),
            x.grad,
            *slopes,
            *(buffer.double() for buffer in matcher.buffers()),
        ]

    for whole, cut in zip(trained(1 << 22), trained(1), strict=True):
        assert torch.allclose(whole, cut, atol=1e-12)


def test_running_statistics_take_one_step_towards_the_mean_over_texts() -> None:
    images, texts = sides()
    matcher = make("saf", dropout=0.0).train()
    seen: list[tuple[Tensor, Tensor]] = []
    matcher.norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs))
    matcher(images, texts)
    logits, mask = seen[0]
    per_text = [logits[:, text, mask[text]] for text in range(5)]
    mean = torch.stack([x.mean() for x in per_text]).mean()
    variance = torch.stack([x.var() for x in per_text]).mean()
    assert torch.allclose(matcher.norm.running_mean, 0.1 * mean)
    assert torch.allclose(matcher.norm.running_var, 0.9 + 0.1 * variance)
    assert int(matcher.norm.num_batches_tracked) == 1


@parts
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_order_of_regions_and_padding_never_change_a_score(name, mode) -> None:
    images, texts = sides()
    matcher = make(name, dropout=0.0)
    getattr(matcher, mode)()
    expected = matcher(images, texts)
    assert torch.allclose(matcher(images.pad_to(7), texts.pad_to(9)), expected)
    whole = images[torch.tensor([0, 3])]
    turned = Encoded(whole.fragments.flip(1), whole.mask)
    assert torch.allclose(matcher(turned, texts), matcher(whole, texts))


def test_sgraf_is_the_mean_of_its_two_parts() -> None:
    images, texts = sides()
    matcher = make("sgraf").eval()
    both = matcher.sgr(images, texts) + matcher.saf(images, texts)
    assert torch.allclose(matcher(images, texts), both / 2)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_reference_form_refuses_another_number_of_regions(mode) -> None:
    matcher = make("sgr", form="reference")
    getattr(matcher, mode)()
    with pytest.raises(DataError, match="reads 36 regions of every image, found 1 to 4"):
        matcher(*sides())
    assert make("sgr", form="reference", slots=4)(sides()[0][0:1], sides()[1]).shape == (1, 5)


def test_scores_are_probabilities() -> None:
    scores = make("sgraf").eval()(*sides())
    assert ((scores > 0) & (scores < 1)).all()
