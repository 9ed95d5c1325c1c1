"""GSMN: the public code's form agrees with it, the paper's form has neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.dependencies import RuleParser
from counterfoil.data.text.tokenizers import WordText
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.encoders import Encoded
from counterfoil.matchers import matchers
from counterfoil.matchers.gsmn import REFERENCE_KEYS
from counterfoil.models import Model, from_pretrained, resolve, save_pretrained
from tests.conftest import Fixture, assert_close, assert_gradient_close, load_fixture
from tests.matchers.local import encoded_pair, mask_of


def reference(part: str, fixture: Fixture, graph: str = "dense") -> torch.nn.Module:
    hyper = fixture.hyper
    matcher = matchers["gsmn"](
        hyper["embed_size"],
        parts=part,
        graph=graph,
        lambda_softmax=hyper["lambda_softmax"],
        blocks=hyper["num_block"],
        kernels=hyper["n_kernels"],
        hidden=hyper["hid_dim"],
        form="reference",
    )
    renamed = {}
    for key, value in fixture.weights().items():
        begins = next(start for start in REFERENCE_KEYS[part] if key.startswith(start))
        renamed[f"{part}.{REFERENCE_KEYS[part][begins]}{key[len(begins) :]}"] = value
    matcher.load_state_dict(renamed)
    return matcher


def sides(seed: int = 0, words: int = 6, dim: int = 32) -> tuple[Encoded, Encoded]:
    generator = torch.Generator().manual_seed(seed)
    # with a common part: words that have nothing in common are no neighbours
    x, y = (torch.randn(3, n, dim, generator=generator) + 1.5 for n in (5, words))
    corners = torch.rand(2, 3, 5, 2, generator=generator)
    boxes = torch.cat([corners.amin(0), corners.amax(0)], dim=-1)
    graph = torch.rand(3, words, words, generator=generator) > 0.6
    images = Encoded(
        torch.nn.functional.normalize(x, dim=-1), mask_of(torch.tensor([5, 3, 4]), 5), None, boxes
    )
    texts = Encoded(
        torch.nn.functional.normalize(y, dim=-1),
        mask_of(torch.tensor([words, 2, 4]), words),
        graph=graph | graph.transpose(1, 2),
    )
    return images, texts


def make(seed: int = 0, **options) -> torch.nn.Module:
    torch.manual_seed(seed)
    return matchers["gsmn"](32, **options)


def test_the_visual_score_and_its_gradients_agree_with_the_reference() -> None:
    fixture = load_fixture("gsmn-visual")
    images, texts = encoded_pair(fixture)
    scores = reference("visual", fixture)(replace(images, boxes=fixture["in.bbox"]), texts)
    assert_close(scores, fixture["out.scores"])
    scores.sum().backward()
    assert_gradient_close(images.fragments.grad, fixture["grad.images"])
    assert_gradient_close(texts.fragments.grad, fixture["grad.captions"])


@pytest.mark.parametrize("graph", ["dense", "sparse"])
def test_the_textual_score_and_its_gradients_agree_with_the_reference(graph) -> None:
    fixture = load_fixture("gsmn-textual")
    images, texts = encoded_pair(fixture)
    scores = reference("textual", fixture, graph)(images, texts)
    assert_close(scores, fixture[f"out.{graph}.scores"])
    scores.sum().backward()
    assert_gradient_close(images.fragments.grad, fixture["grad.dense.images"])
    assert_gradient_close(texts.fragments.grad, fixture["grad.dense.captions"])


def naive_textual(matcher, image: torch.Tensor, text: torch.Tensor, graph: torch.Tensor | None):
    """The paper's formulas for one pair, one word and one kernel at a time."""
    part = matcher.textual
    sims = torch.nn.functional.leaky_relu(text @ image.T, 0.1)
    sims = sims / (sims.norm(dim=0) + 1e-8)
    contexts = (20 * sims).softmax(1) @ image
    x = torch.cosine_similarity(text.view(-1, 16, 2), contexts.view(-1, 16, 2), dim=-1)
    edges = (20 * text @ text.T).softmax(1)
    if graph is not None:
        edges = edges * (graph | torch.eye(len(graph), dtype=torch.bool))
        edges = edges / edges.norm(dim=1, keepdim=True)
    scores = []
    for word in range(len(text)):
        outputs = []
        for number, kernel in enumerate(part.kernels):
            near = sum(edges[word, j] * kernel.weight @ x[j] for j in range(len(text)))
            outputs.append(torch.tanh(part.gain[number] * near + kernel.bias))
        scores.append(part.score(part.hidden(torch.cat(outputs)).tanh()))
    return torch.stack(scores).mean()


def naive_visual(matcher, image: torch.Tensor, text: torch.Tensor, boxes: torch.Tensor):
    part = matcher.visual
    sims = torch.nn.functional.leaky_relu(image @ text.T, 0.1)
    sims = sims / (sims.norm(dim=0) + 1e-8)
    contexts = (20 * sims).softmax(1) @ text
    x = torch.cosine_similarity(image.view(-1, 16, 2), contexts.view(-1, 16, 2), dim=-1)
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    scores = []
    for region in range(len(image)):
        outputs = []
        for number, kernel in enumerate(part.kernels):
            across, along = (centers[region] - centers).unbind(1)
            turn = (torch.atan2(across, along) - part.mean_theta[number]).abs()
            turn = torch.minimum(turn, 2 * torch.pi - turn)
            rho = (across**2 + along**2).sqrt() - part.mean_rho[number]
            weights = torch.exp(
                -0.5 * (rho / part.precision_rho[number]) ** 2
                - 0.5 * (turn / part.precision_theta[number]) ** 2
            )
            weights = weights / weights.sum()
            near = sum(weights[j] * kernel.weight @ x[j] for j in range(len(image)))
            outputs.append(torch.tanh(near + kernel.bias))
        scores.append(part.score(part.hidden(torch.cat(outputs)).tanh()))
    return torch.stack(scores).mean()


