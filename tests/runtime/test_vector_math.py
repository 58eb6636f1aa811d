"""PyTorch's elementwise functions are called on one number before threads call them together."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor

from tokenleap.runtime import cpu, network

CALLS = """
import torch

first = {}

def watched(name, function):
    def call(given, *rest, **options):
        first.setdefault(name, given.numel())
        return function(given, *rest, **options)
    return call

for name in ("cos", "sin", "exp"):
    setattr(torch, name, watched(name, getattr(torch, name)))

import tokenleap.runtime.network

assert first == {"cos": 1, "sin": 1, "exp": 1}, first
"""


def test_the_first_call_of_a_process_is_for_one_number() -> None:
    subprocess.run([sys.executable, "-c", CALLS], check=True, timeout=120)


def test_a_network_is_not_imported_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Counter[object]()

    def watched(function: object, number: Tensor) -> None:
        called[function, number.dtype, number.numel()] += 1

    functions = cpu._FUNCTIONS
    monkeypatch.setattr(cpu, "_FUNCTIONS", [partial(watched, each) for each in functions])
    runpy.run_path(network.__file__)
    dtypes = (torch.float32, torch.float64)
    assert called == {(each, dtype, 1): 1 for each in functions for dtype in dtypes}


def test_all_functions_take_the_number() -> None:
    """None of them is outside its domain, where a function may take another way."""
    for function in cpu._FUNCTIONS:
        assert torch.isfinite(function(torch.tensor([0.5])))
