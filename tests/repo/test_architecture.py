"""The rules of the tree that no linter knows."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in sorted((ROOT / "packages").iterdir()) if path.is_dir()}
MAY_IMPORT = {name: {name, "collectives"} for name in PACKAGES} | {"collectives": {"collectives"}}
MODELS = {path.parent.name for path in (ROOT / "models/src/unisono_models").glob("*/train.py")}
COLLECTIVES = {
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_coalesced",
        "all_reduce",
        "all_reduce_coalesced",
    ),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *(
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "scatter",
        "scatter_object_list",
        "send",
        "recv",
        "isend",
        "irecv",
    ),
    *("batch_isend_irecv", "barrier", "monitored_barrier"),
}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def collective_calls(source: str) -> list[str]:
    """Calls of torch.distributed's collectives, by whatever name it was imported."""
    tree = ast.parse(source)
    modules, functions = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
            if node.module.startswith("torch.distributed"):
                functions |= {alias.asname or alias.name for alias in node.names if alias.name in COLLECTIVES}
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    modules.add("torch.distributed")
    return [c for c in calls if c in functions or (c.rpartition(".")[0] in modules and c.rpartition(".")[2] in COLLECTIVES)]


@pytest.mark.parametrize("name", PACKAGES)
def test_imports_go_one_way(name):
    for path in sources(f"packages/{name}/src"):
        for module in imports(path):
            assert not module.startswith(("unisono_models", "tests")), f"{path} imports {module}"
            if module.startswith("unisono."):
                assert module.split(".")[1] in MAY_IMPORT[name], f"{path} imports {module}"


def test_models_import_shared_code_but_not_each_other():
    folders = {path.parent.name for path in (ROOT / "models/src/unisono_models").glob("*/__init__.py")}
    assert folders > MODELS
    for path in sources("models"):
        own = path.relative_to(ROOT / "models/src/unisono_models").parts[0]
        known = {"training"} if own == "training" else {own, *(folders - MODELS)}
        for module in imports(path):
            assert not module.startswith("tests"), f"{path} imports {module}"
            if module.startswith("unisono_models."):
                assert module.split(".")[1] in known, f"{path} imports {module}"


@pytest.mark.parametrize("name", PACKAGES)
def test_namespace_has_no_init_and_leaf_is_typed(name):
    source = PACKAGES[name] / "src" / "unisono"
    assert not (source / "__init__.py").exists(), "it would hide the sibling packages"
    assert [path.name for path in source.iterdir() if path.is_dir()] == [name]
    assert (source / name / "py.typed").exists()


def test_only_collectives_communicates():
    others = [path for path in sources("packages", "models") if PACKAGES["collectives"] not in path.parents]
    assert {str(path): calls for path in others if (calls := collective_calls(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.all_gather([], x)",
        "from torch import distributed as d\nd.barrier()",
        "from torch.distributed import broadcast as send_to_all\nsend_to_all(x, 0)",
    ],
)
def test_the_guard_sees_a_collective_call(source):
    assert len(collective_calls(source)) == 1


def test_files_are_short_enough_to_read_in_one_go():
    long = {
        str(path.relative_to(ROOT)): n
        for path in sources("packages", "models", "scripts")
        if (n := len(path.read_text().splitlines())) > 600
    }
    assert long == {}


def test_every_tests_folder_is_a_package():
    folders = {path.parent for path in sources("tests")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