@pytest.mark.parametrize("graph", ["dense", "sparse"])
def test_the_papers_form_is_the_papers_formula(graph) -> None:
    images, texts = sides()
    matcher = make(graph=graph)
    with torch.no_grad():
        for kernel in [*matcher.visual.kernels, *matcher.textual.kernels]:
            kernel.bias.normal_()
        matcher.textual.gain.uniform_(0.5, 2.0)
        scores = matcher(images, texts)
        for i in range(3):
            for t in range(3):
                image = images.fragments[i, images.mask[i]]
                text = texts.fragments[t, texts.mask[t]]
                links = texts.graph[t][texts.mask[t]][:, texts.mask[t]]
                expected = naive_visual(matcher, image, text, images.boxes[i, images.mask[i]])
                expected += naive_textual(
                    matcher, image, text, links if graph == "sparse" else None
                )
                assert float(scores[i, t]) == pytest.approx(float(expected), abs=1e-5)


def test_boxes_links_and_kernels_change_a_score_in_the_papers_form() -> None:
    images, texts = sides()
    matcher = make(graph="sparse")
    scores = matcher(images, texts)
    moved = replace(images, boxes=images.boxes.flip(1))
    other = replace(texts, graph=~texts.graph)
    assert not torch.allclose(matcher(moved, texts), scores, atol=1e-4)
    assert not torch.allclose(matcher(images, other), scores, atol=1e-4)
    with torch.no_grad():
        matcher.textual.gain[0] *= 3
    assert not torch.allclose(matcher(images, texts), scores, atol=1e-4)


def test_regions_may_come_in_any_order_with_their_boxes() -> None:
    images, texts = sides()
    images = images[0:1]
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = Encoded(images.fragments[:, order], images.mask, None, images.boxes[:, order])
    matcher = make()
    assert torch.allclose(matcher(shuffled, texts), matcher(images, texts), atol=1e-6)


def test_a_width_that_blocks_do_not_divide_scores_and_has_finite_gradients() -> None:
    torch.manual_seed(0)
    images, texts = sides(dim=12)
    matcher = matchers["gsmn"](12)
    images.fragments.requires_grad_()
    scores = matcher(images, texts)
    scores.sum().backward()
    assert scores.isfinite().all()
    assert images.fragments.grad.isfinite().all()


def test_what_is_missing_is_named() -> None:
    images, texts = sides()
    with pytest.raises(DataError, match=r"no boxes.*parts=textual"):
        make()(replace(images, boxes=None), texts)
    with pytest.raises(DataError, match="which words are linked"):
        make(graph="sparse")(images, replace(texts, graph=None))
    make(parts="textual")(replace(images, boxes=None), replace(texts, graph=None))
    with pytest.raises(ConfigError, match="8 kernels do not divide 30"):
        make(hidden=30)


def test_it_says_what_it_needs() -> None:
    assert (make().needs_boxes, make().needs_graph) == (True, False)
    assert make(graph="sparse").needs_graph
    assert not make(graph="sparse", form="reference").needs_graph
    assert not make(parts="textual").needs_boxes


def whole_model(**matcher) -> Model:
    config = build_config({"model": {"name": "gsmn-sparse", "embed_size": 32, "matcher": matcher}})
    torch.manual_seed(0)
    text = WordText(Vocabulary.build(["a red dog on the green grass"], 1))
    return Model(resolve(config.model), 6, text)


def boxed(count: int, boxes: bool = True) -> Fragments:
    rng = np.random.default_rng(count)
    corners = rng.random((count, 4), dtype=np.float32) if boxes else None
    return Fragments(rng.random((count, 6), dtype=np.float32), corners)


def test_a_model_parses_captions_as_it_was_saved_to(tmp_path) -> None:
    model = whole_model()
    captions = ["a red dog", "the green grass", "dog"]
    scores = model.score([boxed(3), boxed(5)], captions)
    save_pretrained(model, tmp_path / "m")
    again = from_pretrained(tmp_path / "m")
    assert again.spec.matcher["parser"] == "rules"
    assert isinstance(again.text.parser, RuleParser)
    assert torch.equal(again.score([boxed(3), boxed(5)], captions), scores)
    again.text.parser = None
    with pytest.raises(DataError, match="which words are linked"):
        again.score([boxed(3)], captions)


def test_a_model_says_what_to_do_about_images_without_boxes() -> None:
    with pytest.raises(DataError, match=r"'gsmn-sparse' reads where regions are.*_ims_bbx\.npy"):
        whole_model().score([boxed(3), boxed(2, boxes=False)], ["a dog"])
    whole_model(parts="textual").score([boxed(2, boxes=False)], ["a dog"])


def test_an_unknown_parser_is_refused_when_the_model_is_made() -> None:
    with pytest.raises(ConfigError, match="unknown parser 'stanford'"):
        whole_model(parser="stanford")
