"""Pickles are read as data: what is written honestly comes back, nothing else does anything."""

from __future__ import annotations

import io
import pickle
import re
import resource
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import counterfoil
from counterfoil.data.pickle_values import (
    NUMPY,
    NUMPY_WITH_OBJECTS,
    PYTHON,
    ForbiddenNameError,
    PickleError,
    PickleRefusedError,
    resolve,
)
from counterfoil.data.pickles import PickleReader
from tests.data.hostile import BOMBS, forged_pointer


def read(data: bytes, known=PYTHON | NUMPY, **options):
    raw = PickleReader(io.BytesIO(data), len(data), known.get, **options).load()
    return resolve(raw, frozenset(), 4_000_000)


keys = st.text() | st.binary() | st.booleans() | st.none() | st.integers(-(1 << 59), 1 << 59)
values = st.recursive(
    keys | st.floats(allow_nan=False) | st.integers(-(1 << 120), 1 << 120),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(values, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_whatever_plain_value_is_pickled_comes_back(value, protocol) -> None:
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\x00",
        bytearray(b"ab"),
        bytearray(),
        complex(1, -2),
        {"a"},
        set(),
        OrderedDict([("b", 1), ("a", [2])]),
        True,
        1 << 100,
    ],
    ids=repr,
)
def test_values_that_are_made_by_calls_come_back_in_every_protocol(value, protocol) -> None:
    result = read(pickle.dumps(value, protocol))
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dtype", ["?", "i1", "<i8", ">f4", "f2", "c16", "u2"])
def test_numpy_numbers_come_back_in_every_protocol(dtype, protocol) -> None:
    for array in (
        np.arange(6).astype(dtype).reshape(2, 3),
        np.asfortranarray(np.arange(6).astype(dtype).reshape(3, 2)),
        np.zeros((0, 3), dtype),
        np.array(1).astype(dtype),
    ):
        result = read(pickle.dumps(array, protocol))
        assert np.array_equal(result, array)
        assert result.dtype == array.dtype.newbyteorder("=")
        scalar = array.reshape(-1)[-1:].astype(dtype)
        for number in scalar:
            assert read(pickle.dumps(number, protocol)) == number


@pytest.mark.parametrize("kind", [int, float])
def test_dense_numbers_are_keys_in_any_count_and_sparse_ones_up_to_a_limit(kind) -> None:
    dense = {kind(number): None for number in range(50_000)}
    assert read(pickle.dumps(dense, 4)) == dense
    assert read(pickle.dumps(set(dense), 4)) == set(dense)
    sparse = {kind(number << 20): None for number in range(9_000)}
    assert read(pickle.dumps(sparse, 4)) == sparse
    many = OrderedDict((kind(number << 20), None) for number in range(12_000))
    for value in (dict(many), many, set(many)):
        with pytest.raises(PickleRefusedError, match="numbers that are far apart"):
            read(pickle.dumps(value, 2))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_unsigned_number_of_128_bits_comes_back(protocol) -> None:
    state = np.random.default_rng(1).bit_generator.state
    for value in ((1 << 128) - 1, -(1 << 127), state):
        assert read(pickle.dumps(value, protocol)) == value


def test_names_of_numpy_1_and_of_python_2_are_known() -> None:
    new = pickle.dumps(np.arange(3.0), 2)
    for core in (b"numpy.core.", b"numpy._core."):
        data = new.replace(b"numpy._core.", core).replace(b"numpy.core.", core)
        assert read(data).tolist() == [0, 1, 2]
    assert read(b"c__builtin__\nset\n(](K\x01etR.") == {1}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends_in_an_error_before_it_takes_time_or_memory(bomb) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    with pytest.raises(PickleError):
        read(b"\x80\x04" + BOMBS[bomb])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert time.process_time() - started < 4  # about 1 s; the bound is against hanging
    assert after.ru_maxrss - before.ru_maxrss < 400_000  # KiB


