"""Suites whose prompts are made from files that a user gives; no torch.

Each suite's package has `samples.py` with `samples(section, tokenizer, seed, chat template)`, which
returns the samples with their scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from bosch.errors import UserError
from data_prep.source_files import files_below
from stages.evaluate.section import SuiteSection, Work
from stages.fields import Count, PathText, different
from stages.formats import counted
from stages.inputs import Hasher, Input, hashed_files
from stages.stage import LoadedRecipe, call, position_faults

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


# Marks the field `data_dir` as a path: it is resolved, hashed and checked.
DataFolder = Annotated[PathText, Input(_identity, _check)]


class PromptEvaluation(SuiteSection):
    """Fields of all these suites: data, lengths, samples.

    `public_data` says where to find the data, `suffixes` are those of its files. The public data
    has `kinds` kinds of samples with `published` samples each at a length. `new_tokens` is the
    approximate length of an answer. Raise `version` when prompts or scores of the suite change.
    """

    runner = "stages.evaluate.prompt_suite:PromptSuite"
    public_data: ClassVar[str] = ""
    suffixes: ClassVar[tuple[str, ...]] = ()
    published: ClassVar[int] = 0
    kinds: ClassVar[int] = 1
    new_tokens: ClassVar[int] = 0
    version: ClassVar[int] = 5

    data_dir: DataFolder
    """Folder of the benchmark's data."""
    lengths: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[4096, 8192, 16384, 32768], min_length=1
    )
    """Tokens of the context."""
    samples: Count | None = None
    """Samples at each length, drawn by the seed; default: all."""

    def missing_files(self, folder: Path) -> Iterator[str]:
        """A message for each file that the folder lacks."""
        yield from ()

    def files(self, folder: Path) -> list[str]:
        """Names of the folder's files that are read."""
        paths = [path for path in files_below(folder) if path.suffix in self.suffixes]
        return sorted(path.relative_to(folder).as_posix() for path in paths)

    @property
    def data_files(self) -> list[Path]:
        return [Path(self.data_dir, name) for name in self.files(Path(self.data_dir))]

    @property
    def most_tokens(self) -> tuple[str, int]:
        """Tokens of the longest prompt and its answer, if known, and the fields that set them."""
        return "lengths", max(self.lengths)

    @property
    def most_samples(self) -> int:
        """Samples of the public data at a length."""
        return self.kinds * min(self.samples or self.published, self.published)

    @property
    def generated(self) -> int:
        """Approximate tokens of all answers at a length."""
        return self.most_samples * self.new_tokens

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        fields, tokens = self.most_tokens
        yield from position_faults(loaded, f"{where}.{fields}", tokens)

    def work(self) -> tuple[list[Work], list[str]]:
        samples, (_, longest) = self.most_samples, self.most_tokens
        beside = longest - max(self.lengths)  # tokens of an answer that the length does not include
        work = [
            Work(samples, samples * (length + beside), length, longest, logits=self.generated)
            for length in self.lengths
        ]
        return work, [f"{self.title}: up to {counted(samples, 'sample')} at each length"]

    def make(self, tokenizer: Any, seed: int, chat: ChatTemplate | None = None) -> list[Any]:
        """The samples of all lengths; their prompts include what a chat template adds."""
        return [*call(f"{type(self).__module__}.samples:samples", self, tokenizer, seed, chat)]
