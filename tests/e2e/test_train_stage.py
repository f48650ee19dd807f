"""The training stage as users run it: its outputs, and that it resumes exactly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import bosch  # noqa: F401, registers hybrid models with transformers
from bosch.errors import StoppedError, UserError
from bosch.model.loading import load_config
from bosch.score.calibration import CalibrationExample
from stages.train.answers import Answers
from stages.train.checkpoint import CheckpointWriter
from stages.train.data import PackedSequences
from stages.train.loop import Loop
from stages.train.metrics import MetricsLog
from stages.train.model import load_for_training
from stages.train.run import build_loop
from stages.train.stage import TrainingSummary, checkpoint_folders, read_metrics
from stages.train.storage import RestartPoints, restart_step
from tests.folders import file_contents
from tests.offloaded_training import train_offloaded
from tests.training_case import (
    SEQUENCE_LENGTH,
    make_case,
    metrics,
    stage_config,
    train_here,
    train_in_processes,
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def undisturbed(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work_dir = tmp_path_factory.mktemp("undisturbed")
    train_here(case, work_dir)
    return work_dir


@pytest.fixture(scope="module")
def killed(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Work that was killed at step 5; tests copy it."""
    work_dir = tmp_path_factory.mktemp("killed")
    done = train_in_processes(case, work_dir, kill_at_step=5)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return work_dir


def assert_same(work_dir: Path, undisturbed: Path) -> None:
    """Compare records and checkpoints bit for bit."""
    assert metrics(work_dir) == metrics(undisturbed)
    assert file_contents(work_dir / "checkpoints") == file_contents(undisturbed / "checkpoints")


def _auto_map(model: Path) -> Any:
    return json.loads((model / "config.json").read_text())["auto_map"]


def test_training_leaves_its_promised_files_and_no_pickles(case: Path, undisturbed: Path) -> None:
    assert sorted(path.name for path in undisturbed.iterdir()) == [
        "checkpoints", "metrics.jsonl", "summary.json", "tensorboard",
    ]  # fmt: skip
    start = case / "materialize" / "model"
    code, auto_map = sorted(start.glob("*.py")), _auto_map(start)
    assert code and auto_map
    for tokens in (384, 1280):
        checkpoint = undisturbed / "checkpoints" / f"tokens-{tokens}"
        assert sorted(os.listdir(checkpoint)) == sorted(os.listdir(start))
        # With these files, transformers alone loads the model.
        assert all((checkpoint / file.name).read_bytes() == file.read_bytes() for file in code)
        assert _auto_map(checkpoint) == auto_map
        card = (checkpoint / "README.md").read_text()
        assert card == f"# Card\n\n| continual pretraining | {tokens:,} tokens |\n"
    summary = json.loads((undisturbed / "summary.json").read_text())
    records = metrics(undisturbed)
    assert summary["final_loss"] == records[-1]["loss"]
    assert (summary["tokens"], summary["steps"]) == (1280, 10)
    assert (summary["processes"], summary["sharding"]) == (1, "none") and summary["seconds"] > 0
    assert summary["checkpoints"] == {"tokens-384": 3, "tokens-1280": 10}
    assert [r["step"] for r in records] == list(range(1, 11))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert read_metrics(undisturbed)[3].checkpoint_seconds > 0  # three steps were done by then


