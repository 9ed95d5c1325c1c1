"""The benchmark of drawn scenes: reproducible, apart from the data sets, with images of its own."""

from __future__ import annotations

from counterfoil.data.images import open_image
from counterfoil.data.scenes.minimal_pairs import CHANGES
from counterfoil.evaluation.compositional.drawn import CROSSED, other_captions, scene_benchmark


def test_every_kind_has_its_items_and_their_images() -> None:
    benchmark = scene_benchmark(3, seed=5)
    assert [subset.name for subset in benchmark.subsets] == [*CHANGES, CROSSED]
    for subset in benchmark.subsets:
        assert len(subset.items) == len({item.images for item in subset.items}) == 3
        assert {name for item in subset.items for name in item.images} == set(subset.pixels)
        for item in subset.items:
            images = 2 if subset.form == "square" else 1
            assert (len(item.images), len(item.texts)) == (images, 2)
    first = benchmark.subsets[0]
    assert open_image(first.pixels[first.items[0].images[0]]).size == (224, 224)


def test_the_seed_decides_everything() -> None:
    one, two, other = (scene_benchmark(2, seed) for seed in (1, 1, 2))
    assert [s.items for s in one.subsets] == [s.items for s in two.subsets]
    assert all(a.items != b.items for a, b in zip(one.subsets, other.subsets, strict=True))
    name, image = next(iter(one.subsets[0].pixels.items()))
    assert image.read() == two.subsets[0].pixels[name].read()


def test_more_items_begin_with_the_same_ones() -> None:
    few, more = scene_benchmark(2, 0), scene_benchmark(4, 0)
    for one, two in zip(few.subsets, more.subsets, strict=True):
        assert two.items[:2] == one.items


def test_captions_for_the_language_model_are_of_other_scenes(monkeypatch) -> None:
    monkeypatch.setattr("counterfoil.evaluation.compositional.drawn._OTHER_FAMILIES", 5)
    captions = other_captions(0)
    assert len(captions) == 5 * 4 * 5
    assert other_captions(0) == captions != other_captions(1)
