"""Every fault of a recipe is one sentence with its dotted path; all are reported at once."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from pipeline.cli import main
from pipeline.recipe.load import apply_overrides, load_recipe, parse_override
from pipeline.recipe.processes import find_world, without_other_processes
from pipeline.recipe.yaml_file import parse_yaml
from stages.fields import (
    Section,
    bytes_of,
    parse_count,
    parse_flag,
    parse_number,
    split,
)
from stages.prepare.stage import PrepareConfig
from stages.stage import World
from tests.pipeline_case import ROOT, Case


def test_a_valid_recipe_has_typed_values_and_absolute_paths(case: Case) -> None:
    """Among its values are the largest seed and the largest lengths."""
    changes = ["search.swa_ratio=0.75", "train.learning_rate=1e-5", "seed=2147483647"]
    loaded = load_recipe(case.file, [*changes, "evaluate.ruler.lengths=[1024]"], env={})
    assert (loaded.recipe.name, loaded.recipe.seed) == ("tiny", 2**31 - 1)
    assert loaded.recipe.search.swa_ratio == 0.75
    assert loaded.recipe.train.learning_rate == 1e-5
    assert (loaded.info.layers, loaded.info.kinds.heads) == (4, 4)
    assert Path(loaded.recipe.runtime.output_root).is_absolute()
    assert load_recipe(case.file, ["seed=0", f"name={'n' * 100}"], env={}).recipe.seed == 0


def test_relative_paths_start_at_the_recipe_or_the_current_directory(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file at its folder, on the command line at the current directory."""
    other = Case(case.folder / "other")
    case.content["model"]["path"] = "model"
    case.content["prepare"]["sources"][0]["path"] = "corpus"
    del case.content["runtime"]["output_root"]
    case.save()
    monkeypatch.chdir(other.folder)
    loaded = load_recipe(case.file, env={})
    assert loaded.recipe.model.path == str(case.model)
    assert loaded.recipe[PrepareConfig].sources[0].path == str(case.corpus)
    assert loaded.output_root == ROOT / "runs", "a default, which nobody wrote"
    overrides = ["model.path=model", "prepare.sources.0.path=corpus", "runtime.output_root=out"]
    loaded = load_recipe(case.file, overrides, env={})
    assert loaded.recipe.model.path == str(other.model)
    assert loaded.recipe[PrepareConfig].sources[0].path == str(other.corpus)
    assert loaded.output_root == other.folder / "out"
    loaded = load_recipe(case.file, ["runtime={processes: 1}"], env={})
    assert loaded.output_root == ROOT / "runs", "a default below what was replaced"
    for path in ("nothing", "./no/thing", f"{other.folder}/no/thing"):
        place = other.folder / path
        with pytest.raises(UserError, match=f"there is no directory {place}"):
            load_recipe(case.file, [f"model.path={path}"], env={}, fetch=False)


def test_brackets_in_the_name_of_a_recipes_folder_are_no_glob(tmp_path: Path) -> None:
    case = Case(tmp_path / "data [1]")
    (tmp_path / "data 1" / "corpus").mkdir(parents=True)
    (tmp_path / "data 1" / "corpus" / "b.txt").write_text("another text")
    for path, read in (("corpus/*.txt", ["a.txt"]), ("corpus/b.txt", [])):
        case.content["prepare"]["sources"][0]["path"] = path
        case.save()
        source = load_recipe(case.file, env={}, input_files=False).recipe[PrepareConfig].sources[0]
        assert [file.name for file in map(Path, glob.glob(str(source.path)))] == read


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_count, "1.5k", 1536), (parse_count, "2M", 2**21), (parse_count, " 1,024 ", 1024),
        (parse_count, "2.5B", 2_500_000_000), (parse_count, "0.0001k", None),
        (parse_count, "12,345,678", 12_345_678), (parse_count, "1234,567", None),
        (parse_count, 5, 5),
        (bytes_of, "40GB", 40 * 10**9), (bytes_of, "512MiB", 2**29), (bytes_of, "7", 7),
        (bytes_of, "7B", 7), (bytes_of, "7i", None), (bytes_of, "7iB", None),
        (bytes_of, "1 kb", 1000), (bytes_of, "1ti", 2**40), (bytes_of, "1e3", None),
        (parse_number, "1e-5", 1e-5), (parse_number, 2, 2),
        *((parse_flag, word, True) for word in ("yes", "On", "true")),
        *((parse_flag, word, False) for word in ("no", "OFF", "false")), (parse_flag, "y", "y"),
        (split, "a, b", ["a", "b"]), (split, 5, 5),
    ],
)  # fmt: skip
def test_text_fields_are_refused_or_cleaned(
    parse: Callable[[Any], Any], text: Any, value: Any
) -> None:
    if value is None:
        with pytest.raises(ValueError, match=r"."):
            parse(text)
    else:
        assert repr(parse(text)) == repr(value)


