"""Parts built without their registry: numbers and choices are checked, and their text is short."""

from __future__ import annotations

import math

import numpy as np
import pytest

from counterfoil.core.errors import ArgumentError, ConfigError, UnknownNameError
from counterfoil.core.registry import Registry
from counterfoil.core.zoo import resolve
from counterfoil.encoders import image_encoders, poolings
from counterfoil.evaluation.retrieval import retrieval
from counterfoil.matchers import matchers
from counterfoil.models import from_pretrained
from counterfoil.objectives import HardestNegative, SelHN, create_objective, objectives

MOST_LINES, MOST_COLUMNS = 3, 300


@pytest.mark.parametrize(
    ("value", "shown"), [("x", "'x'"), (None, "None"), (True, "True"), (math.nan, "nan")], ids=str
)
def test_a_margin_that_is_no_number_is_refused_with_what_was_given(value, shown) -> None:
    with pytest.raises(ValueError, match="expected a number") as caught:
        SelHN(margin=value)
    assert isinstance(caught.value, ArgumentError)
    assert str(caught.value) == f"SelHN(margin=…): expected a number, got {shown}"


def test_a_fraction_is_no_whole_number_and_numbers_of_numpy_are_numbers() -> None:
    with pytest.raises(ArgumentError, match=r"warmup_epochs=….: expected a whole number, got 1\.5"):
        HardestNegative(warmup_epochs=1.5)
    built = HardestNegative(warmup_epochs=np.int64(2), margin=np.float32(0.5))
    assert (built.warmup_epochs, built.margin) == (2, 0.5)
    assert SelHN(epsilon=math.inf).epsilon == math.inf


def test_a_class_without_options_is_registered_as_it_is() -> None:
    parts: Registry[type] = Registry("part")

    class Part:
        pass

    build = Part.__init__
    assert parts.register("part")(Part).__init__ is build
    assert isinstance(parts.create("part", {}), Part)


def test_a_name_that_is_like_no_other_may_be_one_of_a_module_that_was_not_imported() -> None:
    shapes: Registry[type] = Registry("shape")
    shapes.register("square")(type("Square", (), {}))
    with pytest.raises(UnknownNameError, match=r"did you mean 'square'\? \(known: square\)$"):
        shapes["sqare"]
    with pytest.raises(UnknownNameError, match=r"known: square.*counterfoil --import MODULE"):
        shapes["top-regions"]


def test_none_is_named_if_an_option_takes_it() -> None:
    parts: Registry[type] = Registry("part")

    @parts.register("part")
    class Part:
        def __init__(self, width: int, *, share: float | None = None, name: str = "") -> None:
            self.share = share

    with pytest.raises(ArgumentError, match="expected a number or None, got 'x'"):
        Part(3, share="x")
    assert Part(3, share=None).share is None
    assert parts.options("part") == {"share": None, "name": ""}
    with pytest.raises(ConfigError, match="share"):
        parts.create("part", {"share": "x"}, 3)


@pytest.mark.parametrize("build", [SelHN, HardestNegative, objectives["triplet"]])
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(build) -> None:
    """A misspelled reduction="sum" was a mean."""
    with pytest.raises(ArgumentError, match=r"reduction=….: expected 'sum' or 'mean', got 'Sum'"):
        build(reduction="Sum")
    assert build(reduction="sum").reduction == "sum"


def test_none_is_a_choice_if_an_option_takes_it() -> None:
    with pytest.raises(ArgumentError, match="expected 'sum' or 'mean' or None, got 'Sum'"):
        objectives["sct"](reduction="Sum")
    assert objectives["sct"](reduction=None).reduction == "sum"
    with pytest.raises(ArgumentError, match="expected 'clip' or 'chan', got None"):
        objectives["infonce"](form=None)


def numeric_options() -> list[tuple[Registry, str, str]]:
    return [
        (registry, name, key)
        for registry in (objectives, matchers, image_encoders, poolings)
        for name in registry
        for key, default in registry.options(name).items()
        if type(default) in (int, float)
    ]


def test_every_registered_part_refuses_a_text_for_a_number() -> None:
    cases = numeric_options()
    assert len(cases) > 80
    for registry, name, key in cases:
        with pytest.raises(ArgumentError, match=rf"\({key}=…\): expected a .*number.*, got 'x'"):
            registry[name](**{key: "x"})


def test_objectives_and_matchers_are_shown_with_their_options_in_a_line() -> None:
    assert repr(SelHN(margin=0.3)) == "SelHN(margin=0.3, epsilon=0.01, reduction='mean')"
    texts = [repr(objectives[name]()) for name in objectives if name not in ("aoq", "ndgl")]
    texts += [repr(matchers[name](16)) for name in matchers]
    both = create_objective({"selhn": {}, "infonce": {"weight": 0.5}})
    assert " + 0.5 * InfoNCE(" in repr(both)
    for text in (*texts, repr(both)):
        assert text.count("\n") < MOST_LINES, text
        assert len(text) <= MOST_COLUMNS, text


def test_every_option_of_an_objective_is_shown_also_if_a_layer_stores_it() -> None:
    needed = {"aoq": {"first": "runs/a"}, "ndgl": {"guide": "guides/a"}}
    for name in objectives:
        text = repr(objectives[name](**needed.get(name, {})))
        for key in objectives.options(name):
            assert f"{key}=" in text, text
    shown = repr(objectives["infonce"](temperature=0.2))
    assert shown == "InfoNCE(temperature=0.2, learned=True, margin=0.0, form='clip')"
    assert "temperature=0.3, learned=False" in repr(
        objectives["negclip"](temperature=0.3, learned=False)
    )


def test_a_subclass_without_a_name_shows_the_options_that_it_passes_on() -> None:
    class Sharp(objectives["infonce"]):
        def __init__(self, *, sharpest: float = 2.0, learned: bool = False) -> None:
            super().__init__(temperature=1 / sharpest, learned=learned)

    assert repr(Sharp()) == "Sharp(learned=False)"


def test_a_model_and_a_report_are_one_line() -> None:
    model = from_pretrained(resolve("scenes-naaf"))
    assert repr(model).startswith("Model('naaf', 255,104 weights, embed_size=128, 194 words")
    report = retrieval(np.eye(4), [0, 1, 2, 3], bootstrap=0)
    assert repr(report) == f"RetrievalReport({report.headline()})"
    for one in (model, report):
        assert "\n" not in repr(one)
