"""The instructions of quadratic forms, carried out one by one: Triton's interpreter runs none."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from counterfoil.kernels.triton.instructions import quadratic_instructions, quadratic_operands

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def carried_out(code: str, operands: list[float], memory: bytes) -> tuple[float, float]:
    """Outputs $0 and $1, for the operands from $2 on; the last is the address 0 in ``memory``."""
    values = {f"${2 + index}": value for index, value in enumerate(operands)}
    address = f"${2 + len(operands)}"
    for instruction in re.split(r";\s*", code.strip().strip("{}").strip()):
        name, _, rest = instruction.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if name.startswith("ld.global"):
            into, base, offset = re.fullmatch(r"{(.*)}, \[(.*) \+ (.*)\]", rest).groups()
            assert base == address
            size = 4 if name.endswith("f32") else 2
            assert int(offset) % (4 * size) == 0, "loads of several values are aligned"
            for number, register in enumerate(into.split(", ")):
                start = int(offset) + number * size
                value = memory[start : start + size]
                assert len(value) == size, "within the padded triangle"
                values[register] = (
                    float(np.frombuffer(value, np.float32)[0]) if size == 4 else value
                )
            continue
        into, *given = re.split(r",\s*", rest, maxsplit=0 if "{" not in rest else 1)
        if name == "cvt.f32.f16":
            values[into] = float(np.frombuffer(values[given[0]], np.float16)[0])
        elif name == "mov.b16":
            values[into] = int(given[0]).to_bytes(2, "little")
        elif name == "mov.b32":
            low, high = given[0].strip("{}").split(", ")
            values[into] = float(np.frombuffer(values[low] + values[high], np.float32)[0])
        elif name == "mov.f32":
            values[into] = 0.0 if given[0] == "0f00000000" else values[given[0]]
        elif name == "mul.f32":
            values[into] = values[given[0]] * values[given[1]]
        else:
            assert name == "fma.rn.f32", instruction
            a, b, c = (values[operand] for operand in given)
            values[into] = a * b + c
    return values["$0"], values["$1"]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("entries", "spare", "step"), [(1, 0, 1), (2, 2, 1), (7, 4, 1), (6, 2, 8)])
def test_quadratic_forms_are_those_of_the_whole_matrix(
    kind: str, entries: int, spare: int, step: int
) -> None:
    draw = torch.Generator().manual_seed(entries * step)
    matrix = torch.randn(entries, entries, generator=draw)
    matrix = (matrix + matrix.T).to(DTYPES[kind]).double()
    e, f = torch.randn(2, entries + spare, generator=draw).double()
    row, column = torch.tril_indices(entries, entries)
    triangle = matrix[row, column] * torch.where(row == column, 1.0, 2.0)
    fours = torch.nn.functional.pad(triangle, (0, -len(triangle) % 4), value=torch.nan).view(-1, 4)
    memory = torch.full((len(fours), step, 4), torch.nan)  # between: other threads' matrices
    memory[:, 0] = fours
    raw = memory.to(DTYPES[kind]).flatten().view(torch.uint8).numpy().tobytes()

    code = quadratic_instructions(entries + spare, entries, step, kind)
    got = carried_out(code, [*e.tolist(), *f.tolist()], raw)

    want = [float(x[:entries] @ matrix @ x[:entries]) for x in (e, f)]
    assert got == pytest.approx(want, rel=1e-9)


def test_operands_are_two_results_the_values_and_an_address() -> None:
    assert quadratic_operands(3) == "=f,=f,f,f,f,f,f,f,l"
