"""Every format of the benchmarks becomes items; a faulty file is refused by item and field."""

from __future__ import annotations

import copy
import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError, CounterfoilError, DataError
from counterfoil.evaluation.compositional.readers import READERS, read_benchmark, shuffles
from tests.evaluation.compositional import small_files
from tests.evaluation.compositional.small_files import (
    BLUE,
    BOTH,
    DOG,
    RED,
    TREES,
    UNDER,
    write,
    write_results,
)

SC = small_files.SUGARCREPE["0"]
SHARED = Path(__file__).parents[4] / "shared" / "data" / "bench"


def read(folder: Path, name: str, tree=None):
    (subset,) = read_benchmark(TREES[name][0], [write(folder, name, tree)]).subsets
    return subset


def test_every_benchmark_has_a_small_file() -> None:
    assert {benchmark for benchmark, _ in TREES.values()} == set(READERS)


def test_sugarcrepe_has_one_true_caption_and_one_foil(tmp_path) -> None:
    subset = read(tmp_path, "swap_obj.json")
    assert (subset.name, subset.form) == ("swap_obj", "choice")
    first = subset.items[0]
    assert (first.key, first.images, first.captions, first.foils) == (
        "0",
        ("a.png",),
        (RED,),
        (BLUE,),
    )


def test_sugarcrepe_pp_has_two_true_captions(tmp_path) -> None:
    first = read(tmp_path, "swap_obj_pp.json").items[0]
    assert (first.captions, first.foils) == ((DOG, UNDER), (BOTH,))


def test_valse_counts_items_that_two_of_three_annotators_accepted(tmp_path) -> None:
    subset = read(tmp_path, "existence.json")
    assert [item.key for item in subset.items] == ["one", "two"]
    assert subset.excluded == 1


def test_cola_has_two_images_by_the_names_in_their_addresses(tmp_path) -> None:
    (item,) = read(tmp_path, "cola.json").items
    assert (item.images, item.captions) == (("a.png", "b.png"), (RED, DOG))


def test_winoground_and_bivlc_have_two_images_and_two_captions(tmp_path) -> None:
    (item,) = read(tmp_path, "examples.jsonl").items
    assert item.images == ("a", "b")
    assert item.captions == ("a red ball and a blue dog", "a blue ball and a red dog")
    (item,) = read(tmp_path, "bivlc.jsonl").items
    assert (item.images, item.captions, item.label) == (
        ("a.png", "b.png"),
        (RED, BLUE),
        "replace_att",
    )


def test_bivlc_as_parquet_brings_its_images(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    small_files.draw_images(tmp_path)
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    row = {**small_files.BIVLC[0], "image": image, "negative_image": image}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "test.parquet")
    (subset,) = read_benchmark("bivlc", [tmp_path / "test.parquet"]).subsets
    assert [subset.pixels[name].read() for name in subset.items[0].images] == [image["bytes"]] * 2


def test_bivlc_results_are_read_with_the_items(tmp_path) -> None:
    for packed in (True, False):
        (subset,) = read_benchmark("bivlc", [write_results(tmp_path, packed=packed)]).subsets
        assert subset.results == tuple(small_files.RESULTS)
        assert subset.items[0].captions == (RED, BLUE)
        assert len({item.images for item in subset.items}) == 4


def test_aro_has_boxes_and_classes(tmp_path) -> None:
    first = read(tmp_path, "visual_genome_relation.json").items[0]
    assert (first.box, first.label, first.foils) == (
        (0, 0, 112, 112),
        "under",
        ("a tree under a dog",),
    )
    assert read(tmp_path, "visual_genome_attribution.json").items[0].label == "red_blue"


def test_rare_pairs_of_attributes_do_not_count_beside_frequent_ones(tmp_path) -> None:
    (one,) = small_files.ATTRIBUTION
    rare = {**one, "attributes": ["big", "red"]}
    subset = read(tmp_path, "visual_genome_attribution.json", [one] * 25 + [rare])
    assert (len(subset.items), subset.excluded) == (25, 1)


def test_order_items_are_shuffles_of_the_caption(tmp_path) -> None:
    items = read(tmp_path, "coco_karpathy_test.json").items
    assert items[0].captions == ("a red ball on a small table",)
    for item in items:
        assert 1 <= len(item.foils) <= 4
        for foil in item.foils:
            assert foil != item.captions[0]
            assert sorted(foil.split()) == sorted(item.captions[0].split())


def test_one_shuffle_moves_nouns_and_adjectives_alone() -> None:
    changed = shuffles("a red ball on a small table", random.Random(1))
    kept = [foil for foil in changed if [foil.split()[n] for n in (0, 3, 4)] == ["a", "on", "a"]]
    assert kept


