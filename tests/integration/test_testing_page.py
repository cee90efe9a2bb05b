"""The examples of docs/testing.md are run as they stand there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"```python\n# (\S+\.py)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_the_examples_of_the_page_pass(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "testing.md").read_text())
    assert len(blocks) == 4
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    shutil.copytree(ROOT / "tests" / "traces" / "0.2.0", tmp_path / "traces")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 passed" in ran.stdout
