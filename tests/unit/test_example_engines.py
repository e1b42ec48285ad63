"""The training example and its engines: they differ only at the wrap."""

import ast
import inspect
from pathlib import Path

import engines

ROOT = Path(__file__).parents[2]
LOOP = {"module", "forward_backward", "step", "save", "load"}


def test_the_training_script_names_the_engine_once_where_it_wraps():
    tree = ast.parse((ROOT / "examples" / "train_omni.py").read_text())
    wraps = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "wrap_engine"]
    assert len(wraps) == 1
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == "args.engine"]
    assert names == [wraps[0].args[0]]
    words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {"engine"}
    assert not words & {"DistributedDataParallel", "fully_shard", "deepspeed", "isinstance", "hasattr"}


def test_the_loop_asks_of_an_engine_only_what_each_has():
    tree = ast.parse((ROOT / "examples" / "train_omni.py").read_text())
    asked = {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "engine"
    }  # of the variable, not of `args`
    assert asked == LOOP
    for engine in engines.Engine.__subclasses__():
        public = {name for name, _ in inspect.getmembers(engine, callable) if not name.startswith("_")}
        assert public == LOOP - {"module"}
        for name in public:
            assert inspect.signature(getattr(engine, name)) == inspect.signature(getattr(engines.Engine, name))