@pytest.mark.parametrize(("masking", "labels"), [(False, True), (True, False)])
def test_every_step_equals_that_of_a_plain_loop(
    case: Path, tmp_path: Path, masking: bool, labels: bool
) -> None:
    """With other than default rate, decay, clipping and betas; norms do not decay.

    With masks, the loss is that of every document on its own; with labels, of the tokens that have
    one.
    """
    if labels:
        prepared = load_from_disk(str(case / "prepare" / "train"))
        third = [[i if i % 3 else -100 for i in ids] for ids in prepared["input_ids"]]
        (tmp_path / "materialize").symlink_to(case / "materialize")
        case = tmp_path
        prepared.add_column("labels", third).save_to_disk(str(case / "prepare" / "train"))
    short = {"total_tokens": 512, "checkpoint_tokens": [], "document_masking": masking}
    changes = {
        "learning_rate": 3e-3, "warmup_ratio": 0.5, "min_lr_ratio": 0.1, "adam_beta1": 0.6,
        "adam_beta2": 0.8, "weight_decay": 0.5, "max_grad_norm": 0.3,
    }  # fmt: skip
    work_dir = tmp_path / "work"
    train_here(case, work_dir, train={**short, **changes})
    data = PackedSequences(case / "prepare" / "train", 7)
    model = AutoModelForCausalLM.from_pretrained(case / "materialize" / "model")
    names = dict(model.named_parameters())
    groups = [
        {"params": [names[name] for name in names if ("norm" in name) is norm], "weight_decay": w}
        for norm, w in ((False, 0.5), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.6, 0.8))
    # Two of four steps warm up; then a third and two thirds of half a cosine.
    rates = [3e-3 * factor for factor in (0.5, 1.0, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25)]
    for step, (rate, record) in enumerate(zip(rates, metrics(work_dir), strict=True)):
        losses: list[torch.Tensor] = []
        for row in (data[index] for index in range(4 * step, 4 * step + 4)):
            ids = torch.as_tensor(row["input_ids"]).long()
            for document in ids.split(row["document_lengths"].tolist() if masking else len(ids)):
                logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
                predicted = (torch.as_tensor(row["labels"]).long() if labels else document)[1:]
                each = torch.nn.functional.cross_entropy(logits, predicted, reduction="none")
                losses += each[predicted >= 0]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = sum(p.grad.square().sum() for p in names.values()).sqrt().item()
        expected = {"loss": loss.item(), "learning_rate": rate, "grad_norm": norm}
        assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert norm > 0.3
        for parameter in names.values():
            parameter.grad *= 0.3 / norm
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    end = load_file(work_dir / "checkpoints" / "tokens-512" / "model.safetensors")
    for name, value in end.items():
        torch.testing.assert_close(value, names[name], rtol=1e-4, atol=2e-5, msg=name)


def test_a_killed_run_ends_like_the_undisturbed_one(
    case: Path, undisturbed: Path, killed: Path, tmp_path: Path
) -> None:
    shutil.copytree(killed, tmp_path / "5")
    assert train_in_processes(case, tmp_path / "10", kill_at_step=10).returncode
    for step, points in ((5, [2, 4]), (10, [6, 8])):
        work_dir = tmp_path / str(step)
        assert metrics(work_dir)[-1]["step"] == step
        assert sorted(map(restart_step, (work_dir / "restart").glob("step-*"))) == points
        summary = train_here(case, work_dir)
        assert summary["final_loss"] == metrics(undisturbed)[-1]["loss"]
        assert_same(work_dir, undisturbed)
        assert not (work_dir / "restart").exists()


