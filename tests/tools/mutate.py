"""How many small wrong changes the tests notice.

    python -m tests.tools.mutate --seed 7 --count 40

Lines of the product are drawn at random, each gets one plausible wrong change in a copy of the
checkout, and the tests nearest to its module run. Prints a row a change and the share that was
killed; --list prints the changes alone. A change that no test noticed needs a test, or its line
deleted.
With --log a run that was stopped, or reached --hours, resumes where it stopped. With --ran only
the tests that run the changed line are tried, if there are any: FILE is `coverage json
--show-contexts` of a run whose contexts are tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools.stage_code import imported

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("bosch", "data_prep", "pipeline", "stages")
SUITES = ("tests/unit", "tests/e2e", "tests/distributed")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_FUNCTIONS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor",
    "argmin": "argmax", "argmax": "argmin", "zeros": "ones", "ones": "zeros", "sum": "mean",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A wrong change: bytes `start` to `end` of a file become `text`."""

    file: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, root: Path) -> None:
        content = (ROOT / self.file).read_bytes()
        (root / self.file).write_bytes(
            content[: self.start] + self.text.encode() + content[self.end :]
        )

    def __str__(self) -> str:
        before = (ROOT / self.file).read_bytes()[self.start : self.end].decode()
        return f"{self.file}:{self.line}: {_short(before)}  ->  {_short(self.text)}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def mutated(node: ast.AST) -> Iterator[ast.AST]:
    """Copies of a node with one plausible mistake each."""
    twin = copy.deepcopy(node)
    if isinstance(twin, ast.Compare) and type(twin.ops[0]) in _COMPARISONS:
        twin.ops[0] = _COMPARISONS[type(twin.ops[0])]()
        yield twin
    elif isinstance(twin, ast.BoolOp):
        twin.op = ast.Or() if isinstance(twin.op, ast.And) else ast.And()
        yield twin
    elif isinstance(twin, ast.UnaryOp) and isinstance(twin.op, ast.Not | ast.USub):
        yield twin.operand
    elif isinstance(twin, ast.BinOp) and type(twin.op) in _OPERATORS and not _is_text(twin.right):
        twin.op = _OPERATORS[type(twin.op)]()
        yield twin
    elif isinstance(twin, ast.Constant) and isinstance(twin.value, bool):
        yield ast.Constant(not twin.value)
    elif isinstance(twin, ast.Constant) and isinstance(twin.value, int):
        yield ast.Constant(twin.value + 1)
    elif isinstance(twin, ast.IfExp):
        twin.body, twin.orelse = twin.orelse, twin.body
        yield twin
    elif (isinstance(twin, ast.Expr) and isinstance(twin.value, ast.Call)) or isinstance(
        twin, ast.AugAssign
    ):
        yield ast.Pass()
    elif isinstance(twin, ast.Call):
        name = twin.func.attr if isinstance(twin.func, ast.Attribute) else None
        name = twin.func.id if isinstance(twin.func, ast.Name) else name
        if name in _FUNCTIONS:
            renamed = copy.deepcopy(twin)
            if isinstance(renamed.func, ast.Attribute):
                renamed.func.attr = _FUNCTIONS[name]
            else:
                renamed.func = ast.Name(_FUNCTIONS[name])
            if name != "sum" or isinstance(renamed.func, ast.Attribute):
                yield renamed
        if name in ("sorted", "reversed") and isinstance(twin.func, ast.Name):
            yield ast.Call(ast.Name("list"), [twin.args[0]], [])
        first_two = twin.args[:2]
        swappable = name not in ("min", "max")  # whose order says nothing
        if (
            swappable
            and len(first_two) == 2
            and all(isinstance(a, ast.Name | ast.Attribute) for a in first_two)
        ):
            twin.args[:2] = reversed(first_two)
            yield twin


