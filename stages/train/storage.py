"""Restart points and loadable checkpoints of training, either complete or absent.

Everything is written under a temporary name and renamed, so that a process killed at any moment
leaves the last complete state.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
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
from stages.train.stage import CHECKPOINTS, TrainConfig, checkpoint_name

logger = logging.getLogger(__name__)

# A single process needs no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

T = TypeVar("T")

_POINT = re.compile(r"step-(\d+)")
_DAMAGED = "damaged-"
_RECORD = "whole.json"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")


class RestartPoints:
    """`restart/step-<n>`: the last saves of weights and optimiser state.

    torch.distributed.checkpoint writes a point while training continues. Its record, written last,
    holds step, layout and the SHA-256 of its files; each checkpoint has a record next to the
    points. A point is used if its own files are complete; files added to it do not matter. A
    damaged one is renamed to `damaged-step-<n>` and kept until training ends.

    Every process hashes its share of the files, right after writing and again before resuming, all
    at the same time. Of 14B parameters over 16 processes, 168 GB in all, that is 10.5 GB each, or
    16 s at 0.65 GB/s (SHA-256 on one core, measured on a virtual machine).

    Only restart points contain pickled files; they never leave the work directory.
    """

    def __init__(self, work_dir: Path, train: TrainConfig) -> None:
        self.directory = work_dir / "restart"
        self.writing = self.directory / "writing"
        self._checkpoints = {
            checkpoint_name(tokens): step for tokens, step in train.checkpoint_steps.items()
        }
        # Saving communicates in a separate group, concurrently with training.
        self._group: dist.ProcessGroup | None = None
        self._publisher = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def check_layout(self, layout: dict[str, object]) -> None:
        """Raise UserError if this run cannot read the shards of the newest point with a layout.

        DeepSpeed's cannot be split differently. The point may still be damaged.
        """
        saved = next(filter(None, map(_layout, self._points())), layout)
        if saved != layout and "deepspeed" in (saved["sharding"], layout["sharding"]):
            raise UserError(
                "the restart point was written with runtime.sharding = {sharding} on {processes} "
                "process(es)".format(**saved)
                + ", and shards of deepspeed cannot be split differently; resume like that, or "
                f"delete {self.directory} to train from the start"
            )

    def latest(self) -> Path | None:
        """The newest complete restart point, if any; sets damaged ones aside.

        Every process calls it, and reads its share of the files. Raises UserError if there are
        damaged points and no other.
        """
        points = self._points()
        wait()
        for point in points:
            fault = _first_fault(self._fault(point, point / _RECORD, restart_step(point)))
            if fault is None:
                self.whole_checkpoints(restart_step(point))
                return point
            if rank() == 0:
                aside = self._set_aside(point)
                logger.warning("%s is damaged (%s) and now called %s", point, fault, aside.name)
        wait()
        damaged = sorted(self.directory.glob(f"{_DAMAGED}*"))
        if damaged:
            raise UserError(
                f"every restart point below {self.directory} is damaged, the last {damaged[-1]}; "
                f"restore its files and remove {_DAMAGED} from its name, or delete "
                f"{self.directory} to train from the start"
            )
        return None

    def whole_checkpoints(self, steps: int) -> dict[str, dict[str, str]]:
        """The SHA-256 of the files of each checkpoint of the first `steps` steps, by its name.

        Every process calls it, and reads its share of the files. Checkpoints that were removed or
        changed are left out, with a warning.
        """
        whole = {}
        for name, step in self._checkpoints.items():
            if step <= steps:
                folder, record = self._checkpoint(name), self._checkpoint_record(name)
                # Read first: the first process may remove the record once all have compared.
                hashes: Any = _record(record).get("sha256")
                fault = _first_fault(self._fault(folder, record))
                if fault is None:
                    whole[name] = hashes
                elif rank() == 0:
                    logger.warning("%s is left out of the results: %s", folder, fault)
        return whole

    def _fault(self, folder: Path, record: Path, step: int | None = None) -> str | None:
        """The first difference between a record and this process's share of the files."""
        content = _record(record)
        hashes = content.get("sha256")
        if not isinstance(hashes, dict):
            return f"{record.name} is missing or damaged"
        if content.get("step") != step:  # the folder has another point's name
            return f"it is of step {content.get('step')}"
        return files.hash_fault(folder, {name: hashes[name] for name in own_share(hashes)})

    def _set_aside(self, point: Path) -> Path:
        """Rename a damaged point, and return its new path."""
        aside = point.with_name(_DAMAGED + point.name)
        while os.path.lexists(aside):
            aside = aside.with_name(f"{aside.name}-again")
        os.rename(point, aside)
        return aside

    @contextmanager
    def loading(self, point: Path) -> Iterator[None]:
        """Context for loading a point: a point that cannot be loaded is set aside as damaged.

        Raises RunError; the next run resumes from the point before.
        Errors of memory, lost processes and failed reads pass unchanged: the point's hashes were
        just verified, so it is not damaged.
        """
        try:
            yield
        except (RunError, UserError):
            raise
        # CheckpointException, for unreadable shards, is not an Exception.
        except (Exception, CheckpointException) as error:
            cause = _cause(error)
            if connection_broke(cause) or is_out_of_memory(cause) or isinstance(cause, OSError):
                raise cause from None
            with suppress(FileNotFoundError):  # another process renamed it first
                self._set_aside(point)
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"the restart point {point} cannot be loaded ({type(error).__name__}: {reason}) "
                "and is set aside; the same command resumes from the point before"
            ) from error

    def remove_old_points(self) -> None:
        """Before writing a point, remove all points except the newest, and unfinished files."""
        files.make_folder(self.directory)
        for path in [*self._points()[1:], self.writing]:
            files.remove(path)

    def save(
        self, state: dict[str, Any], step: int, layout: dict[str, object], minutes: float
    ) -> None:
        """Copy `state` and write it while training continues; every process calls it.

        Waits for a point that is still being written. `minutes`: the timeout of waiting for other
        processes' files.
        """
        self.wait()
        if rank() == 0:
            self.remove_old_points()
        self._make_group(minutes)
        with disk_errors("a restart point", self.directory):
            future = dcp.async_save(state, checkpoint_id=self.writing, process_group=self._group)
        assert isinstance(future, Future)
        self._pending = self._publisher.submit(self._publish, future, step, layout)

    def check_shared_disk(self, minutes: float) -> None:
        """Have every process write a tensor and read that of the next process.

        Raises RunError, before anything is loaded, if the disk is not writable or not shared.
        `minutes` as for `save`.
        """
        folder = self.directory / "rehearsal"
        next_rank = (rank() + 1) % processes()
        received = {f"process-{next_rank}": torch.full((1,), -1)}
        self._make_group(minutes)
        with disk_errors("a restart point", self.directory.parent):
            sample = {f"process-{rank()}": torch.full((1,), rank())}
            dcp.save(sample, checkpoint_id=folder, process_group=self._group)
        try:
            dcp.load(received, checkpoint_id=folder, process_group=self._group)
        except CheckpointException as error:  # raised on all processes if any failed
            raise RunError(
                f"not every process can read the files that all wrote below {folder}: "
                "runtime.output_root has to be on a disk that all nodes share"
            ) from error
        assert received[f"process-{next_rank}"].item() == next_rank
        wait(self._group)
        if rank() == 0:
            files.remove(folder)

    def _make_group(self, minutes: float) -> None:
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))

    def _publish(self, saving: Future[Any], step: int, layout: dict[str, object]) -> None:
        saving.result()
        self.publish(step, layout)

    def publish(self, step: int, layout: dict[str, object]) -> None:
        """Rename the written point; every process calls it."""
        hashes = hash_together(self.writing, self._group)
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

    def record_checkpoint(self, tokens: int) -> None:
        """Record the hashes of a published checkpoint; every process calls it."""
        name = checkpoint_name(tokens)
        hashes = hash_together(self._checkpoint(name))
        if rank() == 0:
            files.write_json(self._checkpoint_record(name), {"sha256": hashes})
        wait()  # so that every process finds the record

    def remove(self) -> None:
        files.remove(self.directory)

    def _points(self) -> list[Path]:
        """All points, complete or not, the newest first."""
        names = filter(_POINT.fullmatch, files.names_in(self.directory))
        paths = [self.directory / name for name in names]
        points = [path for path in paths if files.is_folder(path) and not path.is_symlink()]
        return sorted(points, key=restart_step, reverse=True)

    def _checkpoint(self, name: str) -> Path:
        return self.directory.parent / CHECKPOINTS / name

    def _checkpoint_record(self, name: str) -> Path:
        return self.directory / f"{name}.json"


