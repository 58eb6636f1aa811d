"""PyTorch's elementwise functions are called on one number before threads call them together."""

from __future__ import annotations

import subprocess
import sys

import torch

from tokenleap.runtime import cpu

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


def test_all_functions_take_the_number() -> None:
    """None of them is outside its domain, where a function may take another way."""
    for function in cpu._FUNCTIONS:
        assert torch.isfinite(function(torch.tensor([0.5])))
