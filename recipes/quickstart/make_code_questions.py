"""Write the quickstart's task for lm-evaluation-harness: the next line of a Python file.

    python -m recipes.quickstart.make_code_questions recipes/quickstart/data/longbench/lcc.jsonl

The records have the form of LongBench's task lcc, under whose name the harness reads them; the code
is that of transformers' models (Apache-2.0), which the base model has not seen.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

SEED, QUESTIONS = 7, 12
CHARACTERS = 4000  # of context: about 1,300 of the model's tokens
LINE = range(20, 80)
CODE = re.compile(r"[\w.]+( = |\()|return |if |for ")


def source_files() -> list[Path]:
    """The models' files by name."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py"))


def question(path: Path, rng: Random) -> dict[str, Any] | None:
    """A record whose answer is a line of code of the file; None where the file has none."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    places = [
        number
        for number, line in enumerate(lines)
        if len(line.strip()) in LINE
        and CODE.match(line.strip())
        and sum(map(len, lines[:number])) > 2 * CHARACTERS
    ]
    if not places:
        return None
    number = rng.choice(places)
    context = "".join(lines[:number])[-CHARACTERS:].partition("\n")[2]
    answer = lines[number].strip()
    return {
        "input": "",
        "context": context,
        "answers": [answer],
        "length": len(context.split()),
        "dataset": "lcc",
        "language": "python",
        "all_classes": None,
        "_id": hashlib.sha256((context + answer).encode()).hexdigest()[:24],
        "source": f"transformers {importlib.metadata.version('transformers')}, {path.name}",
    }


def questions() -> Iterator[dict[str, Any]]:
    rng = Random(SEED)
    files = source_files()
    rng.shuffle(files)
    for path in files:
        record = question(path, rng)
        if record is not None:
            yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    records = [record for record, _ in zip(questions(), range(QUESTIONS), strict=False)]
    output.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
