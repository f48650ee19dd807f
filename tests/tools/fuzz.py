"""Faulty recipes and model directories by the thousand, from a seed.

    python -m tests.tools.fuzz --cases 5000 --seed 1

Each case breaks a valid recipe or model directory: by bytes, by values of wrong types and sizes, by
files that are missing or cut. Loading it, and computing the keys of all stages, must end within
seconds in a result or in one UserError that is fit to be printed; what is accepted must read the
same when it is written and read again. Prints every other end with its number, and exits 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bosch.errors import UserError
from bosch.heads import HeadMaskFile
from pipeline.recipe.load import load_recipe
from pipeline.run.graph import resolve
from pipeline.run.hashing import FileHasher
from tests.pipeline_case import ROOT, Case

_SECONDS = 10  # of the processor's time
_WAITING_SECONDS = 300  # in all: a busy machine makes it long, and a pipe forever
_MEMORY = 3 * 2**30  # of the process; a case that takes more ends with a MemoryError
_LONGEST = 20_000

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 10**6, 10**9, 2**31, 2**63, 10**40, 10**400,
    -(10**400),
    0.0, -0.5, 0.5, 1e-320, 1e308, float("inf"), float("nan"), "", " ", "no", "yes", "null", "auto",
    "1:30", "1e5", "0x10", "1_000", "32k", "2.5B", "9" * 400, "9" * 5000, "x" * 300, "x" * 10_000,
    "a/" * 2500, "~nobody-here/x", "/proc/self/x", "gone/link", "org/kernel", "org/kernel@v1:f",
    {"": "org/kernel"}, {"quant_method": "eetq"}, {"quant_method": []},
    "../..", "/", "/etc/passwd", "/dev/zero", "a/b", "\x00", "\x1b[31m", "\ud800", "ü→",
    "a\nb", "[bold]",
    "{x}", "%s", "qwen3", "niah_single_1", "full_attention",
    [], [[]], [None], [1, 2], [0.5, "x"], ["niah_single_1", "niah_single_1"], [{}],
    list(range(300)),
    {}, {"a": 1}, {"": None}, {"path": []}, {"a": {"b": {"c": [1]}}},
)  # fmt: skip
TOKENS = (
    "&a ", "*a", "<<: *a", "!!int ", "!!python/name:os.system ", "- ", "? ", ": ", "{", "}", "[",
    "]",
    "|\n", ">\n", "\t", "%YAML 1.2\n", "---\n", "...\n", "#", "'", '"', "\\", ",", "[" * 500,
    "{a: " * 500, "- " * 500, "9" * 500, "\u2028", "\ufeff", "\x07",
)  # fmt: skip


def broken_values(generator: random.Random, content: dict[str, Any]) -> dict[str, Any]:
    """A copy in which up to three values are others, gone or new."""
    content = copy.deepcopy(content)
    for _ in range(generator.randint(1, 3)):
        here: Any = content
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                break
            key = generator.choice(keys)
            if isinstance(here[key], (dict, list)) and here[key] and generator.random() < 0.75:
                here = here[key]
                continue
            if generator.random() < 0.1:
                del here[key]
            elif generator.random() < 0.1 and isinstance(here, dict):
                here[generator.choice(("path", "name", "x", "", "seed"))] = generator.choice(VALUES)
            else:
                here[key] = copy.deepcopy(generator.choice(VALUES))
            break
    return content


def broken_bytes(generator: random.Random, content: bytes) -> bytes:
    """Some bytes flipped, cut, doubled or put in."""
    data = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(data) + 1)
        kind = generator.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del data[at : at + generator.randint(1, 40)]
        elif kind == 2:
            data[at:at] = generator.choice(TOKENS).encode()
        elif kind == 3:
            data[at:at] = data[at : at + generator.randint(1, 60)]
        else:
            del data[at:]
    return bytes(data)


def break_recipe_values(generator: random.Random, case: Case) -> None:
    content = broken_values(generator, case.content)
    try:
        text = yaml.safe_dump(content, allow_unicode=generator.random() < 0.5).encode()
    except UnicodeEncodeError:
        text = json.dumps(content).encode()
    case.file.write_bytes(text)


def break_recipe_bytes(generator: random.Random, case: Case) -> None:
    case.file.write_bytes(broken_bytes(generator, case.file.read_bytes()))


def break_config(generator: random.Random, case: Case) -> None:
    path = case.model / "config.json"
    names = (
        "layer_types", "sliding_window", "use_sliding_window", "attn_logit_softcapping",
        "text_config", "attention_dropout", "kv_lora_rank", "sliding_window_pattern",
        "rope_scaling", "quantization", "quantization_config", "_attn_implementation",
        "attn_implementation", "_experts_implementation", "transformers_weights", "auto_map",
        "use_bidirectional_attention", "hybrid_attention", "model_type", "head_dim",
    )  # fmt: skip
    content = json.loads(path.read_text())
    content |= {generator.choice(names): generator.choice(VALUES) for _ in range(2)}
    path.write_text(json.dumps(broken_values(generator, content)))


def break_model_bytes(generator: random.Random, case: Case) -> None:
    path = generator.choice(sorted(case.model.iterdir()))
    path.write_bytes(broken_bytes(generator, path.read_bytes()))


def broken_json(generator: random.Random, content: dict[str, Any]) -> bytes:
    """A JSON text with other values or bytes, or one of a few megabytes."""
    if generator.randrange(4) == 0:
        return large_json(generator)
    if generator.randrange(4) == 0:
        return broken_bytes(generator, json.dumps(content).encode())
    return json.dumps(broken_values(generator, content)).encode()


def large_json(generator: random.Random) -> bytes:
    """JSON of a few megabytes that takes gigabytes, or seconds, where it is simply read."""
    piece = generator.choice((b"{},", b"[],", b"0,", b'"",', b'"a":1,', b'{"a":{}},', b"1e5,"))
    count = generator.choice((10_000, 90_000, 300_000, 2_000_000))
    opening, closing = (b'{"x":1,', b'"y":1}') if b'":1' in piece else (b'{"x":[', b"0]}")
    return opening + piece * count + closing


def break_index(generator: random.Random, case: Case) -> None:
    content = {"metadata": {}, "weight_map": {"w": "model.safetensors", "v": "model.safetensors"}}
    text = broken_json(generator, content)
    (case.model / "model.safetensors.index.json").write_bytes(text)


def break_header(generator: random.Random, case: Case) -> None:
    content = {"w": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {}}
    header = broken_json(generator, content)
    size = len(header).to_bytes(8, "little")
    (case.model / "model.safetensors").write_bytes(size + header + bytes(4))


def break_card(generator: random.Random, case: Case) -> None:
    content = {"license": "mit", "license_name": generator.choice(VALUES), "tags": ["a"]}
    front = yaml.safe_dump(broken_values(generator, content)).encode(errors="replace")
    (case.model / "README.md").write_bytes(
        b"---\n" + broken_bytes(generator, front) + b"\n---\n# Card\n"
    )


def deep(depth: int) -> Any:
    value: Any = {}
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def break_json(generator: random.Random, case: Case) -> None:
    """A file of the model that is many values, deep, a link that leads nowhere, or wrong."""
    names = (
        "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "tekken.json",
        "model.safetensors.index.json", "adapter_config.json",
    )  # fmt: skip
    path = case.model / generator.choice(names)
    old = json.loads(path.read_bytes()) if path.is_file() else {"a": ["b"]}
    path.unlink(missing_ok=True)
    kind = generator.randrange(4)
    if kind == 0:
        path.symlink_to(generator.choice(("gone", "..", path.name, "/proc/self/mem")))
    elif kind == 1:
        path.write_text(json.dumps(old | {"x": deep(generator.choice((40, 99, 101, 400)))}))
    elif kind == 2:
        names = ("attn_implementation", "additional_special_tokens", "fast_tokenizer_files", "x")
        changes = {generator.choice(names): generator.choice(VALUES) for _ in range(2)}
        path.write_text(json.dumps(old | changes))
    else:
        path.write_bytes(broken_json(generator, old))


def break_mask(generator: random.Random, case: Case) -> None:
    """A head mask that `search.method: given` takes, broken."""
    mask = {
        "format": 1, "model": "m", "method": "rand", "swa_ratio": 0.5, "window_size": 32,
        "sinks": 0, "num_layers": 4, "num_key_value_heads": 4,
        "swa_kv_heads": [[0, 1]] * 4, "score": None, "seed": 0,
    }  # fmt: skip
    path = case.folder / "mask.json"
    path.write_bytes(broken_json(generator, mask))
    case.content["search"] |= {"method": "given", "mask": str(path)}
    case.save()


def break_index_of_shards(generator: random.Random, case: Case) -> None:
    """MDS shards whose index is broken: it is read to name the files of a key."""
    source = ROOT / "tests" / "data" / "mds" / "plain"
    shutil.rmtree(case.corpus)
    shutil.copytree(source, case.corpus)
    path = case.corpus / "index.json"
    content = json.loads(path.read_text())
    if generator.randrange(4) == 0:
        content["shards"][0]["column_sizes"] = [generator.choice(VALUES)] * 20_000
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(broken_json(generator, content).replace(b'"x":[', b'"shards":[', 1))
    changes = {"kind": "mds", "path": str(case.corpus), "tokenizer": str(case.model)}
    case.content["prepare"]["sources"][0] |= changes
    case.save()


def break_files(generator: random.Random, case: Case) -> None:
    path = generator.choice(sorted(p for p in case.folder.rglob("*") if p != case.file))
    kind = generator.randrange(5)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.touch()
    elif kind == 4:
        path.symlink_to("gone")


BREAKS: tuple[Callable[[random.Random, Case], None], ...] = (
    break_recipe_values,
    break_recipe_values,
    break_recipe_bytes,
    break_config,
    break_model_bytes,
    break_index,
    break_header,
    break_header,
    break_card,
    break_files,
    break_json,
    break_json,
    break_mask,
    break_index_of_shards,
)


class TooSlow(BaseException):
    """A case took longer than any may."""


def try_case(number: int, seed: int, folder: Path) -> tuple[str, str | None]:
    """Which break case `number` is, and what is wrong with its end; None where it is right."""
    generator = random.Random(f"{seed} {number}")
    case = Case(folder)
    break_it = generator.choice(BREAKS)
    break_it(generator, case)

    def too_slow(signum: int, frame: object) -> None:
        raise TooSlow

    before = {
        number: signal.signal(number, too_slow) for number in (signal.SIGPROF, signal.SIGALRM)
    }
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    signal.alarm(_WAITING_SECONDS)
    try:
        loaded = load_recipe(case.file, fetch=False, env={})
        if loaded.recipe.search.mask is not None:
            HeadMaskFile.load(loaded.recipe.search.mask)
        values = loaded.recipe.model_dump(mode="json")
        if type(loaded.recipe).model_validate(values) != loaded.recipe:
            return break_it.__name__, "reads otherwise when it is written and read again"
        hasher = FileHasher(folder / "hashes.json")
        if [n.key for n in resolve(loaded, hasher)] != [n.key for n in resolve(loaded, hasher)]:
            return break_it.__name__, "its keys are not always the same"
    except UserError as fault:
        text = str(fault)
        if not text.strip() or len(text) > _LONGEST:
            return break_it.__name__, f"is refused with {len(text):,} characters"
    except TooSlow:
        return break_it.__name__, f"takes more than {_SECONDS} s, or waits for {_WAITING_SECONDS}"
    except BaseException:
        return break_it.__name__, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
    return break_it.__name__, None


def fuzz(cases: range, seed: int) -> list[str]:
    """Try cases; one text for each that ends wrong."""
    wrong = []
    for number in cases:
        with tempfile.TemporaryDirectory(prefix="bosch-fuzz-") as folder:
            kind, fault = try_case(number, seed, Path(folder) / "case")
        if fault is not None:
            wrong.append(f"case {number} of seed {seed}, {kind}: {fault}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    wrong = fuzz(range(options.cases), options.seed)
    for text in wrong[:20]:
        print(text)
    last = Counter(text.strip().splitlines()[-1] for text in wrong)
    for line, count in last.most_common(20):
        print(f"{count} × {line}")
    print(f"{options.cases:,} cases, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