def _is_text(node: ast.AST) -> bool:
    """Whether a path is divided by it; every test would notice another operator."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr)


def changes(file: str) -> Iterator[Change]:
    """Every wrong change of a file that this tool can think of."""
    content = (ROOT / file).read_bytes()
    starts = [0]
    for line in content.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node in _behaviour(ast.parse(content)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        for twin in mutated(node):
            text = ast.unparse(ast.fix_missing_locations(twin))
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                text = f"({text})"
            yield Change(file, node.lineno, start, end, text)


def _behaviour(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Nodes whose change changes what code does: no annotations, texts, messages and logs."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            text = ast.unparse(child) if isinstance(child, ast.Expr) else ""
            if text.startswith(("logger.", "print(", "'", '"')):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from _behaviour(child)


def draw(seed: int, count: int, packages: tuple[str, ...] = PRODUCT) -> list[Change]:
    """`count` changes of different lines, each line of the product equally likely."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *(f"{package}/*.py" for package in packages)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    by_line: dict[tuple[str, int], list[Change]] = {}
    for file in sorted(filter(None, listed.split("\0"))):
        for change in changes(file):
            by_line.setdefault((change.file, change.line), []).append(change)
    generator = random.Random(seed)
    lines = generator.sample(sorted(by_line), min(count, len(by_line)))
    return [generator.choice(by_line[line]) for line in lines]


def read_contexts(report: Path) -> dict[tuple[str, int], set[str]]:
    """The tests that ran each line, as file::function, by coverage's JSON report with contexts."""
    files = json.loads(report.read_text(encoding="utf-8"))["files"]
    modules = {_module(test): test for test in _test_files()}
    tests: dict[tuple[str, int], set[str]] = {}
    for file, content in files.items():
        for line, contexts in content["contexts"].items():
            parts = [context.rpartition(".") for context in contexts]
            tests[Path(file).as_posix(), int(line)] = {
                f"{modules[module]}::{function}"
                for module, _, function in parts
                if module in modules
            }
    return tests


def nearest_tests(change: Change, most: int, ran: frozenset[str] = frozenset()) -> list[str]:
    """The test files nearest to a change: by imports between, then by their text.

    Those that name its function come nearer. If tests `ran` the changed line, only these are
    returned, those of the nearest files.
    """
    graph = _import_graph()
    module = _module(change.file)
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / change.file).read_bytes()))
        if isinstance(node, ast.FunctionDef) and node.lineno <= change.line <= node.end_lineno
    }
    importers: dict[str, set[str]] = {}
    for name, used in graph.items():
        for one in used:
            importers.setdefault(one, set()).add(name)
    distance, frontier = {module: 0}, [module]
    while frontier:
        nearer = frontier.pop(0)
        for name in sorted(importers.get(nearer, ())):
            if name not in distance:
                distance[name] = distance[nearer] + 1
                frontier.append(name)
    words = set(re.split(r"[._]", module)) - {*PRODUCT, "run", "command", ""}
    ranked = []
    for test in sorted(_test_files()):
        name = _module(test)
        text = (ROOT / test).read_text(encoding="utf-8")
        named = sum(word in Path(test).stem for word in words) + 2 * (module in text)
        named += 3 * any(re.search(rf"\b{function}\b", text) for function in functions)
        by_file = [test_id for test_id in ran if test_id.startswith(f"{test}::")]
        by_file.sort(key=lambda test_id: text.find(f"def {test_id.rpartition(':')[2]}("))
        if by_file or (not ran and (name in distance or named)):
            ranked.append((distance.get(name, 9) - named, len(text), by_file or [test]))
    return [test for *_, tests in sorted(ranked)[:most] for test in tests]


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _test_files() -> Iterator[str]:
    for suite in SUITES:
        for path in (ROOT / suite).glob("test_*.py"):
            yield path.relative_to(ROOT).as_posix()


@functools.cache
def _import_graph() -> dict[str, set[str]]:
    """The project's modules that each module imports, tests and their helpers included."""
    files = [path for top in (*PRODUCT, "tests") for path in (ROOT / top).rglob("*.py")]
    names = {_module(path.relative_to(ROOT).as_posix()): path for path in files}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = set(imported(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value.partition(":")[0])  # imported by name, as stages are
        graph[name] = (used & names.keys()) - {name}
    return graph


class Checkout:
    """A copy of the checkout in which the tests run, with one wrong change or none."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.minutes = folder, minutes
        # stage_code's test fails for any change of code, which is no test of behaviour.
        self.left_out = ["tests/unit/test_stage_code.py"]
        copy_checkout(folder)

    def outcome(self, change: Change, most: int, ran: frozenset[str] = frozenset()) -> str:
        """killed, with the first test that noticed, survived, or undecided.

        A test that fails or takes too long without the change as well notices nothing.
        """
        tests = nearest_tests(change, most, ran)
        if not tests:
            return "survived (no test imports it)"
        while True:
            change.apply(self.folder)
            try:
                result = self._pytest(tests)
            finally:
                (self.folder / change.file).write_bytes((ROOT / change.file).read_bytes())
            if result is None:
                hung = self._pytest(tests) is not None
                return "killed by the time limit" if hung else "undecided (slow tests)"
            status, output = result
            if status == 0:
                return "survived"
            failed = first_failure(output)
            unchanged = self._pytest([failed] if failed else tests)
            if failed and unchanged is not None and unchanged[0] == pytest.ExitCode.USAGE_ERROR:
                # There is no such test: the names of its parameters hold a value that changes.
                unchanged = self._pytest([failed.partition("[")[0]])
            if unchanged is not None and unchanged[0] == 0:
                return f"killed by {failed or tests[0]}"
            if failed is None or failed in self.left_out:
                return "undecided (tests do not run)"
            self.left_out.append(failed)

    def _pytest(self, tests: list[str]) -> tuple[int, str] | None:
        """Status and output of the tests in the copy until one fails; None if they are too slow."""
        log = self.folder / "output.log"
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        left_out = [f"--deselect={test}" for test in self.left_out]
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests, *left_out],
                cwd=self.folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={
                    **os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1",
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                },
            )  # fmt: skip
        try:
            status = process.wait(self.minutes * 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        return status, log.read_text(errors="replace")


def first_failure(output: str) -> str | None:
    """The id of the first test in pytest's summary; a parameter's name may have spaces."""
    found = re.search(r"^(?:FAILED|ERROR) ([^\[\n]+?(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else None


def finished(log: Path | None) -> dict[str, str]:
    """The verdict on each change that the log of an earlier run holds."""
    text = log.read_text(encoding="utf-8") if log and log.exists() else ""
    rows = [row.split("\t") for row in text.split("\n")[:-1]]  # the last may be cut off
    return {change: verdict for verdict, change in rows}


def copy_checkout(target: Path) -> None:
    """Every tracked file."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--package", choices=PRODUCT, help="only lines of this package")
    parser.add_argument("--files", type=int, default=12, help="test files a change is tried on")
    parser.add_argument("--minutes", type=float, default=5, help="time limit of a change's tests")
    parser.add_argument("--hours", type=float, default=math.inf, help="start no change after these")
    parser.add_argument("--log", type=Path, help="file of the verdicts; those in it are not redone")
    parser.add_argument("--ran", type=Path, help="coverage's JSON report with contexts")
    parser.add_argument("--list", action="store_true", help="print the changes, run nothing")
    options = parser.parse_args()
    drawn = draw(options.seed, options.count, (options.package,) if options.package else PRODUCT)
    if options.list:
        print("\n".join(map(str, drawn)))
        return 0
    ran = read_contexts(options.ran) if options.ran else {}
    verdicts = finished(options.log)
    end = time.monotonic() + options.hours * 3600
    by_package: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder), options.minutes)
        for number, change in enumerate(drawn, 1):
            if str(change) not in verdicts:
                if time.monotonic() > end:
                    continue
                runners = frozenset(ran.get((change.file, change.line), ()))
                verdicts[str(change)] = checkout.outcome(change, options.files, runners)
                if options.log:
                    with options.log.open("a", encoding="utf-8") as log:
                        log.write(f"{verdicts[str(change)]}\t{change}\n")
            verdict = verdicts[str(change)]
            by_package.setdefault(change.file.split("/")[0], Counter())[verdict.split()[0]] += 1
            print(f"{number}/{len(drawn)} {verdict:<10} {change}", flush=True)
    for package, counts in sorted(by_package.items()):
        print(f"{package}: {counts['killed']} of {counts.total()}")
    killed = sum(counts["killed"] for counts in by_package.values())
    tried = sum(counts.total() for counts in by_package.values())
    share = math.floor(100 * killed / tried) if tried else 0
    print(f"killed: {killed} of {tried} ({share} %), {len(drawn) - tried} not tried")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
