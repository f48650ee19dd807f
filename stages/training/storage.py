"""What training leaves on disk: restart points and loadable checkpoints, complete or absent.

Everything is written beside its place and renamed into it, so that a process killed at any moment
leaves the last complete state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bosch.errors import RunError, UserError

_RESTART_PREFIX = "step-"
_LAYOUT_FILE = "layout.json"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")


class RestartPoints:
    """`restart/step-<n>`: optimiser, weights, generators and step count of the latest save.

    Only these hold pickled files; they never leave the work directory.
    """

    def __init__(self, work_dir: Path) -> None:
        self.directory = work_dir / "restart"
        self.writing = self.directory / "writing"

    def latest(self) -> Path | None:
        """The newest complete restart point."""
        points = self.directory.glob(f"{_RESTART_PREFIX}*")
        return max(points, key=restart_step, default=None)

    def clean(self) -> None:
        """Remove what a killed process left half written."""
        shutil.rmtree(self.writing, ignore_errors=True)

    def publish(self, written: Path, step: int, layout: dict[str, object]) -> None:
        """Move the complete directory `written` into place and forget older points."""
        (written / _LAYOUT_FILE).write_text(json.dumps(layout), encoding="utf-8")
        place = self.directory / f"{_RESTART_PREFIX}{step}"
        replace_directory(written, place)
        for older in self.directory.glob(f"{_RESTART_PREFIX}*"):
            if older != place:
                shutil.rmtree(older)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def restart_step(point: Path) -> int:
    """Steps done at a restart point, from its name."""
    return int(point.name.removeprefix(_RESTART_PREFIX))


def check_layout(point: Path, layout: dict[str, object]) -> None:
    """Refuse a restart point whose shards this run cannot read.

    Raises:
        UserError: it was written with another `runtime.sharding`, or, under DeepSpeed, by another
            number of processes.
    """
    saved = json.loads((point / _LAYOUT_FILE).read_text(encoding="utf-8"))
    names = ["sharding"] if layout["sharding"] != "deepspeed" else ["sharding", "processes"]
    for name in names:
        if saved[name] != layout[name]:
            raise UserError(
                f"the restart point {point} was written with runtime.{name} = {saved[name]}, this "
                f"run has {layout[name]}; resume with {saved[name]}, or delete {point.parent} to "
                "train from the start"
            )


def replace_directory(source: Path, place: Path) -> None:
    """Put the directory `source` at `place`, flushed to disk before its name appears."""
    for folder, _, files in os.walk(source):
        for path in [*(os.path.join(folder, name) for name in files), folder]:
            _flush(path)
    if place.exists():
        shutil.rmtree(place)
    os.replace(source, place)
    _flush(place.parent)


def _flush(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_companions(model_dir: Path, place: Path) -> None:
    """Copy configuration, tokenizer and whatever else lies beside the weights of `model_dir`."""
    for path in model_dir.iterdir():
        if path.is_dir():
            shutil.copytree(path, place / path.name, dirs_exist_ok=True)
        elif not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, place / path.name)


@contextmanager
def disk_errors(what: str, directory: Path) -> Iterator[None]:
    """Say what could not be written, and how much room is left, when writing fails.

    Raises:
        RunError: the file system refused.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        free, reason = shutil.disk_usage(directory).free, " ".join(str(error).split())
        raise RunError(
            f"cannot write {what} below {directory} ({free / 1e9:.2f} GB free): {reason}"
        ) from error