def restart_step(point: Path) -> int:
    """Steps done at a restart point, from its name."""
    return int(point.name.rpartition("-")[2])


def hash_together(folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """SHA-256 of every file below `folder`; each process reads its share.

    All processes of the group (default: all) call it after writing.
    """
    wait(group)
    own = {name: files.file_digest(folder / name) for name in own_share(files.files_below(folder))}
    hashes: dict[str, str] = {}
    for part in _from_all_processes(own, group):
        hashes |= part
    return dict(sorted(hashes.items()))


def own_share(names: Iterable[str]) -> list[str]:
    """This process's part of `names`, which are dealt to the processes in turn."""
    return sorted(names)[rank() :: processes()]


def rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def processes() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait(group: dist.ProcessGroup | None = None) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def _from_all_processes(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every process, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * processes()
    dist.all_gather_object(values, value, group)
    return values


def _first_fault(fault: str | None) -> str | None:
    """The fault of the first process that has one."""
    return next(filter(None, _from_all_processes(fault)), None)


def _record(path: Path) -> dict[str, Any]:
    """The content of a record; empty where it is missing or damaged."""
    content = files.read_record(path)
    return content if isinstance(content, dict) else {}


def _layout(point: Path) -> dict[str, object] | None:
    """The layout in a point's record; None if it cannot be read."""
    saved = _record(point / _RECORD).get("layout")
    return saved if isinstance(saved, dict) and {"sharding", "processes"} <= saved.keys() else None


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
