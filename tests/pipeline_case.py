"""A recipe with a model directory and instant stages, for tests of the pipeline."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bosch.errors import UserError
from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from pipeline.recipe.stage_list import STAGES
from pipeline.run import launch
from pipeline.run.runner import Runner, RunOptions
from pipeline.run.worker import execute
from stages.stage import Stage, World
from tests.rank_processes import Forked

ROOT = Path(__file__).resolve().parents[1]


def fake_table(distributed: bool = False) -> tuple[Stage[Any], ...]:
    """The real table of stages with other functions; only train may run on several processes."""
    return tuple(
        replace(
            stage,
            function="tests.fake_stages:run",
            distributed=distributed and stage.name == "train",
        )
        for stage in STAGES
    )


def in_process(order: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Run a stage in this process instead of the runner's workers."""
    return execute(order)


def runner(case: Case, *overrides: str, **options: Any) -> Runner:
    """A runner of a case's recipe with instant stages."""
    loaded = load_recipe(case.file, overrides, env={}, stages=fake_table())
    return Runner(loaded, RunOptions(**options), in_process)


def write_safetensors(path: Path, value: int = 0) -> None:
    """A weights file with one tensor of four bytes."""
    header = json.dumps({"w": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<i", value))


@cache
def _weights() -> bytes:
    """Weights of a case's model with the names and shapes of its config.json; all are zero."""
    layer = {
        "input_layernorm": [64], "post_attention_layernorm": [64], "self_attn.q_norm": [8],
        "self_attn.k_norm": [8], "self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64],
        "self_attn.v_proj": [32, 64], "self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64],
        "mlp.up_proj": [128, 64], "mlp.down_proj": [64, 128],
    }  # fmt: skip
    shapes = {"embed_tokens": [256, 64], "norm": [64]}
    shapes |= {f"layers.{n}.{name}": shape for n in range(4) for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entry = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        header[f"model.{name}.weight"] = entry
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def truncate(path: Path, cut: int) -> None:
    """Cut the last `cut` bytes off."""
    path.write_bytes(path.read_bytes()[:-cut])


def lose(patch: pytest.MonkeyPatch, lost: Path, number: int = errno.ESTALE) -> None:
    """Have the system fail to look at `lost` and what is below it, as a server that is away does.

    `Path.exists` and its like are False of it, as they are from Python 3.14 on.
    """

    def checked(real: Any) -> Any:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and Path(path).is_relative_to(lost):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments, **options)

        return call

    for name in ("stat", "scandir", "listdir"):
        patch.setattr(os, name, checked(getattr(os, name)))
    patch.setattr(io, "open", checked(io.open))  # which pathlib calls
    for name, old in (("exists", "exists"), ("is_dir", "isdir"), ("is_file", "isfile")):
        patch.setattr(Path, name, getattr(os.path, old))


def gone(pid: int, seconds: float = 20) -> bool:
    """Whether a process ends within `seconds`; a zombie counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def wait_for(path: Path, seconds: float = 60) -> str:
    """The text of a file as soon as there is any, for example a process id."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written within {seconds:g} s")


class Case:
    """A folder with a model, a corpus and a recipe file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir(parents=True)
        config = {
            "model_type": "qwen3",
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_size": 64,
            "head_dim": 8,
            "intermediate_size": 128,
            "vocab_size": 256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "layer_types": ["full_attention"] * 4,
        }
        (self.model / "config.json").write_text(json.dumps(config))
        (self.model / "tokenizer.json").write_text("{}")
        (self.model / "model.safetensors").write_bytes(_weights())
        self.corpus = folder / "corpus"
        self.corpus.mkdir()
        (self.corpus / "a.txt").write_text("some text")
        self.runs = folder / "runs"
        self.file = folder / "tiny.yaml"
        self.content: dict[str, Any] = {
            "model": {"path": str(self.model)},
            "prepare": {
                "sequence_length": 128,
                "train_tokens": 4096,
                "sources": [{"name": "a", "kind": "text", "path": str(self.corpus)}],
                "calibration": {"length": 256, "examples": 4},
            },
            "search": {"swa_ratio": 0.5, "window_size": 32},
            "train": {"total_tokens": 2048, "batch_tokens": 512, "checkpoint_tokens": [1024]},
            "evaluate": {"ruler": {"lengths": [512], "samples": 2}},
            "runtime": {"output_root": str(self.runs), "processes": 1},
        }
        self.save()

    def change_config(self, **changes: Any) -> None:
        """Change values in the model's config.json."""
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def fault(self, *overrides: str, **env: str) -> str:
        """The message with which loading the recipe is refused."""
        try:
            load_recipe(self.file, overrides, env=env)
        except UserError as fault:
            return str(fault).removeprefix(f"{self.file}: ")
        raise AssertionError("the recipe is not refused")

    def save(self) -> None:
        self.file.write_text(yaml.safe_dump(self.content))

    def environment(self, **extra: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("FAKE_")}
        env["PYTHONPATH"] = str(ROOT)
        return {**env, "FAKE_MARK": str(self.folder), **extra}

    def command(self, *arguments: str, distributed: bool = False) -> list[str]:
        """The command line with the fake stages, in a new Python."""
        return [sys.executable, "-m", __name__, *self._arguments(arguments, distributed)]

    def call(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run `command` to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(**extra),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, *arguments: str, distributed: bool = False, **extra: str) -> Forked:
        """The same, forked from a process that has imported it, with forked stages and ranks."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        extra["FAKE_MARK"] = str(self.folder)
        return Forked(self._arguments(arguments, distributed), folder / "output", __name__, **extra)

    def fork(self, *arguments: str, **extra: Any) -> subprocess.CompletedProcess[str]:
        """Run `start` to its end."""
        return self.start(*arguments, **extra).done()

    def _arguments(self, arguments: tuple[str, ...], distributed: bool) -> list[str]:
        name, *rest = arguments
        return [str(int(distributed)), name, str(self.file), *rest]

    def make(self, until: str) -> None:
        """Run the stages up to this one in this process."""
        runner(self, until=until).run()

    def output(self, stage: str) -> Path:
        return self.runs / "tiny" / stage

    def calls(self, stage: str, rank: int = 0) -> int:
        """The number of times that a stage has worked on its published output."""
        return (self.output(stage) / f"calls.{rank}.txt").read_text().count("called")


if __name__ == "__main__":
    launch.GRACE_SECONDS = 2
    sys.exit(main(sys.argv[2:], fake_table(sys.argv[1] == "1")))
