"""Sections of the suites whose prompts are made of files that a user names; no torch.

Whoever adds one adds a section here, its samples in a module that `maker` names, and its field of
`EvaluateConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from bosch.errors import UserError
from data_prep.documents.source_files import files_below
from data_prep.tasks.tables import HELMET_TASKS, HelmetTaskName
from stages.fields import Count, PathText, Section, different
from stages.inputs import Hasher, Input, hashed_files
from stages.stage import call

if TYPE_CHECKING:
    from stages.evaluate.chat import ChatTemplate


def _identity(section: PromptEvaluation, folder: str | None, hasher: Hasher) -> Any:
    if folder is None or not Path(folder).is_dir():
        return None
    files = [Path(folder, name) for name in section.files(Path(folder))]
    return hashed_files(folder, files, hasher)


def _check(where: str, section: PromptEvaluation, folder: str) -> None:
    if not Path(folder).is_dir():
        raise UserError(f"{where}: there is no folder {folder}")
    for fault in section.missing_files(Path(folder)):
        raise UserError(f"{where}: {fault}")


def _published(lengths: list[int]) -> list[int]:
    known = [*HELMET_TASKS["json_kv"].counts]
    for length in lengths:
        if length not in known:
            raise ValueError(f"{length:,} is none of HELMET's lengths {known}")
    return lengths


class PromptEvaluation(Section):
    """What all of them have: data, lengths, samples.

    `maker` names the function of (section, tokenizer, seed, chat template) that returns the
    samples, `read` are the endings of its files. `published` is how many samples the public data
    has of each of `kinds` at a length, `new_tokens` how long an answer is, about.
    """

    maker: ClassVar[str] = ""
    title: ClassVar[str] = ""
    read: ClassVar[tuple[str, ...]] = ()
    published: ClassVar[int] = 0
    kinds: ClassVar[int] = 1
    new_tokens: ClassVar[int] = 0

    data_dir: Annotated[PathText, Input(_identity, _check)] = Field(
        description="Folder of the benchmark's data."
    )
    lengths: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[4096, 8192, 16384, 32768], min_length=1, description="Tokens of the context."
    )
    samples: Count | None = Field(
        None, description="Samples at each length, drawn by the seed; default: all."
    )

    def missing_files(self, folder: Path) -> Iterator[str]:
        """What the folder lacks, a message each."""
        yield from ()

    def files(self, folder: Path) -> list[str]:
        """Names of the folder's files that are read."""
        paths = [path for path in files_below(folder) if path.suffix in self.read]
        return sorted(path.relative_to(folder).as_posix() for path in paths)

    @property
    def data_files(self) -> list[Path]:
        """These files, by name."""
        return [Path(self.data_dir, name) for name in self.files(Path(self.data_dir))]

    @property
    def most_tokens(self) -> tuple[str, int]:
        """Tokens of the longest prompt and its answer, as far as known, and the fields that say."""
        return "lengths", max(self.lengths)

    @property
    def most_samples(self) -> int:
        """Samples at a length, of the public data."""
        return self.kinds * min(self.samples or self.published, self.published)

    def make(self, tokenizer: Any, seed: int, chat: ChatTemplate | None = None) -> list[Any]:
        """The samples of all lengths, which hold what a chat template adds, too."""
        return call(self.maker, self, tokenizer, seed, chat)


class NolimaEvaluation(PromptEvaluation):
    """NoLiMa: needles that share no words with their questions, in books (arXiv:2502.05167)."""

    maker = "stages.evaluate.nolima:samples"
    title = "NoLiMa"
    read = (".txt", ".json")
    published = 7540
    new_tokens = 192

    data_dir: Annotated[PathText, Input(_identity, _check)] = Field(
        description=(
            "Folder with a needle set (needle_set.json), its books (haystack/**/*.txt) and, for "
            "sets without templates, task_template.txt with {haystack} and {question}."
        )
    )
    needle_set: PathText = Field(
        "needle_set.json", description="The needle set's place below data_dir."
    )
    depths: Count = Field(26, description="Depths of the needle in each book, from 0 to 100 %.")
    max_new_tokens: Count = Field(192, description="Tokens generated, beside the context's.")

    @property
    def most_tokens(self) -> tuple[str, int]:
        return "lengths and max_new_tokens", max(self.lengths) + self.max_new_tokens

    def missing_files(self, folder: Path) -> Iterator[str]:
        """A needle set and a book."""
        if self.needle_set not in self.files(folder):
            yield (
                f"{folder} has no needle set {self.needle_set} of NoLiMa; it is named by its place "
                "in this folder, like needle_set.json"
            )
        elif not self.books(folder):
            yield f"{folder} has no books haystack/**/*.txt of NoLiMa"

    def books(self, folder: Path) -> list[Path]:
        """The books among the folder's files, by name."""
        places = map(PurePosixPath, self.files(folder))
        return [folder / p for p in places if p.parts[0] == "haystack" and p.suffix == ".txt"]


class MrcrEvaluation(PromptEvaluation):
    """OpenAI's MRCR: the i-th of 2, 4 or 8 answers to equal requests in a conversation."""

    maker = "stages.evaluate.mrcr:samples"
    title = "MRCR"
    read = (".parquet", ".jsonl")
    published = 100
    kinds = 3
    new_tokens = 600

    data_dir: Annotated[PathText, Input(_identity, _check)] = Field(
        description="Folder with the Parquet files of openai/mrcr, or JSONL of the same fields."
    )
    lengths: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[8192, 16384, 32768],
        min_length=1,
        description="Most tokens of a conversation and its answer; the least are half as many.",
    )
    samples: Count | None = Field(
        None, description="Samples at each length and count of needles, the first; default: all."
    )

    def missing_files(self, folder: Path) -> Iterator[str]:
        """A file of samples."""
        if not self.files(folder):
            yield f"{folder} has no Parquet or JSONL file of openai/mrcr"


class HelmetEvaluation(PromptEvaluation):
    """HELMET: questions behind passages (RAG) and keys of a JSON object (arXiv:2410.02694)."""

    maker = "stages.evaluate.helmet:samples"
    title = "HELMET"
    published = 1000
    new_tokens = 100

    data_dir: Annotated[PathText, Input(_identity, _check)] = Field(
        description="HELMET's folder data, of which kilt/ and json_kv/ are read."
    )
    tasks: Annotated[list[HelmetTaskName], AfterValidator(different)] = Field(
        default=[*HELMET_TASKS], min_length=1, description="Tasks, by HELMET's names."
    )
    lengths: Annotated[list[Count], AfterValidator(different), AfterValidator(_published)] = Field(
        default=[8192, 16384, 32768],
        min_length=1,
        description="Tokens of a prompt and its answer; a longer prompt loses its last passages.",
    )
    samples: Count | None = Field(
        100, description="Questions of a task at each length, drawn by the seed; null: all."
    )

    @property
    def most_samples(self) -> int:
        questions = min(self.samples or self.published, self.published)
        return sum(questions * HELMET_TASKS[name].depths for name in self.tasks)

    def files(self, folder: Path) -> list[str]:
        return sorted(name for name in self._named() if (folder / name).is_file())

    def missing_files(self, folder: Path) -> Iterator[str]:
        """The files of the tasks and lengths."""
        for name in self._named():
            if not (folder / name).is_file():
                yield f"{folder} has no {name} of HELMET"

    def _named(self) -> list[str]:
        tasks = [HELMET_TASKS[name] for name in self.tasks]
        tests = {task.file.format(k=task.counts[n]) for task in tasks for n in self.lengths}
        return sorted(tests | {task.examples for task in tasks if task.examples is not None})
