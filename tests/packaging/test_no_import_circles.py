"""No modules of the package import each other in a circle, read from the syntax trees (1 s)."""

import ast
from collections.abc import Mapping, Set

from test_import_direction import PACKAGE, module_name


def imported() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, in functions and for type checking too."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & files.keys()
                graph[module] |= submodules or {str(node.module)} & files.keys()
    return graph


def circles(graph: Mapping[str, Set[str]]) -> list[set[str]]:
    """The sets of more than one node of which each leads to every other."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            for node in graph[ahead.pop()] - found:
                found.add(node)
                ahead.append(node)
        return found

    reach = {node: reached(node) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        circle = {other for other in reach[node] if node in reach[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def test_no_modules_import_each_other() -> None:
    found = [{module.removeprefix("titan_rl.") for module in circle} for circle in circles(imported())]
    assert [sorted(circle) for circle in found] == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
