"""Guides: both forms give the teachers' scores, survive a kill, and refuse other data."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.encoders.stored import EncodedReader, EncodedWriter, Extent
from counterfoil.training.guides import build as guide_build
from counterfoil.training.guides import guide as guide_resident
from counterfoil.training.guides.build import build_guide
from counterfoil.training.guides.guide import EmbeddingGuide, MatrixGuide, copied, open_guide
from counterfoil.training.guides.manifest import default_form, read_manifest
from tests.conftest import thinned
from tests.training.trained_runs import direct_scores, save_teacher, small_split, with_unreadable

CPU = torch.device("cpu")
FORMS = ["matrix", "embeddings"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch) -> None:
    """So that even a small split takes several blocks."""
    monkeypatch.setattr(guide_build, "IMAGE_BLOCK", 5)
    monkeypatch.setattr(guide_build, "CAPTION_BLOCK", 7)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return small_split(tmp_path_factory.mktemp("guide-data"))


@pytest.fixture(scope="module")
def teachers(split, tmp_path_factory) -> list[Path]:
    """Two architectures, one of which knows fewer words than the other."""
    folder = tmp_path_factory.mktemp("teachers")
    save_teacher(split, folder / "a", "vse-fc", seed=1)
    save_teacher(split, folder / "b", "scan-t2i", seed=2, min_count=9)
    return [folder / "a", folder / "b"]


def everything(folder: Path, split: Split) -> torch.Tensor:
    ids = torch.arange(len(split)), torch.arange(len(split.texts))
    return open_guide(folder, split).scores(*ids, CPU)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "name", thinned(["vse-fc", "scan-t2i", "chan", "naaf", "dive"], "vse-fc", "naaf")
)
def test_both_forms_give_the_mean_of_the_teachers_scores(split, tmp_path, name) -> None:
    models = [save_teacher(split, tmp_path / str(k), name, seed=k) for k in range(2)]
    direct = direct_scores(models, split)
    for form in FORMS:
        build_guide(tmp_path / form, [tmp_path / "0", tmp_path / "1"], split, form=form)
        result = everything(tmp_path / form, split)
        assert result.dtype == torch.float32
        assert not result.requires_grad
        # a half has 11 bits; a matcher may amplify those of what it compares
        assert (result - direct).abs().max() < (1e-3 if form == "embeddings" else 5e-4)


def test_boxes_and_word_graphs_come_along_for_matchers_that_read_them(split, tmp_path) -> None:
    model = save_teacher(split, tmp_path / "run", "gsmn-sparse")
    assert model.matcher.needs_boxes
    assert model.matcher.needs_graph
    build_guide(tmp_path / "g", [tmp_path / "run"], split, form="embeddings")
    apart = (everything(tmp_path / "g", split) - direct_scores([model], split)).abs()
    # it drops fragments below a threshold, and half precision takes a few over it
    assert (apart < 2e-3).float().mean() > 0.9


def test_teachers_may_differ_in_architecture_and_vocabulary(split, teachers, tmp_path) -> None:
    from counterfoil.models import from_pretrained

    models = [from_pretrained(path) for path in teachers]
    assert len(models[0].text) != len(models[1].text)
    for form in FORMS:
        build_guide(tmp_path / form, teachers, split, form=form)
        result = everything(tmp_path / form, split)
        assert torch.allclose(result, direct_scores(models, split), atol=5e-4)


@pytest.mark.parametrize("form", FORMS)
def test_any_batch_is_a_block_of_the_whole(split, teachers, tmp_path, form) -> None:
    build_guide(tmp_path / "g", teachers, split, form=form)
    whole, guide = everything(tmp_path / "g", split), open_guide(tmp_path / "g", split)
    images, captions = torch.tensor([7, 0, 7, 11]), torch.tensor([23, 1, 1, 4, 0])
    result = guide.scores(images, captions, CPU)
    assert torch.allclose(result, whole[images][:, captions], atol=1e-6)
    assert guide.scores(images[:0], captions, CPU).shape == (0, 5)


@pytest.mark.parametrize("form", FORMS)
def test_images_that_cannot_be_read_have_no_scores(split, teachers, tmp_path, form) -> None:
    broken = with_unreadable(split, tmp_path, [0, 1, 2, 3, 4, 9])  # a whole block, and one more
    for name, data in {"broken": broken, "whole": split}.items():
        build_guide(tmp_path / name, teachers, data, form=form)
    result, whole = everything(tmp_path / "broken", broken), everything(tmp_path / "whole", split)
    gone = torch.zeros(12, dtype=torch.bool)
    gone[[0, 1, 2, 3, 4, 9]] = True
    assert result[gone].isnan().all()
    assert torch.allclose(result[~gone], whole[~gone], atol=1e-6)


def test_the_form_goes_by_size(split, teachers, tmp_path) -> None:
    assert default_form(1000, 5000) == "matrix"
    assert default_form(29_000, 145_000) == "embeddings"
    build_guide(tmp_path / "g", teachers, split)
    assert isinstance(open_guide(tmp_path / "g", split), MatrixGuide)
    build_guide(tmp_path / "e", teachers, split, form="embeddings")
    assert isinstance(open_guide(tmp_path / "e", split), EmbeddingGuide)


def test_a_matrix_is_an_array_anyone_can_map_and_leaves_nothing_else(
    split, teachers, tmp_path
) -> None:
    build_guide(tmp_path / "g", teachers, split, form="matrix")
    mapped = np.load(tmp_path / "g" / "scores.npy", mmap_mode="r")
    assert mapped.dtype == np.float16
    assert np.array_equal(mapped.astype(np.float32), everything(tmp_path / "g", split).numpy())
    names = {path.name for path in (tmp_path / "g").iterdir()}
    assert names == {"guide.json", "scores.npy", "ids.jsonl", "captions.jsonl"}


def test_a_guide_of_embeddings_needs_nothing_outside_its_folder(split, tmp_path) -> None:
    import shutil

    model = save_teacher(split, tmp_path / "run", "scan-t2i")
    (tmp_path / "run" / "training_state.pt").write_bytes(b"the optimiser")
    build_guide(tmp_path / "g", [tmp_path / "run"], split, form="embeddings")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "g").rename(tmp_path / "moved")
    assert not list((tmp_path / "moved").rglob("training_state.pt"))
    result = everything(tmp_path / "moved", split)
    assert torch.allclose(result, direct_scores([model], split), atol=5e-4)


class Interrupted(Exception):
    """Stands for Ctrl-C."""


class StopsAfter:
    """A progress bar that ends the build after some blocks."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def track(self, items, description, total=None, done=0):
        for item in items:
            if not self.left:
                raise Interrupted
            self.left -= 1
            yield item

    def note(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blocks", thinned([0, 1, 4, 9], 4))
def test_an_interrupted_build_continues_to_the_same_bytes(
    split, teachers, tmp_path, form, blocks
) -> None:
    build_guide(tmp_path / "whole", teachers, split, form=form)
    with pytest.raises(Interrupted):
        build_guide(tmp_path / "cut", teachers, split, form=form, progress=StopsAfter(blocks))
    begun = read_manifest(tmp_path / "cut")
    assert not begun.complete
    assert (begun.share_done > 0) == (blocks > 0)
    with pytest.raises(DataError, match=r"not finished \(\d+%\); run the command"):
        open_guide(tmp_path / "cut", split)
    build_guide(tmp_path / "cut", teachers, split)  # the form need not be said again
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_blocks_that_were_done_are_not_done_again(split, teachers, tmp_path) -> None:
    for _ in range(40):
        try:
            build_guide(tmp_path / "g", teachers, split, form="matrix", progress=StopsAfter(1))
        except Interrupted:
            continue
        break
    assert read_manifest(tmp_path / "g").complete
    build_guide(tmp_path / "g", teachers, split, progress=StopsAfter(0))


def test_captions_that_fit_on_the_gpu_are_read_once(split, teachers, tmp_path, monkeypatch) -> None:
    reads = []
    real = EncodedReader.read
    monkeypatch.setattr(EncodedReader, "read", lambda *given: reads.append(1) or real(*given))
    build_guide(tmp_path / "read", teachers, split, form="matrix")
    before = len(reads)
    monkeypatch.setattr(guide_build, "room_for", lambda *_: True)
    build_guide(tmp_path / "kept", teachers, split, form="matrix")
    assert len(reads) - before == before // -(-len(split) // 5)  # once, not for each block
    assert files(tmp_path / "kept") == files(tmp_path / "read")


def build_and_die(folder: Path, teachers: list[Path], split: Split, form: str, flush: int) -> int:
    """Build in another process that is killed at its n-th flush; how it ended."""
    child = os.fork()
    if child == 0:
        real, seen = os.fsync, iter(range(10_000))

        def flush_or_die(handle: int) -> None:
            if next(seen) == flush:
                os.kill(os.getpid(), signal.SIGKILL)
            real(handle)

        os.fsync = flush_or_die
        try:
            build_guide(folder, teachers, split, form=form)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("form", thinned(FORMS, "embeddings"))
@pytest.mark.slow
def test_a_build_killed_at_any_flush_continues_to_the_same_bytes(
    split, teachers, tmp_path, form
) -> None:
    build_guide(tmp_path / "whole", teachers, split, form=form)
    whole, kills = files(tmp_path / "whole"), 0
    for flush in [0, 1, 2, 3, 5, 8, 11, 14, 17, 20, 26]:
        folder = tmp_path / f"cut-{flush}"
        kills += build_and_die(folder, teachers, split, form, flush) == signal.SIGKILL
        build_guide(folder, teachers, split, form=form)
        assert files(folder) == whole
    assert kills >= 10


def test_a_build_killed_while_it_tidies_up_leaves_nothing_once_repeated(
    split, teachers, tmp_path, monkeypatch
) -> None:
    def interrupt(folder: Path, ignore_errors: bool) -> None:
        raise Interrupted

    build_guide(tmp_path / "whole", teachers, split, form="matrix")
    with monkeypatch.context() as patch:
        patch.setattr("counterfoil.training.guides.build.shutil.rmtree", interrupt)
        with pytest.raises(Interrupted):
            build_guide(tmp_path / "cut", teachers, split, form="matrix")
    assert read_manifest(tmp_path / "cut").complete
    assert (tmp_path / "cut" / "teacher-0").is_dir()
    build_guide(tmp_path / "cut", teachers, split, form="matrix")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_build_refuses_to_continue_as_another(split, teachers, tmp_path) -> None:
    guide = tmp_path / "g"
    with pytest.raises(Interrupted):
        build_guide(guide, teachers, split, form="embeddings", progress=StopsAfter(2))
    with pytest.raises(ConfigError, match="begun as 'embeddings', asked for 'matrix'"):
        build_guide(guide, teachers, split, form="matrix")
    with pytest.raises(DataError, match="begun with other teachers"):
        build_guide(guide, teachers[:1], split)
    with pytest.raises(DataError, match="begun with other data: it was made of 12 images"):
        build_guide(guide, teachers, split.select(range(11)))
    changed = tmp_path / "a"
    save_teacher(split, changed, "vse-fc", seed=77)
    with pytest.raises(DataError, match="begun with other teachers"):
        build_guide(guide, [changed, teachers[1]], split)


def test_a_folder_that_is_something_else_is_left_alone(split, teachers, tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is not a guide"):
        build_guide(tmp_path, teachers, split)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(DataError, match=r"not a guide.*counterfoil guide build"):
        open_guide(tmp_path, split)
    with pytest.raises(ConfigError, match="at least one trained run"):
        build_guide(tmp_path / "g", [], split)
    with pytest.raises(CheckpointError, match="neither a run nor a saved model"):
        build_guide(tmp_path / "g", [tmp_path], split)


@pytest.fixture(scope="module")
def built(split, teachers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "g"
    build_guide(folder, teachers, split)
    return folder


def test_other_data_are_refused_by_what_differs(split, built, tmp_path) -> None:
    with pytest.raises(DataError, match=r"12 images with 24 captions.*have 11 images with 22"):
        open_guide(built, split.select(range(11)))
    renamed = replace(split, ids=[*split.ids[:4], "stranger", *split.ids[5:]])
    with pytest.raises(DataError, match="image id 4 is 'train-4' in the guide and 'stranger' in"):
        open_guide(built, renamed)
    assert split.captions[3][0] != split.captions[3][1]
    swapped = [list(texts) for texts in split.captions]
    swapped[3].reverse()
    with pytest.raises(DataError, match="caption 6 is ") as caught:
        open_guide(built, replace(split, captions=swapped))
    assert repr(split.captions[3][0]) in str(caught.value)
    assert repr(split.captions[3][1]) in str(caught.value)


def test_other_features_are_refused_by_what_differs(split, built, tmp_path) -> None:
    made = replace(split, fragments=replace(split.fragments, made_by="segments"))
    with pytest.raises(DataError, match=r"an extractor of .*precomputed.* 'segments'"):
        open_guide(built, made)
    broken = with_unreadable(split, tmp_path, [5])
    with pytest.raises(DataError, match="features are others: same shape"):
        open_guide(built, broken)


def test_a_guide_that_names_no_options_of_an_extractor_is_compared_by_its_numbers(
    split, teachers, tmp_path
) -> None:
    def made_by(name: str) -> Split:
        return replace(split, fragments=replace(split.fragments, made_by=name))

    build_guide(tmp_path / "g", teachers, made_by("segments"))
    assert open_guide(tmp_path / "g", made_by('segments {"side": 96}')) is not None
    with pytest.raises(DataError, match=r"an extractor of 'segments', these data have 'grid'"):
        open_guide(tmp_path / "g", made_by("grid"))


def test_a_teacher_of_other_features_is_refused(split, teachers, tmp_path) -> None:
    from tests.conftest import make_split

    (tmp_path / "wide").mkdir()
    wide = make_split(tmp_path / "wide", "train", 12, 0, dim=20)
    with pytest.raises(DataError, match="reads fragments of 16 numbers, the data have 20"):
        build_guide(tmp_path / "g", teachers, wide)


def test_a_changed_or_damaged_guide_is_refused(split, teachers, tmp_path) -> None:
    guide = tmp_path / "g"
    build_guide(guide, teachers, split, form="embeddings")
    save_teacher(split, guide / "teacher-0" / "model", "vse-fc", seed=9)
    with pytest.raises(DataError, match="not the weights of 'a' that the guide was begun with"):
        open_guide(guide, split)
    save_teacher(split, guide / "teacher-0" / "model", "vse-fc", seed=1)
    open_guide(guide, split)
    os.truncate(guide / "teacher-1" / "images" / "fragments.bin", 100)
    with pytest.raises(DataError, match="cut short"):
        open_guide(guide, split)
    (guide / "guide.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        open_guide(guide, split)
    tree = read_manifest_text(tmp_path, split, teachers)
    (guide / "guide.json").write_text(json.dumps(tree | {"format": 2}))
    with pytest.raises(DataError, match="written in format 2, this version reads format 1"):
        open_guide(guide, split)


def read_manifest_text(folder: Path, split: Split, teachers: list[Path]) -> dict:
    build_guide(folder / "other", teachers, split)
    return json.loads((folder / "other" / "guide.json").read_text())


def test_encodings_come_back_as_they_were_stored(tmp_path) -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 1, 0, 4, 2])
    mask = torch.arange(4)[None, :] < lengths[:, None]
    fragments = torch.randn(5, 4, 6, generator=rng).half().float() * mask[..., None]
    boxes = torch.rand(5, 4, 4, generator=rng) * mask[..., None]
    graph = (torch.rand(5, 4, 4, generator=rng) < 0.5) & mask[:, :, None] & mask[:, None, :]
    pooled = torch.randn(5, 6, generator=rng).half().float()
    encoded = Encoded(fragments, mask, pooled, boxes, graph)
    writer = EncodedWriter(tmp_path, "float16", Extent())
    writer.append(None, np.zeros(2, dtype=bool))
    writer.append(encoded[:2], np.array([True, False, True]))
    extent = writer.append(encoded[2:], np.ones(3, dtype=bool))
    assert (extent.items, extent.present, extent.rows) == (8, 5, 10)
    result, there = EncodedReader(tmp_path, "float16", extent).read([7, 5, 3, 6, 2, 4, 6])
    assert there.tolist() == [True, True, False, True, True, True, True]
    for row, item in {0: 4, 1: 2, 3: 3, 4: 0, 5: 1, 6: 3}.items():
        for name in ("fragments", "mask", "pooled", "boxes", "graph"):
            assert torch.equal(
                getattr(result, name)[row].float(), getattr(encoded, name)[item].float()
            )
    assert not result.mask[2].any()


def test_what_half_precision_cannot_hold_is_refused(tmp_path) -> None:
    encoded = Encoded(None, torch.zeros(1, 0, dtype=torch.bool), torch.tensor([[1e6]]))
    writer = EncodedWriter(tmp_path, "float16", Extent())
    with pytest.raises(
        DataError, match="not finite in float16; build the guide with --form matrix"
    ):
        writer.append(encoded, np.ones(1, dtype=bool))


def share_of_scores(folder: Path, split: Split, images: int) -> Tensor:
    """As one of two processes: ask for a block, see what comes back."""
    ids = torch.arange(images), torch.arange(len(split.texts))
    return open_guide(folder, split).scores(*ids, CPU)


@pytest.mark.parametrize("images", [1, 7])
def test_two_processes_share_the_scoring_and_see_all_of_it(
    split, teachers, tmp_path, images, in_two_processes
) -> None:
    build_guide(tmp_path / "g", teachers, split, form="embeddings")
    whole = everything(tmp_path / "g", split)[:images]
    for result in in_two_processes(share_of_scores, tmp_path / "g", split, images):
        assert torch.allclose(result, whole, atol=1e-6)


@pytest.mark.parametrize("name", ["vse-fc", "scan-t2i", "esa"])
def test_items_kept_on_the_device_are_those_on_disk(split, tmp_path, name, monkeypatch) -> None:
    monkeypatch.setattr(guide_resident, "COPY_ROWS", 5)
    save_teacher(split, tmp_path / "run", name)
    broken = with_unreadable(split, tmp_path, [2, 7])
    build_guide(tmp_path / "guide", [tmp_path / "run"], broken, form="embeddings")
    guide = open_guide(tmp_path / "guide", broken)
    assert isinstance(guide, EmbeddingGuide)
    teacher = guide.teachers[0]
    for reader in (teacher.images, teacher.captions):
        kept = copied(reader, CPU)
        assert kept is not None
        for items in ([7, 0, 3, 0], [2], list(range(12))):
            chosen = np.array(items)
            (result, there), (expected, expected_there) = kept.read(chosen), reader.read(chosen)
            assert torch.equal(there, expected_there)
            assert torch.equal(result.mask, expected.mask)
            for part in ("fragments", "pooled", "boxes"):
                mine, theirs = getattr(result, part), getattr(expected, part)
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs)


def test_items_with_links_between_words_stay_on_disk(split, tmp_path) -> None:
    save_teacher(split, tmp_path / "run", "gsmn-sparse")
    build_guide(tmp_path / "guide", [tmp_path / "run"], split, form="embeddings")
    assert copied(open_guide(tmp_path / "guide", split).teachers[0].captions, CPU) is None
