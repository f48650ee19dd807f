"""Brings the stages of a recipe up to date, one after another."""

from __future__ import annotations

import contextlib
import functools
import platform
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bosch.errors import RunError, UserError
from bosch.files import remove, write_json
from pipeline.recipe.load import ROOT
from pipeline.run import graph, status
from pipeline.run.graph import Node
from pipeline.run.hashing import FileHasher
from pipeline.run.launch import Launcher, end_leftovers, launch, preload
from pipeline.run.locks import hold
from pipeline.run.store import Store
from stages.formats import counted, format_seconds
from stages.stage import LoadedRecipe, World
from stages.versions import installed_versions

_PACKAGES = (
    "bosch-pipeline", "torch", "transformers", "accelerate", "datasets", "tokenizers",
    "safetensors", "numpy", "pyarrow", "PyNomadBBO", "liger-kernel", "deepspeed", "lm-eval",
)  # fmt: skip
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RunOptions:
    """Options of `bosch run`: first and last stage, forced stages, a branch, `--wait`."""

    until: str | None = None
    start: str | None = None
    force: tuple[str, ...] = ()
    branch: str | None = None
    wait: bool = False


class Runner:
    """One run of one recipe."""

    def __init__(
        self, loaded: LoadedRecipe, options: RunOptions = RunOptions(), launcher: Launcher = launch
    ) -> None:
        self.loaded, self.options, self.launcher = loaded, options, launcher
        self.name = loaded.recipe.name
        self.store = Store(loaded.output_root)
        self.hasher: FileHasher = self.store.hasher()
        self.nodes = graph.resolve(loaded, self.hasher)
        self.all_names = [node.name for node in self.nodes]
        self.chosen = self._choose()

    def _choose(self) -> list[str]:
        first, last = 0, len(self.all_names) - 1
        if self.options.start is not None:
            first = self.all_names.index(graph.find_stage("--from", self.options.start, self.nodes))
        if self.options.until is not None:
            last = self.all_names.index(graph.find_stage("--until", self.options.until, self.nodes))
        if first > last:
            order = f"--from {self.options.start} comes after --until {self.options.until}"
            raise UserError(f"{order}: no stage left")
        if self.options.force and self.loaded.world.nodes > 1:
            raise UserError("--force works on one node only; NNODES asks for several")
        chosen = self.all_names[first : last + 1]
        if (branch := self.options.branch) is not None:
            if branch not in self.loaded.branches:
                names = ", ".join(self.loaded.branches) or "no branches (compare)"
                raise UserError(f"--branch {branch}: the recipe has {names}")
            chosen = [name for name in chosen if branch in self._node(name).branches]
            if not chosen:
                raise UserError(f"--branch {branch}: --from and --until leave no stage of it")
        for name in self.options.force:
            if graph.find_stage("--force", name, self.nodes) not in chosen:
                raise UserError(f"--force {name}: other options leave this stage out")
        return chosen

    def states(self) -> list[status.StageState]:
        """The states of all stages, taking forced ones into account."""
        forced = frozenset(self.options.force)
        return status.inspect(self.nodes, self.store, self.hasher, self.name, forced)

    def run(self) -> int:
        """Run the stages that are not up to date; returns their number.

        Raises UserError or RunError; earlier published or unfinished work stays.
        """
        states = {state.node.name: state for state in self.states()}
        self._require_earlier_stages(states)
        todo = [name for name in self.chosen if states[name].state != "cached"]
        if not todo:
            for name in self.chosen:
                self._link(states[name].node)
            self.hasher.save()
            return 0
        count = f"{len(todo)} of {counted(len(self.chosen), 'stage')}"
        print(f"{self.name}: {count} to run: {', '.join(todo)}", flush=True)
        # The resolved recipe of this run, in the folder of its links.
        resolved = self.loaded.recipe.model_dump(mode="json")
        write_json(self.store.root / self.name / "recipe.json", resolved)
        self.hasher.save()  # so that `status` has them while the first stage runs
        # A first stage that needs no torch pays for the imports of those after it.
        if self.launcher is launch and len(todo) > 2:
            modules = (self._node(name).stage.function.partition(":")[0] for name in todo)
            if preload(modules, self.loaded.world, self.loaded.recipe.runtime.log_level):
                self.launcher = functools.partial(launch, fork=True)
        ran = 0
        for name in self.chosen:
            state = states[name]
            if state.state == "cached" and ran:
                state = self._inspect(state.node)  # an input may have been replaced by now
            if state.state == "cached":
                self._link(state.node)
            else:
                self._run_stage(state.node)
                ran += 1
        self.hasher.save()
        return ran

    def _inspect(self, node: Node) -> status.StageState:
        last_key = self.store.last_run(self.name).get(node.name)
        return status.inspect_output(node, self.store, self.hasher, last_key, self._contents(node))

    def _contents(self, node: Node) -> dict[str, str]:
        return status.contents(node, self.nodes, self.store)

    def _require_earlier_stages(self, states: dict[str, status.StageState]) -> None:
        upstream = {stage for name in self.chosen for stage in graph.upstream_of(name, self.nodes)}
        for name in self.all_names[: self.all_names.index(self.chosen[0])]:
            if name in upstream and states[name].state != "cached":
                raise UserError(
                    f"--from {self.options.start}: the earlier stage {name} is not there: "
                    f"{states[name]}; leave --from out"
                )

    def _link(self, node: Node) -> None:
        if self.store.last_run(self.name).get(node.name) != node.key:
            self._unlink_from(node)  # later stages' links belong to another output
        self.store.link(self.name, node.name, str(node.key), self.all_names)

    def _run_stage(self, node: Node) -> None:
        label = f"[{self.all_names.index(node.name) + 1}/{len(self.all_names)}] {node.name}"
        started = time.monotonic()
        if self.loaded.world.node_rank > 0:
            self._follow(node)
        else:
            self._make_or_reuse(node, label)
        print(f"{label}: done in {format_seconds(time.monotonic() - started)}", flush=True)

    def _make_or_reuse(self, node: Node, label: str) -> None:
        key = str(node.key)
        output = f"{self.name}: stage {node.name}"
        with hold(self.store.lock(node.stage.name, key), output, self.name, wait=self.options.wait):
            if node.name in self.options.force:
                self.store.discard(node.stage.name, key)
                remove(self.store.published(node.stage.name, key))
            state = self._inspect(node)  # another run may have made it since
            if state.state != "cached":
                print(f"{label}: {state}", flush=True)
                self._make(node)
            self._link(node)

    def _make(self, node: Node) -> None:
        key, stage = str(node.key), node.stage.name
        self.require_inputs(node)
        inputs, world = self._contents(node), self._world(node)
        self._unlink_from(node)
        end_leftovers(str(self.store.work(stage, key)))
        gpus = world.used_gpus if node.stage.computes else 0
        if node.stage.distributed and world != self.loaded.world:
            all_processes = counted(self.loaded.world.size, "process", "processes")
            print(f"{node.name}: runs on {world.size} of {all_processes}", flush=True)
        work = self.store.begin(stage, key, inputs=inputs, gpus=gpus)
        try:
            summary = self.launcher(self.order(node, work), world)
        except (UserError, RunError) as error:
            reason = str(error).removeprefix(f"{node.name}: ")
            with contextlib.suppress(OSError):  # report the reason also on a full disk
                self.store.fail(stage, key, reason)
            raise
        facts = {
            "version": node.stage.version,
            "recipe": self.name,
            "config": node.section.model_dump(mode="json"),
            "runtime": node.loaded.recipe.runtime.model_dump(mode="json"),
            "processes": world.size,
            "gpus": gpus,
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "packages": installed_versions(_PACKAGES),
            "git_commit": checkout_commit(),
            "upstream": {name: self._node(found).key for name, found in node.inputs.items()},
            "inputs": inputs,
            "summary": summary,
        }
        try:
            self._require_unchanged(
                node, "while it ran, so its output is thrown away; run the same command again"
            )
        except RunError:
            self.store.discard(stage, key)
            raise
        assert node.document is not None
        self.store.publish(stage, node.document, facts, self.hasher)

    def require_inputs(self, node: Node) -> None:
        """Raise RunError if a file that a stage reads has changed, or an output is damaged."""
        self._require_unchanged(node, "since this run began; run the same command again")
        for name in node.needs:
            stage, key = self._node(name).stage.name, str(self._node(name).key)
            damage = self.store.damage(stage, key, self.hasher)
            if damage is not None:
                raise RunError(
                    f"{node.name}: its input {name} is damaged ({damage}); run the same command "
                    "again"
                )

    def _require_unchanged(self, node: Node, when: str) -> None:
        """Raise RunError if the files that a stage reads no longer have the content in its key."""
        assert node.document is not None
        try:
            current = graph.current_document(node, self.hasher)
        except UserError as fault:
            raise RunError(f"{node.name}: its inputs changed {when}: {fault}") from None
        if graph.document_key(current) != node.key:
            changes = "; ".join(status.differences(node.document, current))
            raise RunError(f"{node.name}: its inputs changed {when}: {changes}")

    def _unlink_from(self, node: Node) -> None:
        """Remove the links of a stage and of those that depend on it, which are outdated."""
        for name in self.all_names[self.all_names.index(node.name) :]:
            if name == node.name or node.name in graph.upstream_of(name, self.nodes):
                self.store.unlink(self.name, name)

    def _world(self, node: Node) -> World:
        world = node.loaded.world
        if not node.stage.distributed:
            return World(gpus=world.gpus)
        return replace(world, processes_per_node=node.stage.processes(node.loaded))

    def _node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def order(self, node: Node, work: Path) -> dict[str, Any]:
        """The order for `pipeline.run.worker`, as JSON."""
        recipe, info = node.loaded.recipe, node.loaded.info
        model = recipe.model
        if info is not None and info.commit is not None:
            model = model.model_copy(update={"revision": info.commit})
        upstream = graph.upstream_of(node.name, self.nodes)
        outputs = {name: self._node(found) for name, found in node.inputs.items()}
        inputs = {
            name: str(self.store.published(one.stage.name, str(one.key)))
            for name, one in outputs.items()
        }
        return {
            "stage": node.name,
            "function": node.stage.function,
            "section": _typed(node.section),
            "model": _typed(model),
            "seed": recipe.seed,
            "runtime": _typed(recipe.runtime),
            "upstream": {
                key: _typed(section)
                for key in [*(self._node(name).stage.key for name in upstream), *node.stage.reads]
                if (section := getattr(recipe, key)) is not None
            },
            "inputs": inputs,
            "work_dir": str(work),
            "log_level": recipe.runtime.log_level,
        }

    def _follow(self, node: Node) -> None:
        """Run on another node than the first: join distributed stages, wait for other outputs.

        The shared disk says which stages are done. torchrun's rendezvous fails if the first node
        does not come.
        """
        for name in node.needs:  # the first node publishes them before it begins this stage
            self._await(self._node(name))
        if self._inspect(node).state == "cached":
            return
        if node.stage.distributed:
            self.require_inputs(node)
            self.launcher(
                self.order(node, self.store.work(node.stage.name, str(node.key))), self._world(node)
            )
        self._await(node)

    def _await(self, node: Node) -> None:
        """Wait until the first node has published an output."""
        minutes = self.loaded.recipe.runtime.timeout_minutes
        deadline = time.monotonic() + 60 * minutes
        earlier = self.store.state(node.stage.name, str(node.key))
        while self._inspect(node).state != "cached":
            current = self.store.state(node.stage.name, str(node.key))
            if "failure" in current and current != earlier:
                raise RunError(f"{node.name}: failed on the first node: {current['failure']}")
            if time.monotonic() > deadline:
                raise RunError(
                    f"{node.name}: the first node has not made it in {minutes:g} minutes "
                    "(runtime.timeout_minutes)"
                )
            time.sleep(POLL_SECONDS)


def _typed(section: BaseModel) -> dict[str, Any]:
    kind = type(section)
    name = f"{kind.__module__}:{kind.__qualname__}"
    return {"type": name, "values": section.model_dump(mode="json")}


@functools.cache
def checkout_commit() -> str | None:
    """Commit of the checkout, with a `+` if tracked files were changed; None outside git."""
    git = shutil.which("git")
    if git is None:
        return None

    def output(*arguments: str) -> str | None:
        process = subprocess.run([git, *arguments], cwd=ROOT, capture_output=True, text=True)
        return process.stdout.strip() if process.returncode == 0 else None

    commit = output("rev-parse", "HEAD")
    changed = output("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit
