"""What a search loses and saves when calibration questions share their haystacks.

    python -m tests.benchmarks.shared_haystacks recipes/study/enumerable_model --window 32

The same number of questions is asked with a haystack for each and with several to a haystack.
Printed are, as means over the calibration seeds with the lowest and highest one: what the search
cost, in passes with every head full and a haystack for each question, and score and log-likelihood
of its mask on held-out questions.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from bosch.calibration import CalibrationSet
from bosch.heads import HeadMask
from bosch.method.run import run_method
from bosch.method.settings import SearchSettings
from bosch.modeling import load_model, prepare_for_search
from bosch.objective import Objective
from data_prep.calibration import forced_records
from data_prep.essays import haystack_words
from data_prep.needles import SeedSpace

_SEED = 42


def main() -> None:
    options = _options()
    model: Any = load_model(options.model, dtype="float32")
    prepare_for_search(model)
    examples = partial(_examples, options, AutoTokenizer.from_pretrained(options.model))
    held_out = Objective(model, examples("evaluation", options.held_out, _SEED), options.window)
    full = held_out.evaluate(HeadMask.all_full(held_out.num_layers, held_out.num_key_value_heads))
    _print(f"every head full: held-out score {full.score:.3f} ({full.log_likelihood:.3f})")
    _print("method     ratio questions  passes               held-out score       log-likelihood")
    for method, ratio, questions in product(
        options.methods.split(","), options.ratios.split(","), (1, options.questions)
    ):
        found = []
        for seed in range(_SEED, _SEED + options.seeds):
            calibration = examples("calibration", options.examples, seed, questions)
            objective = Objective(model, calibration, options.window)
            run = run_method(
                method,
                objective,
                SearchSettings(
                    float(ratio), budget_per_layer=options.budget, break_ties=True, seed=seed
                ),
            )
            result = held_out.evaluate(run.mask)
            passes = run.costs["full_forward_equivalents"]
            found.append((passes, result.score, result.log_likelihood))
        columns = "  ".join(_summary(values) for values in np.array(found).T)
        _print(f"{method:10} {ratio:5} {questions:9}  {columns}")


def _examples(
    options: argparse.Namespace,
    tokenizer: Any,
    space: SeedSpace,
    count: int,
    seed: int,
    questions: int = 1,
) -> CalibrationSet:
    made = forced_records(
        options.tasks.split(","), count, options.length, space, seed, tokenizer,
        haystack_words(None), questions,
    )  # fmt: skip
    return CalibrationSet.from_records(record for _, record in made)


def _summary(values: Any) -> str:
    return f"{values.mean():6.3f} ({values.min():.2f}, {values.max():.2f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory of a base model")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--methods", default="bosch,bosch_plus")
    parser.add_argument("--ratios", default="0.5,0.75")
    parser.add_argument("--tasks", default="niah_single_2,niah_multikey_1")
    parser.add_argument("--questions", type=int, default=4, help="questions per haystack")
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--held-out", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--budget", type=int, default=20, help="evaluations per layer (kappa)")
    return parser.parse_args()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
