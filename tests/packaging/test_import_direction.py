"""Who may import what, read from the syntax trees (0.2 s)."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "titan_rl"

FLOORS = (
    {"train", "serve", "export", "submit", "playing", "cli"},
    {"config_registry"},
    {"run"},
    {"supervision", "hosts"},
    {"loop"},
    {"actors"},
    {"rpc"},
    {"gateway"},
    {"rollout"},
    {"isolation"},
    {"chat"},
    {"environments"},
    {"policy"},
    {"generation"},
    {"planner"},
    {"routing"},
    {"scheduling"},
    {"weights", "data_plane"},
    {"view"},
    {"metrics"},
    {"config"},
    {"*.config"},
    {
        "types",
        "errors",
        "bounds",
        "directories",
        "seeding",
        "support",
        "importing",
        "one_line",
        "overrides",
        "processes",
    },
)
"""From the top: a module imports from its own floor and from those below it. `*.config` are the configs of all parts,
plain data, which `config` composes."""

PURE = ("routing", "scheduling", "planner")


@dataclass(frozen=True)
class Import:
    """`source` imports `target`; both are dotted names, and so is the package at the target's root."""

    source: str
    target: str
    line: int

    @property
    def root(self) -> str:
        return self.target.split(".")[0]

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Every import in the file, those inside functions and `if TYPE_CHECKING` too."""
    source = module_name(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{source} imports by a relative name"
            base = node.module
            # `from titan_rl import seeding` names a module only in its alias.
            for alias in node.names:
                yield Import(source, f"{base}.{alias.name}" if base == "titan_rl" else base, node.lineno)


IMPORTS = sorted({each for path in PACKAGE.rglob("*.py") for each in imports_of(path)}, key=str)


def part(module: str) -> str:
    """The package or top-level module of titan_rl that a dotted name belongs to; empty for titan_rl itself."""
    return module.split(".")[1] if "." in module else ""


def floor_of(module: str) -> int:
    """Counted from the top; what has no floor counts as the ground, and another test names it."""
    name = "*.config" if is_config(module) and module.count(".") > 1 else part(module)
    return next((level for level, names in enumerate(FLOORS) if name in names), len(FLOORS))


def inside(module: str, *packages: str) -> bool:
    return part(module) in packages


def test_every_package_has_a_floor():
    known = set().union(*FLOORS) | {"__init__"}
    found = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found - known == set()


def test_a_package_imports_only_from_its_own_floor_and_below():
    upward = [
        str(each)
        for each in IMPORTS
        if each.root == "titan_rl"
        and part(each.source)
        and part(each.target)
        and floor_of(each.target) < floor_of(each.source)
    ]
    assert upward == []


def is_config(module: str) -> bool:
    return module.rpartition(".")[2] == "config"


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("monarch", lambda module: inside(module, "actors", "rpc", "run", "supervision", "hosts")),
        ("vllm", lambda module: module.startswith("titan_rl.generation.vllm")),
        ("torchtitan", lambda module: inside(module, "policy")),
    ],
)
def test_a_library_is_imported_only_where_it_belongs(library, allowed):
    assert [str(each) for each in IMPORTS if each.root == library and not allowed(each.source)] == []


def test_pure_packages_import_neither_asyncio_nor_torch_nor_an_engine():
    impure = {"asyncio", "torch", "monarch", "vllm", "torchtitan"}
    assert [str(each) for each in IMPORTS if inside(each.source, *PURE) and each.root in impure] == []


def test_config_modules_import_the_standard_library_and_titan_rl_only():
    allowed = sys.stdlib_module_names | {"titan_rl"}
    assert [str(each) for each in IMPORTS if is_config(each.source) and each.root not in allowed] == []


def test_importing_a_config_module_loads_no_component():
    plain = {*FLOORS[-1], ""}
    heavy = [
        str(each)
        for each in IMPORTS
        if is_config(each.source)
        and each.root == "titan_rl"
        and not is_config(each.target)
        and part(each.target) not in plain
    ]
    assert heavy == []