def test_order_options_can_be_stored(tmp_path) -> None:
    tree = [{"image": "a.png", "caption_options": [RED, BLUE, DOG]}]
    (item,) = read(tmp_path, "coco_karpathy_test.json", tree).items
    assert (item.captions, item.foils) == ((RED,), (BLUE, DOG))


def test_hat_marks_words_and_their_spans(tmp_path) -> None:
    first, second = read(tmp_path, "hat.json").items
    assert [first.captions[0][start:end] for start, end in first.wrong or ()] == ["red"]
    assert second.wrong == ()


def test_nocaps_foil_gives_a_true_and_a_false_caption_of_an_image(tmp_path) -> None:
    true, foil = read(tmp_path, "nocaps-val-foil.json").items
    assert (true.wrong, true.images) == ((), foil.images)
    assert [foil.captions[0][start:end] for start, end in foil.wrong or ()] == ["dog"]


def test_a_replacement_is_found_where_the_captions_differ(tmp_path) -> None:
    tree = [{**small_files.NOCAPS[0], "baseline": "a dog, a cat and a cat"}]
    tree[0].update(foil="a dog, a cat and a dog", replacement=["cat", "dog"])
    assert read(tmp_path, "nocaps-val-foil.json", tree).items[1].wrong == ((19, 22),)


def test_foil_joins_annotations_and_images(tmp_path) -> None:
    foil, true = read(tmp_path, "foilv1.0_test_2017.json").items
    assert (foil.images, true.images, true.wrong) == (("a.png",), ("b.png",), ())
    assert [foil.captions[0][start:end] for start, end in foil.wrong or ()] == ["blue"]


def test_a_folder_gives_all_its_files_and_equal_names_get_their_folder(tmp_path) -> None:
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
        write(tmp_path / part, "swap_obj.json")
        (tmp_path / part / "LICENSE").write_text("free")
    benchmark = read_benchmark("sugarcrepe", [tmp_path / "one", tmp_path / "two"])
    assert [subset.name for subset in benchmark.subsets] == ["one/swap_obj", "two/swap_obj"]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("swap_obj.json", {"0": {"filename": "a.png", "caption": RED}}, "negative_caption"),
        ("swap_obj.json", {"k": {**SC, "caption": 3}}, "caption"),
        ("swap_obj.json", {"k": {**SC, "filename": None}}, "filename"),
        ("swap_obj.json", {"k": {**SC, "caption": "  "}}, "caption"),
        ("swap_obj.json", {"k": {**SC, "caption": "x" * 5000}}, "caption"),
        ("swap_obj.json", {"k": [1, 2]}, "object"),
        ("existence.json", {"k": {**small_files.VALSE["one"], "mturk": 3}}, "field 'mturk':"),
        ("existence.json", {"k": {**small_files.VALSE["one"], "mturk": {}}}, "mturk.caption"),
        (
            "existence.json",
            {"k": {**small_files.VALSE["one"], "mturk": {"caption": float("nan")}}},
            "mturk.caption",
        ),
        ("cola.json", [["a.png", RED, "b.png"]], "4 texts"),
        ("cola.json", [["a.png", RED, "b.png", 5]], "caption 2"),
        ("cola.json", [["a.png", RED, "https://example.org/?size=1", DOG]], "image 2"),
        ("examples.jsonl", [{"image_0": "a", "image_1": "b", "caption_0": RED}], "caption_1"),
        (
            "visual_genome_relation.json",
            [{**small_files.RELATION[0], "bbox_w": 0}],
            "bbox_w",
        ),
        (
            "visual_genome_relation.json",
            [{key: value for key, value in small_files.RELATION[0].items() if key != "bbox_x"}],
            "bbox_x",
        ),
        ("visual_genome_relation.json", [{"image_path": "a.png"}], "caption"),
        ("coco_karpathy_test.json", [{"image": "a.png", "caption": RED}], "caption"),
        ("hat.json", [{**small_files.HAT[0], "grounding": [["blue", True]]}], "grounding[0]"),
        ("hat.json", [{**small_files.HAT[0], "grounding": [["A", 1]]}], "grounding[0]"),
        ("hat.json", [{**small_files.HAT[0], "grounding": [["", True]]}], "grounding[0]"),
        ("nocaps-val-foil.json", [{**small_files.NOCAPS[0], "replacement": ["x"]}], "replacement"),
        (
            "nocaps-val-foil.json",
            [{**small_files.NOCAPS[0], "replacement": ["ball", "cow"]}],
            "replacement",
        ),
        ("foilv1.0_test_2017.json", {**small_files.FOIL, "images": []}, "image_id"),
        ("foilv1.0_test_2017.json", {**small_files.FOIL, "annotations": {}}, "annotations"),
        (
            "foilv1.0_test_2017.json",
            {
                **small_files.FOIL,
                "images": [{"id": 1, "file_name": "a.png"}, {"id": 1, "file_name": "b.png"}],
            },
            "images[1]', field 'id'",
        ),
        (
            "bivlc.jsonl",
            [small_files.BIVLC[0], {**small_files.BIVLC[0], "text_score_i0": True}],
            "line 1', field 'text_score_i0'",
        ),
    ],
)  # fmt: skip
def test_a_faulty_item_is_refused_with_its_file_its_key_and_its_field(
    tmp_path, name, change, words
) -> None:
    with pytest.raises(DataError, match=r"item '") as error:
        read(tmp_path, name, change)
    message = str(error.value)
    assert name in message
    assert words in message