def test_an_invalid_section_causes_no_faults_by_its_defaults(case: Case) -> None:
    """The default lengths of needle tasks are longer than this model's positions."""
    assert "\n" not in case.fault("evaluate=[]")
    assert "\n" not in case.fault("evaluate.ruler=[]")
    assert "\n" not in case.fault("prepare.calibration=[]")


def test_all_faults_are_reported_at_once(case: Case) -> None:
    """Of fields, and if they are valid, those between them and of files."""
    fields = case.fault("model.dtpye=float32", "train.learning_rate=fast", "seed=-1", "typo=1")
    (case.model / "tokenizer.json").unlink()
    between = case.fault(
        "prepare.sources.0.path=no/where", "search.swa_ratio=0.9", "search.buckets=[0,0.25]",
        "search.window_size=256", "train.checkpoint_tokens=[9000]",
    )  # fmt: skip
    for message, starts in (
        (fields, ["model.dtpye", "train.learning_rate", "seed", "typo"]),
        (between, [
            "prepare.sources.0.path", "search.swa_ratio",
            "search.window_size: 256 is not shorter than prepare.calibration.length",
            "search.window_size: 256 is not shorter than prepare.sequence_length",
            "train.checkpoint_tokens", "model.path",
        ]),
    ):  # fmt: skip
        lines = message.splitlines()
        assert lines[0] == f"{len(starts)} faults" and len(lines) == 1 + len(starts)
        for start in starts:
            assert sum(line.startswith(f"  {start}") for line in lines) == 1, start


def test_vllm_needs_its_package_room_for_a_token_more_and_no_sinks(case: Case) -> None:
    case.change_config(max_position_embeddings=512)
    load_recipe(case.file, ["evaluate.ruler.lengths=[512]"], env={})
    vllm = "evaluate.engine=vllm"
    fits = case.fault(vllm, "evaluate.ruler.lengths=[511]")
    assert "vllm is not installed here; launch/setup_engine.sh vllm" in fits
    asked = ["evaluate.ruler.lengths=[512,1024]", "evaluate.ruler.yarn={1024: 2}", "search.sinks=4"]
    message = case.fault(vllm, *asked)
    assert "evaluate.ruler.lengths: 512 with the template or vLLM's BOS is more than" in message
    assert "evaluate.ruler.yarn: RoPE cannot be stretched: evaluate.engine must be hf" in message
    assert "evaluate.engine: vllm serves no hybrid with search.sinks" in message


