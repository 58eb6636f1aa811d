"""The folder of a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenleap.errors import ConfigError
from tokenleap.training.run import TrainingFolder


@pytest.mark.parametrize("text", ["[", "[]"])
def test_damaged_settings(text: str, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    folder.claim({"dtype": "float32"})
    folder.check({"dtype": "float32"})
    (folder.work / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.json is damaged: .*: delete "):
        folder.check({"dtype": "float32"})
