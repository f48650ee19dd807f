"""How well the start of a search tells good head masks: gradients of the gates against regression.

    python -m tests.benchmarks.search_start recipes/study/enumerable_model --window 32

Random masks on budget are measured. A ridge regression learns each KV head's worth from all of
them; a gradient tells it from one backward pass at one mask. Printed are, for each, its correlation
with the log-likelihoods of those masks (in-sample for the regression), and log-likelihood and score
of the mask that it proposes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from bosch.budget import swa_budget
from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.window import Window
from data_prep.documents.calibration import forced_records
from data_prep.text import haystack_words

Worth = npt.NDArray[np.float64]
_TASKS = ("niah_single_2", "niah_multikey_1", "niah_multikey_2")


def main() -> None:
    options = _options()
    objective = _objective(options)
    shape = objective.num_layers, objective.num_key_value_heads
    units = shape[0] * shape[1]
    sliding = swa_budget(units, options.ratio)
    rng = np.random.default_rng(0)
    bits = np.array([rng.permutation(units) >= sliding for _ in range(options.masks)])
    evaluations = [objective.evaluate(HeadMask(row.reshape(shape))) for row in bits]
    values = np.array([one.log_likelihood for one in evaluations])
    _print(f"{options.masks} random masks", np.nan, values.max(), np.nan)

    def show(name: str, worth: Worth) -> None:
        keep = np.zeros(units, dtype=np.bool_)
        keep[np.argsort(-worth, kind="stable")[: units - sliding]] = True
        proposed = objective.evaluate(HeadMask(keep.reshape(shape)))
        correlation = float(np.corrcoef(bits @ worth, values)[0, 1])
        _print(name, correlation, proposed.log_likelihood, proposed.score)

    centred = bits - bits.mean(axis=0)
    for strength in (1, 4, 16):
        system = centred.T @ centred + strength * np.eye(units)
        worth = np.linalg.solve(system, centred.T @ (values - values.mean()))
        show(f"ridge regression, strength {strength}", worth)
    masks = {
        "every head full": HeadMask.all_full(*shape),
        "every head sliding": HeadMask.all_sliding(*shape),
        "a random mask": HeadMask(bits[0].reshape(shape)),
    }
    for name, mask in masks.items():
        gradient = objective.gate_gradient(mask)
        show(f"gradient with {name}", np.array(gradient.values).reshape(-1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory of a base model")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--examples", type=int, default=12)
    parser.add_argument("--masks", type=int, default=30)
    return parser.parse_args()


def _objective(options: argparse.Namespace) -> Objective:
    model: Any = load_model(options.model, dtype="float32")
    prepare_for_search(model)
    records = forced_records(
        _TASKS, options.examples, options.length, "calibration", 42,
        AutoTokenizer.from_pretrained(options.model), haystack_words(None),
    )  # fmt: skip
    calibration = CalibrationSet.from_records(record for _, record in records)
    return Objective(model, calibration, Window(options.window))


def _print(name: str, correlation: float, log_likelihood: float, score: float) -> None:
    line = f"{name:34} {correlation:6.3f} {log_likelihood:9.3f} {score:6.3f}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
