"""The training scripts and their engines: they differ only at the wrap."""

import ast
import graphlib
import inspect
import json
from pathlib import Path

import ablate
import engines
import pytest
import train_ddp
import train_deepspeed
import train_fsdp2
import train_omni
import training
from training import make_parser

from orch.odb.state import RoundRecord
from orch.resume import ResumePoint

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = (train_ddp, train_fsdp2, train_deepspeed)
LOOP = {"module", "forward_backward", "step", "save", "load"}
# How an engine is wrapped, in plain code.
WRAPPED_BY = {train_ddp: "DistributedDataParallel", train_fsdp2: "fully_shard", train_deepspeed: "deepspeed.initialize"}


def parsed(name):
    return ast.parse((EXAMPLES / name).read_text())


def calls(tree):
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def names_in(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def without_the_wrap(source):
    """What a script is but for its docstring, the names of its engines, its wrap, and what only the wrap imports."""
    docstring, *statements = ast.parse(source).body
    assert ast.get_docstring(ast.Module([docstring], [])), "a script begins with its docstring"
    (wrap,) = [node for node in statements if isinstance(node, ast.FunctionDef) and node.name == "wrap"]
    (names,) = [node for node in statements if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "ENGINES"]
    ast.literal_eval(names.value)
    rest = [node for node in statements if node not in (wrap, names)]
    kept = []
    for node in rest:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            bound = {(alias.asname or alias.name).split(".")[0]: f"{module}import {alias.name}" for alias in node.names}
            kept += [text for name, text in bound.items() if name not in names_in(wrap)]
        else:
            kept.append(ast.unparse(node))
    return [signature_of(wrap), *kept]


def signature_of(wrap):
    """The part that `main` relies on; more arguments must have defaults."""
    assert not wrap.decorator_list
    first, second, *more = wrap.args.args
    assert len(more) == len(wrap.args.defaults)
    return f"{ast.unparse(first)}, {ast.unparse(second)} -> {ast.unparse(wrap.returns)}"


def test_the_scripts_are_the_same_but_for_the_wrap():
    first, *others = [without_the_wrap(inspect.getsource(script)) for script in SCRIPTS]
    assert first == [
        "model: nn.Module, args: Namespace -> Engine",
        "from __future__ import annotations",
        "from training import main",
        "if __name__ == '__main__':\n    main(wrap, ENGINES, __doc__)",
    ]
    assert others == [first, first]


@pytest.mark.parametrize("more", ["LR = 1", "import os", "def other(): ...", "main(wrap, ENGINES, None)"])
def test_whatever_else_a_script_had_would_be_seen(more):
    source = inspect.getsource(train_ddp)
    assert without_the_wrap(f"{source}\n{more}\n") == [*without_the_wrap(source), more.replace("(): ", "():\n    ")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrap_shows_the_engines_own_call(script):
    assert WRAPPED_BY[script] in calls(ast.parse(inspect.getsource(script.wrap)))


def test_what_the_scripts_share_names_no_engine():
    tree = parsed("training.py")
    assert calls(tree).count("wrap") == 1
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("engine", "engine_config")]
    assert not names_in(tree) & {"DistributedDataParallel", "fully_shard", "deepspeed", "isinstance", "hasattr"}


def test_the_loop_asks_of_an_engine_only_what_each_has():
    attributes = [node for node in ast.walk(parsed("training.py")) if isinstance(node, ast.Attribute)]
    asked = {node.attr for node in attributes if ast.unparse(node.value) == "engine"}  # the variable, not of `args`
    assert asked == LOOP
    for engine in engines.Engine.__subclasses__():
        public = {name for name, _ in inspect.getmembers(engine, callable) if not name.startswith("_")}
        assert public == LOOP - {"module"}
        for name in public:
            assert inspect.signature(getattr(engine, name)) == inspect.signature(getattr(engines.Engine, name))


def test_imports_of_the_examples_have_no_cycle():
    graph = {}
    for path in EXAMPLES.glob("*.py"):
        imports = [node for node in ast.walk(parsed(path.name)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
        graph[path.stem] = modules | {alias.name for node in imports for alias in node.names}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises if there is a cycle
    assert order.index("engines") < order.index("training") < order.index("train_ddp") < order.index("train_omni")


def test_each_engine_has_one_script():
    assert train_omni.ENGINES == ("ddp", "fsdp2", "zero1", "zero2", "zero3")
    assert sum(len(script.ENGINES) for script in SCRIPTS) == len(train_omni.ENGINES)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (train_ddp, ["--engine", "fsdp2"]),
        (train_ddp, ["--engine-config", "zero.json"]),
        (train_fsdp2, ["--engine", "zero2"]),
        (train_deepspeed, ["--engine", "ddp"]),
    ],
)
def test_a_script_refuses_what_belongs_to_another_engine(script, options, capsys):
    with pytest.raises(SystemExit):
        make_parser("", script.ENGINES).parse_args(options)
    said = capsys.readouterr().err
    assert ("invalid choice" in said and script.ENGINES[0] in said) or f"unrecognized arguments: {options[0]}" in said


def test_the_stage_of_zero_is_2_if_not_chosen():
    parser = make_parser("", train_deepspeed.ENGINES)
    assert [parser.parse_args(words).engine for words in ([], ["--engine", "zero3"])] == ["zero2", "zero3"]


COUNTS = ("steps", "epochs", "accumulate", "samples", "token-budget", "ranks-per-node", "max-length", "max-pixels")


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("name", [*COUNTS, "repeats", "hidden-size", "num-layers"])
def test_counts_below_1_are_refused(name, value, capsys):
    parser = make_parser("") if name in COUNTS else ablate.make_arguments()
    with pytest.raises(SystemExit):
        parser.parse_args([f"--{name}", value])
    assert f"argument --{name}: must be at least 1, but is {value} instead" in capsys.readouterr().err
    assert vars(parser.parse_args([f"--{name}", "1"]))[name.replace("-", "_")] == 1


def test_no_workers_are_a_number_of_workers_and_words_are_not(capsys):
    parser = make_parser("")
    assert parser.parse_args(["--num-workers", "0", "--seed", "0"]).num_workers == 0
    for words in (["--num-workers", "-1"], ["--seed", str(2**63)], ["--steps", "few"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
    said = capsys.readouterr().err
    assert "argument --num-workers: must be at least 0, but is -1 instead" in said
    assert "argument --seed: must be at most 9223372036854775807, but is 9223372036854775808 instead" in said
    assert "argument --steps: invalid integer value: 'few'" in said


class WrappedError(Exception):
    """A run was not refused before its model was wrapped."""


def refusal(*options):
    """What a run with these options is refused for before there is a model."""

    def wrap(model, args):
        raise WrappedError

    with pytest.raises(RuntimeError, match="Rank 0 failed") as caught:
        training.train(make_parser("").parse_args([str(option) for option in options]), wrap)
    return str(caught.value)


def test_places_that_cannot_be_written_are_refused_before_training(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "saved"):
        assert f"`--save` must lie where a folder can be written, but {folder}" in refusal("--save", folder)
    assert "`--report` must lie where a folder" in refusal("--report", file / "report.json")
    assert f"`--report` must be a file that can be written, but {tmp_path}" in refusal("--report", tmp_path)


def test_missing_folders_are_made_before_training(tmp_path):
    folders = tmp_path / "reports" / "today", tmp_path / "runs" / "saved"
    options = ["--report", str(folders[0] / "report.json"), "--save", str(folders[1])]
    training.check_run(make_parser("").parse_args(options))
    assert all(folder.is_dir() and not list(folder.iterdir()) for folder in folders)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    said = refusal("--resume", tmp_path / "nowhere", "--save", tmp_path / "nowhere")
    assert "`--resume` must be a folder that `--save` wrote, with options.json, a loader-<rank>.json" in said
    assert "nowhere has no options.json" in said


def test_data_that_cannot_be_read_are_refused_by_name(tmp_path):
    assert "`--data` must be a file that can be read" in refusal("--data", tmp_path / "none.jsonl")


def saved_with(folder, *options):
    """A folder with the options of a run, as `train` saves them, and a loader's state."""
    folder.mkdir()
    lasting = training.check_run(make_parser("").parse_args([str(option) for option in options]))
    (folder / "options.json").write_text(json.dumps(lasting))
    loader = RoundRecord(0).to_dict({"rank": 0, "num_ranks": 1})
    (folder / "loader-0.json").write_text(json.dumps(ResumePoint(loader=loader).to_dict()))
    return folder


def test_a_checkpoint_goes_on_only_with_its_own_options(tmp_path):
    saved = saved_with(tmp_path / "saved")
    parser = make_parser("")
    training.check_run(parser.parse_args(["--resume", str(saved), "--epochs", "2", "--num-workers", "0"]))
    for option, value, other in (("--lr", "0.002", "0.1"), ("--seed", "0", "1"), ("--token-budget", "2048", "1024")):
        said = f"`{option}` must be {value}, as in the run that was saved, but is {float(other):g} instead"
        assert said in refusal("--resume", saved, option, other)
    assert "`--prepend-placeholders` must be False" in refusal("--resume", saved, "--prepend-placeholders")
    (saved / "loader-0.json").unlink()
    assert "saved has no loader-0.json" in refusal("--resume", saved)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("options.json", lambda text: text[:-9], "options.json must be what `--save` wrote, but cannot be read"),
        ("options.json", lambda text: "[]", "options.json must hold ['--accumulate', "),
        ("options.json", lambda text: "{}", "options.json must hold ['--accumulate', "),
        ("loader-0.json", lambda text: "", "loader-0.json must be what `--save` wrote, but cannot be read"),
        ("loader-0.json", lambda text: "[]", "loader-0.json must be what `--save` wrote for rank 0, but is not"),
        (
            "loader-0.json",
            lambda text: text.replace("peaks", "peeks"),
            "but is not: ValueError: A state must have ['peaks']",
        ),
        ("loader-0.json", lambda text: text.replace('"rank": 0', '"rank": 1'), "`rank` of a saved state must be 0"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_its_file(name, damage, message, tmp_path):
    saved = saved_with(tmp_path / "saved")
    (saved / name).write_text(damage((saved / name).read_text()))
    assert message in refusal("--resume", saved)


def test_a_save_that_ends_half_way_leaves_no_checkpoint(tmp_path):
    class Failing:
        def save(self, folder):
            raise OSError("No space left on device")

    saved = saved_with(tmp_path / "saved")
    with pytest.raises(OSError, match="No space"):
        training._save(Failing(), saved, {}, {})
    assert "saved has no options.json" in refusal("--resume", saved)


def test_a_checkpoint_goes_on_only_with_its_own_data(tmp_path):
    records = [tmp_path / name / "records.jsonl" for name in ("first", "moved", "other")]
    for path, text in zip(records, ("{}\n", "{}\n", "[]\n"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    saved = saved_with(tmp_path / "saved", "--data", records[0])
    training.check_run(make_parser("").parse_args(["--resume", str(saved), "--data", str(records[1])]))
    said = refusal("--resume", saved, "--data", records[2])
    assert "`--data` must be 'records.jsonl (sha256 ca3d163bab055381)', as in the run that was saved" in said
    assert "`--data` must be 'records.jsonl" in refusal("--resume", saved)
    generated = saved_with(tmp_path / "generated")
    assert "`--data` must be None, as in the run" in refusal("--resume", generated, "--data", records[0])


ZERO_FILES = {
    "no section": ({"gradient_clipping": 1.0}, "must have a section `zero_optimization`, but has none"),
    "no sections": ([], "must have a section `zero_optimization`, but has none"),
    "auto": (
        {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"},
        r"`gradient_clipping` of .*zero.json must be a number \(0: none\), but is 'auto' instead",
    ),
}


@pytest.mark.parametrize("case", ZERO_FILES)
def test_files_of_deepspeeds_that_say_too_little_are_refused(case, tmp_path):
    config, message = ZERO_FILES[case]
    (tmp_path / "zero.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        engines.read_zero_options(tmp_path / "zero.json", 2)


def test_auto_in_zero_options_is_left_to_deepspeed(tmp_path):
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 7}}
    (tmp_path / "zero.json").write_text(json.dumps(config))
    options = engines.read_zero_options(tmp_path / "zero.json", 3)
    assert "reduce_bucket_size" not in options
    assert (options["sub_group_size"], options["clip"]) == (7, 0.0)