@pytest.mark.parametrize(
    "code", ["O8", "O", "V8", "M8", "S5", "U3", "i4,f4", "(2,)i4", "f8" * 1000, "f16", 7, None]
)
def test_a_numpy_type_that_is_not_of_numbers_is_refused(code) -> None:
    data = b"\x80\x04cnumpy\ndtype\n(" + pickle.dumps(code, 2)[2:-1] + b"tR."
    with pytest.raises(PickleError):
        read(data)


NUMBER_TYPE = b"cnumpy\ndtype\n(X\x02\x00\x00\x00i8\x89\x88tR"
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"


HONEST = (1, (1,), 8, False, b"\x01" + bytes(7))


@pytest.mark.parametrize(
    "state",
    [
        HONEST,
        (1, (-1,), 8, False, b"12345678"),
        (1, (2,), 8, False, b"12345678"),
        (1, (1 << 40, 0), 8, False, b""),
        (1, (0,) * 40, 8, False, b""),
        (1, (1.0,), 8, False, b"12345678"),
        (1, (1,), 8, False, b"1234567"),
        (1, (1,), 8, False, [1]),
        (1, (1,), None, False, b"12345678"),
        (1, None, 8, False, b"12345678"),
        (1, (1,), 8),
        "state",
    ],
    ids=repr,
)
def test_only_an_array_with_an_honest_state_is_read(state) -> None:
    if isinstance(state, tuple):
        parts = [NUMBER_TYPE if part == 8 else pickle.dumps(part, 2)[2:-1] for part in state]
        data = b"(" + b"".join(parts) + b"t"
    else:
        data = pickle.dumps(state, 2)[2:-1]
    if state == HONEST:
        assert read(b"\x80\x04" + EMPTY + data + b"b.").tolist() == [1]
        return
    with pytest.raises(PickleRefusedError):
        read(b"\x80\x04" + EMPTY + data + b"b.")


@pytest.mark.parametrize(
    "state",
    [(3, "|", None, None, None, -1, -1, 0), (3, "<", None, ("a",), {"a": 1}, 8, 1, 16), (), 5],
    ids=repr,
)
def test_no_state_of_a_numpy_type_makes_pointers_of_bytes(state) -> None:
    kind = b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR" + pickle.dumps(state, 2)[2:-1] + b"b"
    data = b"\x80\x04cnumpy.core.multiarray\nscalar\n(" + kind + b"C\x08AAAAAAAAtR."
    with pytest.raises(PickleError):
        read(data, PYTHON | NUMPY_WITH_OBJECTS)


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_a_forged_pointer_is_refused_by_every_reader(core) -> None:
    for known in (PYTHON | NUMPY, PYTHON | NUMPY_WITH_OBJECTS):
        with pytest.raises(PickleError):
            read(forged_pointer(core), known)


def test_a_name_that_is_not_listed_is_refused_by_its_name() -> None:
    with pytest.raises(ForbiddenNameError, match=r"posix\.system"):
        read(b"cposix\nsystem\n(X\x02\x00\x00\x00idtR.")
    with pytest.raises(ForbiddenNameError, match=r"builtins\.eval"):
        read(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_pickle_error(data) -> None:
    with suppress(PickleError):
        read(data)


@given(st.data())
def test_a_changed_pickle_is_a_value_or_a_pickle_error(data) -> None:
    honest = pickle.dumps({"a": [np.arange(3), np.float32(1)], "b": (1, {2}, b"x")}, 2)
    changed = bytearray(honest)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(honest) - 1))] = data.draw(st.integers(0, 255))
    with suppress(PickleError):
        read(bytes(changed))


def test_no_module_opens_a_pickle_by_itself() -> None:
    banned = re.compile(
        r"pickle\.(loads?\(|Unpickler)|allow_pickle=True|weights_only=False|marshal\.|shelve\."
    )
    for path in Path(counterfoil.__file__).parent.rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert "`" in line or not banned.search(line), f"{path}:{number}"
