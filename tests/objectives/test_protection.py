"""Protected pairs: never a negative of any objective, by caption and by teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.models import create_model
from counterfoil.objectives import Context, create_objective
from counterfoil.objectives.positives import own_captions
from counterfoil.objectives.protection import Protection
from counterfoil.training.trainer import Trainer


class Data:
    """The training split as `prepare` reads it."""

    texts = (
        "a dog runs on the beach",
        "two boats on a lake",
        "a dog runs on a beach",
        "a red kite above a house",
        "people eat dinner",
        "two boats on the lake",
    )
    image_of = np.array([0, 0, 1, 2, 2, 3])

    def __len__(self) -> int:
        return 4


class Training:
    train = Data()


def test_captions_that_say_the_same_are_protected() -> None:
    protection = Protection(captions=0.9)
    protection.prepare(Training())
    captions = torch.tensor([0, 2, 3, 5])
    images = torch.tensor([0, 1, 2, 3])
    positives = torch.eye(4).bool()
    result = protection(positives, Context(image_ids=images, caption_ids=captions))
    expected = torch.zeros(4, 4).bool()
    # image 0 and 1 show a dog on a beach each, image 0 and 3 boats on a lake
    expected[0, 1] = expected[1, 0] = expected[0, 3] = True
    assert torch.equal(result, expected)


def test_own_captions_are_listed_with_gaps() -> None:
    assert own_captions(np.array([0, 0, 2]), 3).tolist() == [[0, 1], [-1, -1], [2, -1]]


def test_a_protected_pair_never_reaches_a_term() -> None:
    objective = create_objective({"hardest": {}, "protect": {"captions": 0.9}})
    objective.protection.prepare(Training())
    scores = torch.tensor([[0.5, 0.9], [0.9, 0.5]], requires_grad=True)
    twins = Context(image_ids=torch.tensor([0, 1]), caption_ids=torch.tensor([0, 2]))
    assert float(objective.compute(scores, torch.eye(2).bool(), twins).loss) == 0.0
    strangers = Context(image_ids=torch.tensor([0, 2]), caption_ids=torch.tensor([0, 3]))
    assert float(objective.compute(scores, torch.eye(2).bool(), strangers).loss) > 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"identical": "sometimes"}, "identical"),
        ({"above": 0.5}, "name one"),
        ({"captions": 1.5}, "from 0 to 1"),
        ({"caption": 0.8}, "did you mean 'captions'"),
        ("yes", "expected options"),
    ],
)
def test_bad_protections_are_refused(options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        create_objective({"hardest": {}, "protect": options})


def test_outside_a_run_it_says_so() -> None:
    protection = Protection(captions=0.9)
    with pytest.raises(TrainingError, match="training run"):
        protection(torch.eye(2).bool(), Context())


def train(pairs, folder, objective):
    config = build_config(
        {
            "model": {"name": "vse-fc", "embed_size": 16, "text": {"word_dim": 8}},
            "data": {"min_count": 1},
            "objective": objective,
            "train": {"epochs": 2, "batch_size": 16, "log_every": 1, "optimizer": {"lr": 3e-3}},
        }
    )
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data)
    return Trainer(model, pairs, config, folder)


@pytest.mark.slow
def test_a_teacher_protects_what_it_scores_like_the_own_pair(concepts, tmp_path) -> None:
    train(concepts, tmp_path / "first", {"triplet": {}}).run()
    options = {"teacher": str(tmp_path / "first")}
    second = train(concepts, tmp_path / "second", {"hardest": {}, "protect": options})
    seen = []

    def remember(module, inputs, output) -> None:
        seen.append((inputs[0], output, inputs[1].services.batch))

    second.objective.protection.register_forward_hook(remember)
    second.run()
    teacher = second.objective.protection.teacher
    positives, protected, batch = seen[0]
    scores = teacher.scores(batch)
    for i in range(len(scores)):
        for j in range(len(scores)):
            own = min(scores[i][positives[i]].max(), scores[:, j][positives[:, j]].max())
            assert bool(protected[i, j]) == bool(scores[i, j] >= own and not positives[i, j])
    assert any(protected.any() for _, protected, _ in seen)
