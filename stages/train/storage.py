"""Restart points and loadable checkpoints of training, either complete or absent.

Everything is written under a temporary name and renamed, so that a process killed at any moment
leaves the last complete state.
"""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from bosch import files
from bosch.errors import (
    DiskFullError,
    RunError,
    UserError,
    is_disk_full,
    is_out_of_memory,
)
from bosch.ranks import connection_broke
from stages.train.stage import CHECKPOINTS

logger = logging.getLogger(__name__)

# A single process needs no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

T = TypeVar("T")

_POINT = re.compile(r"step-(\d+)")
_RECORD, _DAMAGED = "point.json", "damaged-"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")


class RestartPoints:
    """`restart/step-<n>`: the last saves of weights and optimiser state.

    torch.distributed.checkpoint writes a point while training continues. It is renamed when it is
    whole; its record holds the layout of the shards and the hashes of its files, which torch does
    not check.

    Only restart points contain pickled files; they never leave the work directory.
    """

    def __init__(self, work_dir: Path) -> None:
        self.directory = work_dir / "restart"
        self.writing = self.directory / "writing"
        # Saving communicates in a separate group, concurrently with training.
        self._group: dist.ProcessGroup | None = None
        self._publisher = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def latest(self) -> Path | None:
        """The newest restart point whose files have their hashes, if any; sets others aside.

        Every process calls it, and reads its share of the files. Raises UserError if there are
        damaged points and no other.
        """
        for point in self._points():
            faults = filter(None, from_all_processes(self._fault(point)))
            if (fault := next(faults, None)) is None:
                return point
            if rank() == 0:
                count = len(list(self.directory.glob(f"{_DAMAGED}*")))
                aside = point.with_name(f"{_DAMAGED}{count}-{point.name}")
                point.rename(aside)
                logger.warning("%s is damaged (%s) and now called %s", point, fault, aside.name)
        wait()
        if damaged := sorted(self.directory.glob(f"{_DAMAGED}*")):
            raise UserError(
                f"every restart point below {self.directory} is damaged, the last {damaged[-1]}; "
                "restore its files and its name, or delete the folder to train from the start"
            )
        return None

    def _fault(self, point: Path) -> str | None:
        """The first difference between a point's record and this process's share of its files."""
        record = files.read_record(point / _RECORD)
        if not isinstance(record, dict) or record.get("step") != restart_step(point):
            return f"{_RECORD} is missing, damaged or of another step"
        names = sorted(record["sha256"])[rank() :: processes()]
        return files.hash_fault(point, {name: record["sha256"][name] for name in names})

    def check_layout(self, layout: dict[str, object]) -> None:
        """Raise UserError if this run cannot read the shards of the newest point.

        DeepSpeed's cannot be split differently.
        """
        records = (files.read_record(point / _RECORD) for point in self._points())
        saved = next((record["layout"] for record in records if record), layout)
        if saved != layout and "deepspeed" in (saved["sharding"], layout["sharding"]):
            raise UserError(
                "the restart point was written with runtime.sharding = {sharding} on {processes} "
                "process(es)".format(**saved)
                + ", and shards of deepspeed cannot be split differently; resume like that, or "
                f"delete {self.directory} to train from the start"
            )

    def save(
        self, state: dict[str, Any], step: int, layout: dict[str, object], minutes: float
    ) -> None:
        """Copy `state` and write it while training continues; every process calls it.

        Waits for a point that is still being written. `minutes`: the timeout of waiting for other
        processes' files. Only the newest of the older points is kept.
        """
        self.wait()
        if rank() == 0:
            files.make_folder(self.directory)
            for path in [*self._points()[1:], self.writing]:
                files.remove(path)
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
        with disk_errors("a restart point", self.directory):
            future = dcp.async_save(state, checkpoint_id=self.writing, process_group=self._group)
        assert isinstance(future, Future)
        self._pending = self._publisher.submit(self._publish, future, step, layout)

    def check_shared_disk(self) -> None:
        """Raise RunError where a process does not see the files of the first one."""
        sample = self.directory / "rehearsal"
        with disk_errors("a restart point", self.directory.parent):
            if rank() == 0:
                files.make_folder(sample)
        wait()
        if not all(from_all_processes(sample.is_dir())):
            raise RunError(
                f"not every process can read the files that all wrote below {self.directory}: "
                "runtime.output_root has to be on a disk that all nodes share"
            )
        if rank() == 0:
            files.remove(sample)

    def _publish(self, saving: Future[Any], step: int, layout: dict[str, object]) -> None:
        saving.result()
        self.publish(step, layout)

    def publish(self, step: int, layout: dict[str, object]) -> None:
        """Rename the written point; every process calls it."""
        hashes = shared_hashes(self.writing, self._group)
        if rank() == 0:
            record = {"step": step, "layout": layout, "sha256": hashes}
            files.write_json(self.writing / _RECORD, record)
            files.replace(self.writing, self.directory / f"step-{step}")
        wait(self._group)  # so that no process begins the next point in this folder

    def check(self) -> None:
        """Raise the error of writing a point, if any."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the current point is written and renamed.

        Raises RunError when writing failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with disk_errors("a restart point", self.directory):
                pending.result()

    def remove(self) -> None:
        files.remove(self.directory)

    def _points(self) -> list[Path]:
        """All points, the newest first."""
        names = filter(_POINT.fullmatch, files.names_in(self.directory))
        return sorted((self.directory / name for name in names), key=restart_step, reverse=True)


@contextmanager
def loading(point: Path) -> Iterator[None]:
    """Context for loading a point; raises RunError if it cannot be loaded."""
    try:
        yield
    except CheckpointException as error:  # it is no Exception
        cause = _cause(error)
        if connection_broke(cause) or is_out_of_memory(cause):
            raise cause from None
        reason = " ".join(str(cause).split())[:300]
        raise RunError(
            f"the restart point {point} cannot be loaded ({reason}); remove it to resume from the "
            "point before"
        ) from error


def restart_step(point: Path) -> int:
    """Steps done at a restart point, from its name."""
    return int(point.name.rpartition("-")[2])


def checkpoint_hashes(work_dir: Path) -> dict[str, dict[str, str]]:
    """`shared_hashes` of each checkpoint that is there, by its name."""
    hashes: dict[str, dict[str, str]] = {}
    for path, digest in shared_hashes(work_dir / CHECKPOINTS).items():
        name, _, file = path.partition("/")
        hashes.setdefault(name, {})[file] = digest
    return hashes


def shared_hashes(folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The SHA-256 of the files below a folder; every process calls it, and reads its share."""
    wait(group)  # another process may still write or rename
    names = sorted(files.files_below(folder)) if folder.is_dir() else []
    own = {name: files.file_digest(folder / name) for name in names[rank() :: processes()]}
    return {name: x for part in from_all_processes(own, group) for name, x in part.items()}


def rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait(group: dist.ProcessGroup | None = None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def from_all_processes(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every process, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * processes()
    dist.all_gather_object(values, value, group)
    return values


def copy_other_files(model_dir: Path, folder: Path) -> None:
    """Copy all files of `model_dir` except the weights: configuration, tokenizer and others."""
    for path in model_dir.iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        elif not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def _cause(error: BaseException) -> BaseException:
    """The error of the first failed process, from torch's error of all processes."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


@contextmanager
def disk_errors(content: str, directory: Path) -> Iterator[None]:
    """Context for writing: errors name the `content` that was not written, and the free space.

    Errors of connections and GPUs, which may occur while writing, pass unchanged. Raises RunError
    for errors of the file system, DiskFullError if no space is left.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        cause = _cause(error)
        if connection_broke(cause) or is_out_of_memory(cause) or "CUDA error" in str(cause):
            raise cause from None
        existing = next(
            folder for folder in (directory, *directory.absolute().parents) if folder.is_dir()
        )
        free, reason = shutil.disk_usage(existing).free, " ".join(str(cause).split())
        # torch's archive writer reports a full disk only as an unexpected position.
        hidden = not isinstance(cause, OSError) and files.almost_full(directory)
        kind = DiskFullError if is_disk_full(cause) or hidden else RunError
        raise kind(
            f"cannot write {content} below {directory} ({free / 1e9:.2f} GB free): {reason}"
        ) from error
