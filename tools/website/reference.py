"""The reference: a page for each group of public names, which mkdocstrings fills from their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    title: str
    guide: str  # the page that explains them
    modules: tuple[str, ...]  # whose public names they are
    folders: tuple[str, ...] = ()  # those of them that come from here; all where empty


GROUPS = {
    "functions": Group("Functions", "api", ("stream_attention",), ("ops", "dispatch.plan", "base.errors")),
    "modules": Group("Modules", "modules", ("stream_attention",), ("core",)),
    "masks": Group("Masks", "masks", ("stream_attention.masks",)),
    "caches": Group("Caches", "kv_cache", ("stream_attention",), ("base.kv_layouts", "kvcache")),
    "distributed": Group("Several GPUs", "distributed", ("stream_attention.distributed",)),
    "memory": Group(
        "Memory", "memory", ("stream_attention.utils.memory",), ("checkpoint", "chunked", "stream_attention_tools")
    ),
    "huggingface": Group(
        "Hugging Face", "huggingface", ("stream_attention.integration.hf", "stream_attention.integration.caches")
    ),
}


def public(source: Path, module: str) -> dict[str, str]:
    """The names of a module's __all__, or what it defines, and the module that it imports each from.

    The file is read and not imported: the site is built without torch.
    """
    path = source / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            origins.update({alias.name: node.module for alias in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names = ast.literal_eval(node.value)
    return {name: origins.get(name, "") for name in names if not name.startswith("_")}


def _is_in(module: str, folders: tuple[str, ...]) -> bool:
    return any(module == folder or module.startswith(f"{folder}.") for folder in folders)


def pages(source: Path) -> dict[str, str]:
    """Markdown by name. A public name of the package that no group takes is an error."""
    written, taken = {}, set()
    for stem, group in GROUPS.items():
        lines = [f"# {group.title}: reference", f"With words and examples: [{group.title}](../docs/{group.guide}.md)."]
        for module in group.modules:
            found = public(source, module)
            names = [name for name, origin in found.items() if not group.folders or _is_in(origin, group.folders)]
            taken |= set(names)
            lines.append(f"From `{module}`:")
            lines += [f"::: {module}.{name}" for name in sorted(names, key=str.lower)]
        written[stem] = "\n\n".join(lines) + "\n"
    missing = sorted(set(public(source, "stream_attention")) - taken)
    if missing:
        raise ValueError(f"tools/website/reference.py: expected a group for every public name; got none for {missing}")
    return written
