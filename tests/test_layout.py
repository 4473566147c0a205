"""The shape of the project: who may import whom, what the wheel holds, and that the README's file tree is true."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIPELINES = ("train", "search", "distill")
SOURCES = {
    p.relative_to(ROOT).as_posix(): ast.parse(p.read_text(encoding="utf-8"))
    for top in ("lasd", *PIPELINES)
    for p in sorted((ROOT / top).rglob("*.py"))
}
PIPELINE_PACKAGES = {"accelerate", "datasets", "peft", "bitsandbytes", "deepspeed", "trl", "optuna", "skopt"}
LAZY_PEFT = {"lasd/decoding/loading.py"}  # loads the adapter that a user names
LAZY_TRL = {"lasd/settings.py"}  # one strict reader of settings for all three pipelines
LOADERS = {"lasd/decoding/loading.py", "lasd/demo_model.py"}
HUB_WRITES = {"push_to_hub", "upload_folder", "upload_file", "create_repo", "create_commit"}


def imports(tree: ast.Module) -> Iterator[str]:
    """What a file imports, inside functions too, but not what only type checkers read."""
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    typing_only = {id(inner) for guard in guards for inner in ast.walk(guard)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in typing_only:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(object, method) of each method call, as source text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr


def allowed(path: str, module: str) -> bool:
    """Tells whether the layers let a file import a module."""
    top, package = path.split("/")[0], module.split(".")[0]
    if package in PIPELINES and package != top:
        return False
    if path.startswith("lasd/decoding/"):
        above = ("lasd.drafters", "lasd.evaluation", "lasd.conversations", "lasd.cli")
        if module.startswith(above) and not module.startswith("lasd.drafters.base"):
            return False
    if re.fullmatch(r"lasd/drafters/(?!__init__|base)\w+\.py", path) and module.startswith("lasd.drafters"):
        own = path.removesuffix(".py").replace("/", ".")
        return module.startswith((own, "lasd.drafters.base"))
    return (
        top != "lasd"
        or package not in PIPELINE_PACKAGES
        or ((package == "peft" and path in LAZY_PEFT) or (package == "trl" and path in LAZY_TRL))
    )


def test_imports_follow_the_layers() -> None:
    assert [
        f"{path}: {module}" for path, tree in SOURCES.items() for module in imports(tree) if not allowed(path, module)
    ] == []


def test_imports_are_written_in_full() -> None:
    assert [f"{path}: {module}" for path, tree in SOURCES.items() for module in imports(tree) if module[0] == "."] == []


def test_models_are_loaded_in_few_places() -> None:
    model_class = re.compile(r"(\w+\.)*(AutoModel\w*|\w+ForCausalLM|PreTrainedModel)")
    found = {
        p
        for p, tree in SOURCES.items()
        for on, name in calls(tree)
        if name == "from_pretrained" and model_class.fullmatch(on)
    }
    assert found <= LOADERS


def test_only_artifacts_write_to_the_hub() -> None:
    found = {path for path, tree in SOURCES.items() for _, name in calls(tree) if name in HUB_WRITES}
    assert all(path.startswith("lasd/artifacts/") for path in found)


def test_recipes_hold_no_python() -> None:
    assert list((ROOT / "recipes").rglob("*.py")) == []


def test_importing_lasd_and_its_command_line_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, lasd, lasd.cli; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


def test_the_public_names_are_there() -> None:
    import lasd

    assert [getattr(lasd, name).__name__ for name in lasd.__all__] == lasd.__all__
    with pytest.raises(AttributeError, match="no attribute 'Decode'; it has Decoder"):
        _ = lasd.Decode


def tree_of_readme() -> dict[str, str]:
    """Path -> description, from the README's file tree: two spaces a level, folders end in a slash."""
    block = re.search(r"## Files\n.*?```\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block, "README.md has no file tree under '## Files'"
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in filter(str.strip, block[1].splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, text = line.strip().partition(" ")
        found["".join(folders[:depth]) + name] = text.strip()
        folders[depth:] = [name] if name.endswith("/") else []
    return found


def test_what_the_readme_tree_names_is_there_and_described() -> None:
    assert [path for path, text in tree_of_readme().items() if not text or not (ROOT / path).exists()] == []


def test_every_module_is_in_the_readme_tree() -> None:
    tree = tree_of_readme()
    whole = tuple(f for f in tree if f.endswith("/") and not any(p != f and p.startswith(f) for p in tree))
    modules = [path for path in SOURCES if not path.endswith("/__init__.py")]
    assert [path for path in modules if path not in tree and not path.startswith(whole)] == []


@pytest.mark.slow
def test_the_wheel_holds_lasd_only(tmp_path: Path) -> None:
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # modules that are gone would come back from there
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"lasd"}
    assert {n for n in names if n.endswith(".py")} == {path for path in SOURCES if path.startswith("lasd/")}
