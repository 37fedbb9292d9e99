"""Linear layers whose weight is packed once, for the C kernels; see src/linear.h for the layout."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ragcache_kernels.layer_ops import Activation
from ragcache_kernels.native.library import Team
from ragcache_kernels.native.structs import DTYPES

STORE, ADD = 0, 1
EPILOGUES: dict[Activation, int] = {"silu": 2, "gelu_tanh": 3}


class Packed(ctypes.Structure):
    """`struct packed`."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("size_in", ctypes.c_int64),
        ("size_out", ctypes.c_int64),
        ("dtype", ctypes.c_int),
    )


class LinearCall(ctypes.Structure):
    """`struct linear`."""

    _fields_ = (
        ("weight", ctypes.POINTER(Packed)),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("input_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("epilogue", ctypes.c_int),
    )


class PackedLinear:
    """rows · weightᵀ + bias, accumulated in float32 and rounded once.

    With an activation the weight is `[2F, in]`, gate then up, and the result
    activation(gate) · up. Quantised, the weight has int8 with a scale for each output, and each 64
    elements of a row are quantised likewise as they come, so that outliers cost little. Results of
    a row do not depend on the others.
    """

    def __init__(
        self,
        team: Team,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation | None = None,
        quantised: bool = False,
    ) -> None:
        """Pack a copy of weight `[out, in]` and bias `[out]`, float32 or bfloat16.

        Raises:
            TypeError: for another dtype.
        """
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"weights in {weight.dtype} cannot be packed")
        self._team = team
        self.epilogue = STORE if activation is None else EPILOGUES[activation]
        self.dtype = weight.dtype  # of rows and results
        self.size_in = weight.shape[1]
        self.size_out = len(weight) // (2 if activation else 1)
        columns = team.library.panel_columns()
        order = _gated_order(self.size_out, columns) if activation else torch.arange(len(weight))
        order = torch.nn.functional.pad(order, (0, -len(order) % columns), value=-1)
        rows = _take(weight.detach(), order)
        self._tensors: dict[str, Tensor] = {}
        if quantised:
            rows, self._tensors["scales"] = _quantise(rows)
        if bias is not None:
            self._tensors["bias"] = _take(bias.detach().float(), order)
        self._tensors["panels"] = _panels(rows, columns)
        pointers = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        kind = DTYPES[rows.dtype]
        self.packed = Packed(size_in=self.size_in, size_out=self.size_out, dtype=kind, **pointers)

    @property
    def nbytes(self) -> int:
        """Memory that the packed weight takes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __call__(self, rows: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`, both in `dtype`; raises ValueError for other rows."""
        output = rows.new_empty(len(rows), self.size_out)
        self._run(rows, output, self.epilogue)
        return output

    def add_to(self, total: Tensor, rows: Tensor) -> Tensor:
        """Add the result for rows `[T, in]` to total `[T, out]`, in place.

        Raises ValueError as calling does, and where an activation would be lost.
        """
        if self.epilogue != STORE or total.shape != (len(rows), self.size_out):
            raise ValueError(f"nothing to add to {list(total.shape)}")
        self._run(rows, total, ADD)
        return total

    def _run(self, rows: Tensor, output: Tensor, epilogue: int) -> None:
        if rows.shape[1:] != (self.size_in,):
            raise ValueError(f"rows {list(rows.shape)} for a weight of {self.size_in} columns")
        for tensor in (rows, output):
            if tensor.dtype != self.dtype or tensor.stride(1) != 1:
                raise ValueError(f"rows must be contiguous {self.dtype}, not {tensor.dtype}")
        call = LinearCall(
            ctypes.pointer(self.packed),
            rows.data_ptr(),
            output.data_ptr(),
            len(rows),
            rows.stride(0),
            output.stride(0),
            DTYPES[self.dtype],
            epilogue,
        )
        self._team.library.run_linear(self._team.handle, ctypes.byref(call))


def _gated_order(size: int, columns: int) -> Tensor:
    """Which rows of a gate-up weight each panel takes: a half of gates, the same of up."""
    half = columns // 2
    gates = torch.nn.functional.pad(torch.arange(size), (0, -size % half), value=-1).view(-1, half)
    return torch.stack((gates, torch.where(gates < 0, -1, gates + size)), dim=1).flatten()


def _take(rows: Tensor, order: Tensor) -> Tensor:
    """The rows in this order; zeros for −1."""
    taken = rows[order.clamp(min=0)]
    taken[order < 0] = 0
    return taken


def _quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers up to 127 and a scale for each row."""
    scales = rows.float().abs().amax(dim=1) / 127
    integers = (rows.float() / scales.clamp(min=torch.finfo().tiny)[:, None]).round()
    return integers.to(torch.int8), scales


def _panels(rows: Tensor, columns: int) -> Tensor:
    """`[panels, steps, columns, weights of a step]`; a step is 32 bits of each column."""
    per_step = 4 // rows.itemsize
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % per_step))
    return rows.view(-1, columns, rows.shape[1] // per_step, per_step).transpose(1, 2).contiguous()
