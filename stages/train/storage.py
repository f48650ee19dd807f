"""Training's files: restart points and loadable checkpoints, complete or absent.

Everything is written beside its place and renamed into it, so that a process killed at any moment
leaves the last complete state.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bosch.errors import RunError, UserError
from bosch.files import (
    file_sizes,
    make_folder,
    read_json,
    replace,
    size_fault,
    sync,
    write_json,
)
from bosch.ranks import connection_broke
from stages.artifacts import CHECKPOINTS, checkpoint_name
from stages.configs import TrainConfig
from stages.train.schedule import checkpoint_steps

logger = logging.getLogger(__name__)

_POINT = re.compile(r"step-(\d+)")
_RECORD = "whole.json"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")


class RestartPoints:
    """`restart/step-<n>`: optimiser, weights, generators and step count of the latest saves.

    A point holds a record of its layout and of the sizes of its files, written last; beside the
    points lies one for each checkpoint. A point without its whole files, or after a checkpoint
    without its own, is not used: training goes back to the one before, else to the start.

    Only these hold pickled files; they never leave the work directory.
    """

    def __init__(self, work_dir: Path, train: TrainConfig) -> None:
        self.directory = work_dir / "restart"
        self.writing = self.directory / "writing"
        self._checkpoints = {
            checkpoint_name(tokens): step for tokens, step in checkpoint_steps(train).items()
        }

    def latest(self) -> Path | None:
        """The newest whole restart point."""
        return next((point for point in self._points() if self.fault(point) is None), None)

    def fault(self, point: Path) -> str | None:
        """What is damaged of a point, or of a checkpoint that was written before it."""
        step = restart_step(point)
        records = {point: point / _RECORD}
        for name, at_step in self._checkpoints.items():
            if at_step <= step:
                records[self._checkpoint(name)] = self._checkpoint_record(name)
        for folder, record in records.items():
            content = read_json(record)
            if not isinstance(content, dict) or not isinstance(content.get("sizes"), dict):
                return f"{record.name} is missing or damaged"
            fault = size_fault(folder, content["sizes"])
            if fault is not None:
                return f"{folder.name}: {fault}"
        return None

    def clean(self) -> None:
        """Remove what a killed process left half written, and points that cannot be used."""
        shutil.rmtree(self.writing, ignore_errors=True)
        damaged = {point: self.fault(point) for point in self._points()}
        for point, fault in damaged.items():
            if fault is not None:
                logger.warning("the restart point %s is damaged (%s)", point, fault)
                shutil.rmtree(point, ignore_errors=True)
        if damaged and self.latest() is None:
            logger.warning("no restart point is whole: training begins anew")

    def make_room(self) -> None:
        """Forget all points but the newest, before another one is written."""
        make_folder(self.directory)
        for older in self._points()[1:]:
            shutil.rmtree(older)

    def publish(self, written: Path, step: int, layout: dict[str, object]) -> None:
        """Move the complete directory `written` into place."""
        write_json(written / _RECORD, {"layout": layout, "sizes": file_sizes(written, ["."])})
        replace(written, self.directory / f"step-{step}")

    def record_checkpoint(self, tokens: int) -> None:
        """Note the sizes of a checkpoint that is in place."""
        name = checkpoint_name(tokens)
        sizes = file_sizes(self._checkpoint(name), ["."])
        for folder in (self.directory.parent / CHECKPOINTS, self.directory.parent):
            sync(folder)  # the names of what is below them
        write_json(self._checkpoint_record(name), {"sizes": sizes})

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _points(self) -> list[Path]:
        """Whole or not, newest first; whatever else lies there is none."""
        points = [path for path in self.directory.glob("*") if _POINT.fullmatch(path.name)]
        return sorted(points, key=restart_step, reverse=True)

    def _checkpoint(self, name: str) -> Path:
        return self.directory.parent / CHECKPOINTS / name

    def _checkpoint_record(self, name: str) -> Path:
        return self.directory / f"{name}.json"


def restart_step(point: Path) -> int:
    """Steps done at a restart point, from its name."""
    return int(point.name.rpartition("-")[2])


def check_layout(point: Path, layout: dict[str, object]) -> None:
    """Refuse a restart point whose shards this run cannot read.

    Raises:
        UserError: it was written with another `runtime.sharding`, or, under DeepSpeed, by another
            number of processes.
    """
    saved = read_json(point / _RECORD)["layout"]
    names = ["sharding"] if layout["sharding"] != "deepspeed" else ["sharding", "processes"]
    for name in names:
        if saved[name] != layout[name]:
            raise UserError(
                f"the restart point {point} was written with runtime.{name} = {saved[name]}, this "
                f"run has {layout[name]}; resume with {saved[name]}, or delete {point.parent} to "
                "train from the start"
            )


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

    The processes also talk while they write: a connection that broke is no fault of the disk.

    Raises:
        RunError: the file system refused.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if connection_broke(error):
            raise
        free, reason = shutil.disk_usage(directory).free, " ".join(str(error).split())
        raise RunError(
            f"cannot write {what} below {directory} ({free / 1e9:.2f} GB free): {reason}"
        ) from error
