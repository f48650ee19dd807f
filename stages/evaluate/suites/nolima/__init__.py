"""NoLiMa: its section of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from stages.evaluate.prompts import DataFolder, PromptEvaluation
from stages.fields import Count, PathText


class Nolima(PromptEvaluation):
    """NoLiMa: needles that share no words with their questions, in books (arXiv:2502.05167)."""

    title = "NoLiMa"
    public_data = "amodaresi/NoLiMa"
    suffixes = (".txt", ".json")
    published = 290  # needles in books, at each depth

    data_dir: DataFolder
    """Folder with a needle set (needle_set.json), its books (haystack/**/*.txt) and, for sets
    without templates, task_template.txt with {haystack} and {question}."""
    needle_set: PathText = "needle_set.json"
    """Path of the needle set below data_dir."""
    depths: Count = 26
    """Depths of the needle in each book, from 0 to 100 %."""
    max_new_tokens: Count = 192
    """Tokens generated, not counted in the length."""

    @property
    def most_tokens(self) -> tuple[str, int]:
        return "lengths and max_new_tokens", max(self.lengths) + self.max_new_tokens

    @property
    def most_samples(self) -> int:
        available = self.published * self.depths
        return min(self.samples or available, available)

    @property
    def generated(self) -> int:
        return self.most_samples * self.max_new_tokens

    def missing_files(self, folder: Path) -> Iterator[str]:
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


SUITE = Nolima