def test_inconsistent_results_are_refused(tmp_path) -> None:
    for field, value in {"group_score": "False", "text_score_i0": "nan"}.items():
        path = write_results(tmp_path, **{field: value})
        with pytest.raises(DataError, match=rf"results.csv.gz: item 'row 1', field '{field}'"):
            read_benchmark("bivlc", [path])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(small_files.SUGARCREPE)[:60], "line 1"),
        ('{"0": {"filename": "a", "filename": "b"}}', "field 'filename': appears twice"),
        ('{"0": {}, "0": {}}', "'0' appears twice"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"a":' * 100_000, "not readable as JSON"),
        ("{}", "no items"),
        ("3", "expected an object or a list"),
        ("", "not JSON"),
        ("[" + "9" * 5000 + "]", "not readable as JSON"),
    ],
)
def test_a_file_that_is_no_list_of_items_is_refused(tmp_path, content, words) -> None:
    path = tmp_path / "add_obj.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"add_obj\.json") as error:
        read_benchmark("sugarcrepe", [path])
    assert words in str(error.value)


def test_damaged_bytes_are_refused(tmp_path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * 1000 + b"]")[:-12])
    with pytest.raises(DataError, match="gzip"):
        read_benchmark("sugarcrepe", [path])
    path = tmp_path / "b.json"
    path.write_bytes(b'{"0": "\xff"}')
    with pytest.raises(DataError, match="UTF-8"):
        read_benchmark("sugarcrepe", [path])
    path = tmp_path / "c.csv"
    path.write_text('image,caption\n"a.png')
    with pytest.raises(DataError, match=r"c\.csv"):
        read_benchmark("bivlc", [path])
    with pytest.raises(DataError, match="cannot be read"):
        read_benchmark("bivlc", [tmp_path / "absent.json"])


def test_unknown_benchmarks_and_empty_folders_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'valse'"):
        read_benchmark("vlase", [tmp_path])
    with pytest.raises(ConfigError, match="name the files"):
        read_benchmark("valse", [])
    with pytest.raises(DataError, match="no file of a benchmark"):
        read_benchmark("valse", [tmp_path])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(TREES)), values, st.integers(0, 10**6))
def test_any_value_anywhere_is_read_or_refused_with_a_message(
    tmp_path_factory, name, value, seed
) -> None:
    """One value of a right file, at a random place, is replaced by anything."""
    rng = random.Random(seed)
    tree = copy.deepcopy(TREES[name][1])
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
            node[key] = value
            break
        node = node[key]
    message = name
    try:
        read(tmp_path_factory.mktemp("any"), name, tree)
    except CounterfoilError as error:
        message = str(error)
    assert name in message


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public files are not beside the repository")
def test_the_public_files_are_read_whole() -> None:
    sizes = {
        name: [len(subset.items) + subset.excluded for subset in benchmark.subsets]
        for name, folder in {
            "sugarcrepe": "sugarcrepe",
            "sugarcrepe++": "sugarcrepe-pp",
            "valse": "valse",
            "cola": "cola",
            "bivlc": "bivlc",
        }.items()
        if (benchmark := read_benchmark(name, [SHARED / folder]))
    }
    assert (len(sizes["sugarcrepe"]), sum(sizes["sugarcrepe"])) == (7, 7511)
    assert (len(sizes["sugarcrepe++"]), sum(sizes["sugarcrepe++"])) == (5, 4757)
    assert (len(sizes["valse"]), sum(sizes["valse"])) == (11, 8782)
    assert sizes["cola"] == [210]
    assert sizes["bivlc"] == [2933, 2933]