def test_unreadable_files_are_named(case: Case, tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match=f"{path}: cannot be read: "):
            load_recipe(path)
    for text, expected in (
        ("", "bad.yaml: holds no mapping; expected keys such as 'model:'"),
        ("a: 1\n---\nb: 2", "bad.yaml:2: .* expected a single document in the stream, but found"),
        ("a: 1\nb: 2\na: 3", r"bad.yaml:3: not valid YAML: the key 'a' appears here a second time"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ):
        bad = tmp_path / "bad.yaml"
        bad.write_text(text)
        with pytest.raises(UserError, match=expected):
            load_recipe(bad)


def test_unquoted_words_are_read_as_text(case: Case) -> None:
    """YAML 1.1 reads `no` as false; the types of a recipe's fields decide."""
    loaded = load_recipe(
        case.file,
        [
            "train.mixed_precision=no", "train.liger=no", "train.document_masking=on",
            "prepare.sources.0.filters={min_tokens: 4, max_tokens: 4}",
        ],
    )  # fmt: skip
    train = loaded.recipe.train
    assert (train.mixed_precision, train.liger, train.document_masking) == ("no", False, True)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("search.swa_ratio", "expected key.path=value"),
        ("seed.x=1", "seed is the value 3 and has no keys"),
        ("prepare.sources.1.weight=2", "'1' is none of its positions 0 to 0"),
        ("prepare.sources.a.weight=2", "'a' is none of its positions"),
        ("search.buckets=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_are_named(case: Case, override: str, expected: str) -> None:
    case.content["seed"] = 3
    case.save()
    with pytest.raises(UserError, match="override") as caught:
        load_recipe(case.file, [override])
    assert expected in str(caught.value)


def test_an_override_changes_only_its_own_place_of_an_alias() -> None:
    content = parse_yaml("a: [&s {n: {m: 1}}, *s]\nb: {<<: *s}", "file")
    changes = dict(map(parse_override, ["a.0.n.m=2", "b.n.m=3"]))
    changed = apply_overrides(Section, content, changes)
    assert changed == {"a": [{"n": {"m": 2}}, {"n": {"m": 1}}], "b": {"n": {"m": 3}}}
    with pytest.raises(UserError, match=r"a is a list of 0$"):
        apply_overrides(Section, {"a": []}, {("a", "0"): 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Run #5", "Run #5"),
        (' /data/a\t#b: "c" ', '/data/a\t#b: "c"'),
        ("#5", "#5"),
        ("5 # five", "5 # five"),
        ("a#b", "a#b"),
        ("'Run #5'", "Run #5"),
        ('["Run #5", b]', ["Run #5", "b"]),
        ("{a: 'Run #5'}", {"a": "Run #5"}),
    ],
)
def test_a_hash_sign_in_an_override_starts_no_comment(text: str, value: object) -> None:
    assert parse_override(f"report.title={text}") == (("report", "title"), value)


def test_empty_corpora_are_refused(case: Case, tmp_path: Path) -> None:
    (case.corpus / "a.txt").write_text("")
    assert "the corpus at" in case.fault()
    (tmp_path / "empty").mkdir()
    assert "empty holds no file" in case.fault(f"prepare.sources.0.path={tmp_path / 'empty'}")


def test_the_number_of_processes_comes_from_torchruns_variables(case: Case) -> None:
    env = {
        "NPROC_PER_NODE": "2",
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
    }
    world = load_recipe(case.file, env=env | {"MASTER_PORT": "65535"}).world
    found = (world.size, world.node_rank, world.master_addr, world.master_port)
    assert found == (4, 1, "h", 65535)
    for changes, said in (
        ({"NNODES": "two"}, "NNODES=two"), ({"NODE_RANK": "2"}, "NODE_RANK=2"),
        ({"NPROC_PER_NODE": "1000000000"}, "NPROC_PER_NODE=1000000000: expected an integer"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0: expected an integer from 1 to 999999"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected an integer from 1 to 65535"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            load_recipe(case.file, env=env | changes)


@pytest.mark.parametrize(
    ("configured", "env", "world"),
    [
        ("auto", {}, World(processes_per_node=3, gpus=3)),
        ("auto", {"CUDA_VISIBLE_DEVICES": "0, 2"}, World(processes_per_node=2, gpus=2)),
        ("auto", {"CUDA_VISIBLE_DEVICES": "2,-1,0"}, World(gpus=1)),
        ("auto", {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, World(processes_per_node=3, gpus=3)),
        *(("auto", {"CUDA_VISIBLE_DEVICES": none}, World()) for none in ("", "-1", "NoDevFiles")),
        (5, {}, World(processes_per_node=5, gpus=3)),
        *((5, {"NPROC_PER_NODE": any_}, World(1, 0, 5, gpus=3)) for any_ in ("gpu", "", " ")),
        (5, {"NPROC_PER_NODE": "1", "NODE_RANK": "0"}, World(processes_per_node=1, gpus=3)),
        # Variables that another launcher left are not read on a single node.
        (1, {"NNODES": "1", "MASTER_ADDR": "h", "MASTER_PORT": "no"}, World(gpus=3)),
        ("auto", {"NNODES": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
         World(2, 0, 3, "h", 1, 3)),
    ],
)  # fmt: skip
def test_there_is_one_process_per_gpu_by_default(
    configured: Any, env: dict[str, str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [Path(f"/dev/nvidia{name}") for name in ("0", "1", "2", "ctl", "-uvm")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(devices))
    assert find_world(configured, env) == world


@pytest.mark.parametrize(
    "name",
    [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "NNODES",
        "MASTER_PORT", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        "MPI_LOCALNRANKS", "PET_NODE_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP",
        "FSDP_OFFLOAD_PARAMS",
    ],
)  # fmt: skip
def test_stages_do_not_get_variables_of_other_launchers(name: str) -> None:
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "NCCL_SOCKET_IFNAME": "ib0",
            "OMP_NUM_THREADS": "4", "SLURM_JOB_ID": "7", "HF_HOME": "/h", "SIZE": "1"}  # fmt: skip
    assert without_other_processes({**kept, name: "2"}) == kept


def test_validate_refuses_unknown_tasks(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # gpqa is only in files without a suffix, as a tag that others include.
    known = "evaluate.tasks=[gsm8k, longbench, arc_easy, gpqa, ruler]"
    assert main(["validate", str(case.file), known, "evaluate.ruler.data_dir=."]) == 2
    said = capsys.readouterr().err
    assert "squad.json" in said and "there is no task" not in said
    # boolq is a task of the folder super_glue.
    (tmp_path / "own.yaml").write_text("task: my_own\ndataset_path: json\n")
    own = f"evaluate.include_path=[{tmp_path}]"
    tasks = "evaluate.tasks=[boolq, gsm9k, my_own, my_other]"
    assert main(["validate", str(case.file), own, tasks]) == 2
    said = capsys.readouterr().err
    assert "evaluate.tasks: there is no task gsm9k; did you mean gsm8k" in said
    assert "no task my_other" in said and "boolq" not in said and "my_own;" not in said


def test_validate_refuses_a_template_with_a_token_without_an_embedding(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = ["validate", str(case.file), "evaluate.apply_chat_template=true"]
    (case.model / "chat_template.jinja").write_text("<user>{{ messages[0].content }}")
    size = json.loads((case.model / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((case.model / "tokenizer.json").read_text())
    for token, status in ((size - 1, 0), (size, 2)):
        tokenizer["added_tokens"] = [{"id": token, "content": "<user>"}]
        (case.model / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert main(chat) == status
    assert f"makes token {size} (<user>)" in capsys.readouterr().err


def test_validate_reads_the_first_document_of_each_source(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    (case.folder / "b.jsonl").write_text('{"body": "some text"}\n')
    source = {"name": "b", "kind": "jsonl", "path": "b.jsonl"}
    case.content["prepare"]["sources"].append(source)
    case.save()
    assert main(["validate", str(case.file)]) == 2
    said = "prepare.sources.1: {}, line 1: no field `text` (there is body); set text_field"
    assert said.format(case.folder / "b.jsonl") in capsys.readouterr().err
    source["text_field"] = "body"
    # Its tokenizer may be on the hub, which validate does not ask.
    place = str(ROOT / "tests" / "data" / "mds" / "plain")
    shards = {"name": "c", "kind": "mds", "path": place, "tokenizer": "nobody/nothing"}
    case.content["prepare"]["sources"].append(shards)
    case.save()
    assert main(["validate", str(case.file)]) == 0
    shards["text_field"] = "gone"
    case.save()
    assert main(["validate", str(case.file)]) == 2
    said = "index.json: no column `gone` (there is domain, input_ids, length); set text_field"
    assert said in capsys.readouterr().err


def test_validate_loads_a_tokenizer_of_sentencepiece(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers converts it, which may fail, so a run is not the first to try."""
    (case.model / "tokenizer.json").unlink()
    (case.model / "tokenizer.model").write_bytes(b"no model")
    assert main(["validate", str(case.file)]) == 2
    said = capsys.readouterr().err.splitlines()  # transformers may warn before
    assert f"model.path: {case.model}: no tokenizer could be loaded from here" in said[-1]
    assert [line for line in said if line.startswith("error: ")] == said[-1:]
    assert not any("Traceback" in line for line in said)
