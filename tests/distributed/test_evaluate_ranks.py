from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_data import save_tiny_model

SCRIPT = """
import json, sys
from pathlib import Path
from stages.original import run as original
from stages.configs import EvaluateConfig, ModelConfig, Runtime
from stages.context import StageConfig

if __name__ == "__main__":
    folder, work = Path(sys.argv[1]), Path(sys.argv[2])
    section = EvaluateConfig(needle={
        "tasks": ["niah_single_1", "niah_single_3"], "lengths": [400], "samples": 5,
        "max_new_tokens": 4,
    })
    model = ModelConfig(path=str(folder / "model"), dtype="float32")
    config = StageConfig(section, model, seed=1, runtime=Runtime(eval_batch_size=1))
    print(json.dumps(original.run(config, {}, work)))
"""


@pytest.mark.distributed
def test_two_ranks_give_the_answers_of_one(tmp_path):
    save_tiny_model(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    samples = []
    for launch in (
        [sys.executable],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    ):
        work = tmp_path / f"work{len(launch)}"
        work.mkdir()
        command = [*launch, str(tmp_path / "script.py")]
        done = subprocess.run(
            [*command, str(tmp_path), str(work)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert not (work / "answers").exists()
        samples.append((work / "samples.jsonl").read_text())
        assert json.loads((work / "scores.json").read_text())["checkpoints"]["original"]
    assert samples[0] == samples[1]
    assert len(samples[0].splitlines()) == 10
