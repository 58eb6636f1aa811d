"""Model folders that are refused, for the tests of all kinds of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenleap.errors import ModelError
from tokenleap.models import load_model

CPU = torch.device("cpu")


def refusal(folder: Path) -> str:
    """The one line `load_model` refuses a folder with."""
    with pytest.raises(ModelError) as raised:
        load_model(folder, torch.float32, CPU)
    message = str(raised.value)
    assert "\n" not in message
    assert str(folder) in message
    return message
