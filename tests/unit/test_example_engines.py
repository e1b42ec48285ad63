"""The training scripts and their engines: they differ only at the wrap."""

import ast
import graphlib
import inspect
from pathlib import Path

import engines
import pytest
import train_ddp
import train_deepspeed
import train_fsdp2
import train_omni
from training import make_parser

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