def test_a_run_killed_while_saving_resumes_from_the_point_before(
    case: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed while it writes its second restart point, and while it writes a checkpoint."""
    publish, write = RestartPoints.publish, CheckpointWriter.write

    def killed_publish(self: RestartPoints, step: int, layout: Any) -> None:
        if step == 4:
            raise KeyboardInterrupt
        publish(self, step, layout)

    def killed_write(self: CheckpointWriter, tokens: int, *rest: Any) -> None:
        if tokens == 1280:
            (tmp_path / "checkpoints" / "writing").mkdir()
            (tmp_path / "checkpoints" / "writing" / "model-00001-of-00002.safetensors").touch()
            raise KeyboardInterrupt
        write(self, tokens, *rest)

    monkeypatch.setattr(RestartPoints, "publish", killed_publish)
    with pytest.raises(KeyboardInterrupt):
        train_here(case, tmp_path)
    assert (tmp_path / "restart" / "writing" / ".metadata").exists()
    assert (tmp_path / "restart" / "step-2").exists()

    monkeypatch.setattr(RestartPoints, "publish", publish)
    monkeypatch.setattr(CheckpointWriter, "write", killed_write)
    with pytest.raises(KeyboardInterrupt):
        train_here(case, tmp_path)
    monkeypatch.undo()
    train_here(case, tmp_path)
    assert_same(tmp_path, undisturbed)


def test_only_whole_checkpoints_of_this_training_are_named(
    case: Path, undisturbed: Path, killed: Path, tmp_path: Path
) -> None:
    """Added files end no training, nor do removed checkpoints; finished work stays finished."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    foreign = tmp_path / "checkpoints" / "tokens-999" / "config.json"
    foreign.parent.mkdir()
    foreign.touch()
    (tmp_path / "checkpoints" / ".DS_Store").touch()
    shutil.rmtree(tmp_path / "checkpoints" / "tokens-384")
    (tmp_path / "summary.json").mkdir()
    assert train_here(case, tmp_path)["checkpoints"] == {"tokens-1280": 10}
    assert metrics(tmp_path) == metrics(undisturbed)
    assert list(checkpoint_folders(tmp_path)) == ["tokens-1280"]
    (tmp_path / "checkpoints" / "tokens-1280" / "note.txt").touch()
    assert TrainingSummary.finished(tmp_path) is not None


def test_training_continues_while_a_restart_point_is_written(
    case: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The point of step 2 is complete after step 3, and holds the state after step 2."""
    publish, log, third_step_done = RestartPoints.publish, Loop.log, threading.Event()

    def late_publish(self: RestartPoints, step: int, layout: Any) -> None:
        assert third_step_done.wait(60)
        publish(self, step, layout)

    def log_and_die(self: Loop, *args: Any) -> None:
        log(self, *args)
        if self.step == 3:
            assert not (tmp_path / "restart" / "step-2").exists()
            third_step_done.set()
            self.restarts.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(RestartPoints, "publish", late_publish)
    monkeypatch.setattr(Loop, "log", log_and_die)
    with pytest.raises(KeyboardInterrupt):
        train_here(case, tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "restart" / "step-2").exists()
    train_here(case, tmp_path)
    assert_same(tmp_path, undisturbed)


def half_zeroed(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes(len(content) - half)


def test_a_damaged_summary_or_checkpoint_of_finished_work_is_made_again(
    case: Path, undisturbed: Path, tmp_path: Path
) -> None:
    for damaged_file in (
        "metrics.jsonl",
        "checkpoints/tokens-1280/model.safetensors",
    ):
        work = tmp_path / damaged_file.replace("/", "-")
        shutil.copytree(undisturbed, work)
        (work / damaged_file).write_bytes(half_zeroed((work / damaged_file).read_bytes()))
        train_here(case, work)
        assert_same(work, undisturbed)


def test_finished_work_is_not_repeated(
    case: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file_contents(undisturbed)
    # Killed between writing the summary and removing restart points.
    point = undisturbed / "restart" / "step-10"
    point.mkdir(parents=True)
    (point / "point.json").touch()
    monkeypatch.setattr("stages.train.run.build_loop", lambda *args: pytest.fail("trained again"))
    assert train_here(case, undisturbed) == json.loads(before["summary.json"])
    assert file_contents(undisturbed) == before


def made_examples(folder: Path) -> list[CalibrationExample]:
    """Prompts with the model's own answers; two of five have other answers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    examples = []
    for number, answer in enumerate((1, 2, 3, 1, 2)):
        prompt = torch.tensor([[(number + 3 * n) % 64 for n in range(9 + number)]])
        new = {"max_new_tokens": answer, "min_new_tokens": answer}
        ids = model.generate(prompt, do_sample=False, **new)[0].tolist()
        if number > 2:
            ids[-1] = (ids[-1] + 1) % 64
        examples.append(CalibrationExample(tuple(ids), answer))
    return examples


def test_scores_of_answers_are_those_of_generation_and_change_no_loss(
    case: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of the model after the last step are known."""
    trained = undisturbed / "checkpoints" / "tokens-1280"
    examples = made_examples(trained)
    monkeypatch.setattr(Answers, "of", lambda runtime, inputs: Answers(examples, every=4))
    train_here(case, tmp_path)
    steps = metrics(tmp_path)
    names = ("answers", "answer_log_likelihood")
    found = {step["step"]: [step.pop(name) for name in names] for step in steps if names[0] in step}
    assert list(found) == [4, 8, 10] and found[10][0] == 3 / 5
    model, nats = AutoModelForCausalLM.from_pretrained(trained), 0.0
    for example in examples:
        ids = torch.tensor([example.input_ids])
        losses = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        nats += losses[-example.answer_length :].sum().item()
    assert found[10][1] == pytest.approx(nats / len(examples), rel=1e-5)
    assert steps == metrics(undisturbed)


_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class _KernelCalls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is _KERNEL
        return func(*args, **(kwargs or {}))


def test_recomputation_and_offloading_change_no_bit(case: Path, tmp_path: Path) -> None:
    """Attention's kernels run again only if whole layers are recomputed.

    Offloaded to the host are the inputs [N, C] of both layers, as planned, and tensors outside of
    the layers.
    """
    train = {"total_tokens": 2 * 128, "checkpoint_tokens": []}
    calls, offloaded = {}, {}
    for way, offload in (("none", False), ("none", True), ("attention", False), ("full", True)):
        runtime = {"checkpointing": way, "offload_activations": offload}
        folder = tmp_path / f"{way}-{offload}"
        with _KernelCalls() as counted:
            offloaded[way, offload] = train_offloaded(case, folder, train=train, runtime=runtime)
        calls[way] = counted.count
        assert metrics(folder) == metrics(tmp_path / "none-False"), (way, offload)
    assert calls["attention"] == calls["none"] > 0 and calls["full"] == 2 * calls["none"]
    config = load_config(str(case / "materialize" / "model"))
    inputs = 4 * config.num_hidden_layers * config.hidden_size * 4 * SEQUENCE_LENGTH
    outside = offloaded["full", True] - inputs
    assert 0 <= outside < offloaded["none", True] / 4
    assert not offloaded["none", False] and not offloaded["attention", False]


def test_layers_are_recomputed_if_memory_is_short(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With runtime.checkpointing = auto. The shared disk is tested before the model is loaded."""
    checked: list[RestartPoints] = []
    monkeypatch.setattr(RestartPoints, "check_shared_disk", lambda self: checked.append(self))
    monkeypatch.setattr("stages.train.parallel.least_memory", lambda device: 1.0)
    loop = build_loop(
        stage_config(train={"total_tokens": 128, "checkpoint_tokens": []}),
        {name: case / name for name in ("prepare", "materialize")},
        tmp_path,
        RestartPoints(tmp_path),
    )
    assert loop.metrics_log is not None
    loop.metrics_log.close()
    assert loop.model.is_gradient_checkpointing and loop.runtime.checkpointing == "full"
    assert len(checked) == 1


def test_small_updates_survive_in_float32_masters(tmp_path: Path) -> None:
    """Steps far below bf16's resolution add up, and the result is saved in bf16."""
    case = make_case(tmp_path / "case", dtype="bfloat16")
    train_here(
        case, tmp_path / "work",
        train={"learning_rate": 8e-4, "warmup_ratio": 0.0, "mixed_precision": "bf16",
               "weight_decay": 0.0, "min_lr_ratio": 1.0},
    )  # fmt: skip
    name = "model.norm.weight"  # all ones: bf16 would round 1 - 8e-4 back to 1
    start = load_file(case / "materialize" / "model" / "model.safetensors")
    end = load_file(tmp_path / "work" / "checkpoints" / "tokens-1280" / "model.safetensors")
    assert {value.dtype for value in end.values()} == {
        torch.bfloat16
    } and start.keys() == end.keys()
    assert (end[name] != start[name]).any()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "checkpoints" / "tokens-1280")
    assert model.dtype == torch.bfloat16


def test_a_stop_signal_writes_a_restart_point_at_the_next_step(
    case: Path, undisturbed: Path, tmp_path: Path
) -> None:
    write = MetricsLog.write

    def write_and_signal(self: MetricsLog, step: int, *values: Any, **options: Any) -> None:
        write(self, step, *values, **options)
        if step == 2:  # after this step has decided on its own restart point
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLog, "write", write_and_signal)
        with pytest.raises(StoppedError, match="after step 3 of 10, with a restart point"):
            train_here(case, tmp_path)
    newest = max((tmp_path / "restart").glob("step-*"), key=lambda path: path.name)
    assert newest.name == "step-3"
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    train_here(case, tmp_path)
    assert_same(tmp_path, undisturbed)


def test_a_restart_point_is_loaded_if_a_parameter_has_no_gradient(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW makes no moments for it; without care the missing moments would count as damage."""

    def load(*arguments: Any, **options: Any) -> Any:
        model = load_for_training(*arguments, **options)
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
        return model

    def write_and_stop(self: MetricsLog, step: int, *values: Any, **options: Any) -> None:
        write(self, step, *values, **options)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    write = MetricsLog.write
    monkeypatch.setattr("stages.train.run.load_for_training", load)
    monkeypatch.setattr(MetricsLog, "write", write_and_stop)
    with pytest.raises(StoppedError, match="after step 2 of 10, with a restart point"):
        train_here(case, tmp_path)
    train_here(case, tmp_path)


def test_a_deepspeed_restart_point_of_more_processes_is_refused_before_the_model_is_loaded(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = RestartPoints(tmp_path)
    points.writing.mkdir(parents=True)
    points.publish(1, {"sharding": "deepspeed", "processes": 4})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("stages.train.run.build_loop", lambda *args: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"runtime\.sharding = deepspeed on 4 process"):
        train_here(case, tmp_path, runtime={"sharding": "deepspeed"})
