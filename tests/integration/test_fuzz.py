"""A fixed dose of bad input; `tools/fuzz.py` by hand takes more, with seeds of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_bad_input_is_refused_and_nothing_else() -> None:
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--seed", "20261201", "--inputs", "20000"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    outcomes = report["outcomes"]
    for kind in ("frame taken", "frame refused: body", "endpoint: taken", "picture taken", "picture refused"):
        assert outcomes[kind] > 100, outcomes  # each target was reached, and by inputs of both sorts
    assert outcomes["http: 200"] > 0
    assert outcomes["http: 400"] > 0
